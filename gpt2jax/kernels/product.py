"""Products of bfloat16 activations with weights on a CPU, and what waits for the backward pass.

XLA on a CPU multiplies bfloat16 fast in one form only: rows by columns or rows by rows, bfloat16 in and float32 out. Any other form, a sum over the first axis
of both among them, is done in float32 at half the speed; and what a loop carries or stacks in bfloat16 it keeps in float32. (Measured, jax 0.10.2.)

Letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from gpt2jax.kernels.platform import target_platform


def on_one_cpu() -> bool:
    """Whether the program being traced is for one CPU device."""
    mesh = jax.sharding.get_abstract_mesh()
    return target_platform() == "cpu" and (mesh.empty or mesh.size == 1)


@jax.custom_vjp
def affine(x_NI: jax.Array, w_IO: jax.Array, b_O: jax.Array | None) -> jax.Array:
    """x w + b, rounded once, to x's bfloat16; w and b are float32, and so are their gradients."""
    y_NO = _dot(x_NI, w_IO.astype(x_NI.dtype), 1, 0)
    return (y_NO if b_O is None else y_NO + b_O).astype(x_NI.dtype)


def _affine_forward(x_NI: jax.Array, w_IO: jax.Array, b_O: jax.Array | None) -> tuple[jax.Array, tuple[Any, ...]]:
    return affine(x_NI, w_IO, b_O), (pack(x_NI), w_IO, b_O)


def _affine_backward(kept: tuple[Any, ...], dy_NO: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x_NI, w_IO, b_O = unpack(kept[0]), *kept[1:]
    dx_NI = _dot(dy_NO, w_IO.astype(dy_NO.dtype), 1, 1).astype(dy_NO.dtype)
    # sums over rows as products with ones (two rows of them, for one takes another path): XLA's own are many times slower
    db_O = None if b_O is None else _dot(jnp.ones((2, len(dy_NO)), dy_NO.dtype), dy_NO, 1, 0)[0]
    x_NI = jax.lax.optimization_barrier(x_NI)  # else what makes x is fused into the transposition, which reads in strides
    return dx_NI, _row_major(_dot(_row_major(x_NI.T), dy_NO, 1, 0)), db_O


affine.defvjp(_affine_forward, _affine_backward)


def sum_of_outer_products(x_NI: jax.Array, y_NO: jax.Array) -> jax.Array:
    """x^T y of bfloat16, float32 [I, O]. The smaller of them is laid out anew."""
    if x_NI.shape[1] <= y_NO.shape[1]:
        return _row_major(_dot(_row_major(x_NI.T), y_NO, 1, 0))
    return _row_major(_dot(_row_major(y_NO.T), x_NI, 1, 0)).T


def recomputed(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`run(weights, x)`, of which the backward pass keeps the arguments and nothing that was made on the way: for what is cheap to do twice."""
    f = jax.custom_vjp(run)

    def backward(kept: tuple[Any, Any], dy: jax.Array) -> tuple[Any, Any]:
        return jax.vjp(run, kept[0], unpack(kept[1]))[1](dy)

    f.defvjp(lambda weights, x: (run(weights, x), (weights, pack(x))), backward)
    return functools.wraps(run)(f)


def pack(x: jax.Array) -> jax.Array:
    """Bits instead of bfloat16, on a CPU: a stack of them is not widened."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 and on_one_cpu() else x


def unpack(x: jax.Array) -> jax.Array:
    """What `pack` was given."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout((0, 1)))


def _dot(x: jax.Array, y: jax.Array, i: int, j: int) -> jax.Array:
    return jax.lax.dot_general(x, y, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)
