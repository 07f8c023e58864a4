"""What the program that is being traced is for: chosen here, and asked by whatever has a schedule of its own for a platform."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from gpt2jax.errors import InputError

_NAMES = {"cpu": "cpu", "gpu": "gpu", "tpu": "tpu", "cuda": "gpu", "rocm": "gpu"}
#: Part of the key of jit's caches, unlike a contextvar: a function traced for one platform is traced anew for another.
_platform = jax.make_user_context(None)


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Programs traced in this context are for `platform` (cpu, gpu, cuda, rocm, tpu), which need not be JAX's own: compiling for devices that are not there."""
    with _platform(canonical(platform)):
        yield


def target_platform() -> str:
    """cpu, gpu or tpu: what the program being traced is for."""
    return _platform.value or canonical(jax.default_backend())


def canonical(name: str) -> str:
    """cpu, gpu or tpu."""
    if name not in _NAMES:
        raise InputError(f"platform {name!r} is unknown; it is one of cpu, gpu (cuda, rocm), tpu")
    return _NAMES[name]
