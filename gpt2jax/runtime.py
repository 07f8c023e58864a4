"""What a process sets up before it computes: JAX's persistent compilation cache, and a heap that keeps its memory, on large pages."""

from __future__ import annotations

import ctypes
import logging
import os
import sys


def start() -> None:
    """Called once by each command before JAX runs. Environment variables that a user has set win."""
    _keep_heap()
    _ask_for_large_pages()
    _cache_compiled_programs()
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax warns of its own affairs, and prints tracebacks of errors that it raises as well


def _keep_heap() -> None:
    """Have glibc keep freed memory instead of handing it back to the system.

    XLA on a CPU allocates and frees its temporaries at every step; by default each step then faults in all their pages again, which took about half of a small
    training step's time on a shared 2-core machine. The same as MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 MALLOC_TOP_PAD_=67108864.
    """
    libc = _glibc()
    if libc is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # names and numbers of <malloc.h>
    for option, value in ((arena_max, 1), (mmap_max, 0), (trim_threshold, -1), (top_pad, 64 << 20)):
        libc.mallopt(option, value)


def _ask_for_large_pages() -> None:
    """Let the heap to come lie on pages of 2 MB, where the kernel gives them to who asks.

    Half of the memory is taken as one block, marked, and given back untouched: the heap keeps its addresses, and hands them out from now on. Reading the
    weights once a token then misses fewer address translations (measured: 10 % more tokens a second at batch 1), and loading them takes fewer page faults.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size, page, huge_page_advice = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, 2 << 20, 14
    block = libc.malloc(size)
    if block:  # a limit on memory may refuse it
        start = -(-block // page) * page
        libc.madvise(start, (block + size - start) // page * page, huge_page_advice)
        libc.free(block)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None


def _cache_compiled_programs() -> None:
    """Compiled programs go to the user's cache folder: a second start takes about a second instead of many."""
    import jax

    from gpt2jax.data import default_cache_dir

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
