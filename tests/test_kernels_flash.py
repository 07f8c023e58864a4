"""Blockwise attention equals the plain path, forward and gradient, skips what the mask hides, and keeps no T x T array."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_helpers import Example, equations, shapes

from gpt2jax.kernels import flash
from gpt2jax.kernels.attention import Rule, attend_causally
from gpt2jax.kernels.backends import attention


def attend(*args: object, **options: object) -> jax.Array:
    return attention(*args, backend="flash", **options)


@pytest.mark.parametrize(
    "example",
    [
        Example(T=1, H=3, G=1, K=64, V=64),
        Example(T=127, H=6, G=2, K=64, V=64, packed=True, sinks=True),
        Example(T=128, H=4, G=2, K=12, V=20, packed=True, rule=Rule(softcap=3.0, scale=0.7)),
        # without sinks, rows of the second document start with blocks that show them nothing
        Example(T=1000, H=4, G=2, K=10, V=6, packed=True, rule=Rule(window=300, softcap=5.0)),
        Example(T=1024, H=2, G=2, K=64, V=64, sinks=True, rule=Rule(window=257)),
        Example(T=1024, H=1, G=1, K=64, V=64),
    ],
    ids=lambda example: f"{example.T}",
)
def test_equals_the_plain_path(example: Example) -> None:
    example.check(attend)


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 17, 40])
def test_equals_the_plain_path_at_each_edge_of_a_window(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """29 tokens in 4 blocks of 8, the last one short."""
    monkeypatch.setattr(flash, "BLOCK", 8)
    Example(T=29, H=4, G=2, K=6, V=3, sinks=True, rule=Rule(window=window)).check(attend)


def test_bfloat16_is_near_float32() -> None:
    """T of 5 blocks of 208, 15 of them padding: as near as the plain path in bfloat16 is."""
    example = Example(T=1025, H=2, G=1, K=16, V=16)
    exact = example.evaluate(attend_causally)
    example.inputs.update({name: x.astype(jnp.bfloat16) for name, x in example.inputs.items()})
    got, plain = example.evaluate(attend), example.evaluate(attend_causally)
    for name in exact:
        assert got[name].dtype == jnp.bfloat16
        error, allowed = (np.linalg.norm(x[name].astype(np.float32) - exact[name]) for x in (got, plain))
        assert error < 1.2 * allowed + 1e-6, name


@pytest.mark.parametrize(("window", "pairs"), [(None, 4 + 3 + 2 + 1), (12, 1 + 2 + 3 + 3), (9, 1 + 2 + 2 + 2), (1, 4)])
def test_blocks_that_the_mask_hides_are_skipped(window: int | None, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of 8 tokens: each pair of blocks with anything to see is visited once forward and once backward."""
    visited: list[tuple[int, int]] = []
    mask = flash._mask

    def counted(i: jax.Array, j: jax.Array, *rest: object) -> jax.Array:
        jax.debug.callback(lambda i, j: visited.append((int(i), int(j))), i, j)
        return mask(i, j, *rest)

    monkeypatch.setattr(flash, "BLOCK", 8)
    monkeypatch.setattr(flash, "_mask", counted)
    Example(T=32, H=1, G=1, K=3, V=2, rule=Rule(window=window)).evaluate(attend)
    jax.effects_barrier()
    assert len(visited) == 2 * pairs and len(set(visited)) == pairs, visited


def test_no_array_of_tokens_by_tokens(optimised: None) -> None:
    """Not in the program as traced, nor as compiled, forward and backward: one such array would be 128 MB, and all temporaries together are far less."""
    T = 4096

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *qkv: attend(*qkv).sum(), (0, 1, 2))(q, k, v)

    args = shapes(1, T, 2, 64)
    traced = list(equations(jax.make_jaxpr(gradients)(*args).jaxpr))
    assert {"scan", "while"} <= {equation.primitive.name for equation in traced}
    products = [equation for equation in traced if equation.primitive.name == "dot_general"]
    assert len(products) == 2 + 5, "two products forward; backward the scores once more, and four"
    arrays = {tuple(variable.aval.shape) for equation in traced for variable in equation.outvars}
    assert not [shape for shape in arrays if np.prod(shape, dtype=int) >= T * T]
    compiled = jax.jit(gradients).lower(*args).compile()
    sizes = [np.prod([int(n) for n in dims.split(",") if n], dtype=int) for dims in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())]
    assert T * 2 * 64 <= max(sizes) < T * T
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * T * T * 4 / 4
