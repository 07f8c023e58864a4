"""The schedules of attention beside the plain path: `python benchmarks/attention.py` prints one JSON line.

Rows of T tokens, as many tokens in all for each T, GPT-2 124M's heads (12 of width 64). For each T and each schedule that this device has: milliseconds of the
forward and of forward and gradient (median; the schedules take turns), megabytes of temporaries that the compiler sets aside for the gradient, and the same as
multiples of the plain path, where below 1 is better. `auto` is what model.attention_backend=auto takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpt2jax import runtime
from gpt2jax.errors import InputError
from gpt2jax.kernels.backends import BACKENDS, Case, attention, choose
from gpt2jax.kernels.platform import target_platform

H, K = 12, 64


def programs(backend: str, args: list[jax.Array]) -> tuple[Callable[..., Any], Callable[..., Any], float]:
    """Forward, forward and gradient, both compiled, and the megabytes of temporaries of the latter."""
    forward = lambda *args: attention(*args, backend=backend)  # noqa: E731
    gradient = jax.value_and_grad(lambda *args: forward(*args).astype(jnp.float32).sum(), (0, 1, 2))
    compiled = [jax.jit(f).lower(*args).compile() for f in (forward, gradient)]
    return compiled[0], compiled[1], compiled[1].memory_analysis().temp_size_in_bytes / 1e6


def measure(T: int, tokens: int, dtype: str, rounds: int) -> dict[str, Any]:
    B = max(1, tokens // T)
    args = [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate([(B, T, H, K), (B, H, T, K), (B, H, T, K)])]
    case = Case(target_platform(), dtype, T, H, H, K, K)
    able = [name for name in BACKENDS if name != "auto" and _is_able(name, case)]
    compiled = {name: programs(name, args) for name in able}
    seconds: dict[str, list[list[float]]] = {name: [[], []] for name in able}
    for i in range(rounds + 1):
        for name in able:
            for j in range(2):
                start = time.perf_counter()
                jax.block_until_ready(compiled[name][j](*args))
                seconds[name][j] += [time.perf_counter() - start] if i else []  # the first round warms up
    rows = {name: [statistics.median(seconds[name][j]) * 1e3 for j in range(2)] + [compiled[name][2]] for name in able}
    names = ("forward_ms", "gradient_ms", "temporaries_MB")
    out: dict[str, Any] = {"rows": B, "auto": choose("auto", case)}
    for name, row in rows.items():
        out[name] = {key: round(value, 1) for key, value in zip(names, row, strict=True)}
        out[name] |= {f"{key.split('_')[0]}_x_plain": round(value / plain, 2) for key, value, plain in zip(names, row, rows["xla"], strict=True)}
    return out


def _is_able(name: str, case: Case) -> bool:
    try:
        return bool(choose(name, case))
    except InputError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in all rows together")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runtime.start()
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for dtype in options.dtypes:
        result[dtype] = {T: measure(T, options.tokens, dtype, options.rounds) for T in options.lengths}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
