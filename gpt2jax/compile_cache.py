"""JAX's persistent compilation cache, which makes a second start take about a second instead of many."""

from __future__ import annotations

import os


def enable() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR already says where."""
    import jax

    from gpt2jax.data import default_cache_dir

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
