"""What a process sets up before it computes: JAX's persistent compilation cache, and a heap that keeps its memory."""

from __future__ import annotations

import ctypes
import logging
import os
import sys


def start() -> None:
    """Called once by each command before JAX runs. Environment variables that a user has set win."""
    _keep_heap()
    _cache_compiled_programs()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of its own affairs, which no user can act on


def _keep_heap() -> None:
    """Have glibc keep freed memory instead of handing it back to the system.

    XLA on a CPU allocates and frees its temporaries at every step; by default each step then faults in all their pages again, which took about half of a small
    training step's time on a shared 2-core machine. The same as MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 MALLOC_TOP_PAD_=67108864.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt  # glibc only; another C library has none, or does nothing
    except (AttributeError, OSError):
        return
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # names and numbers of <malloc.h>
    for option, value in ((arena_max, 1), (mmap_max, 0), (trim_threshold, -1), (top_pad, 64 << 20)):
        mallopt(option, value)


def _cache_compiled_programs() -> None:
    """Compiled programs go to the user's cache folder: a second start takes about a second instead of many."""
    import jax

    from gpt2jax.data import default_cache_dir

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
