"""Parameters and the linear map that every component is made of.

A parameter names its logical axes where it is made (`axes=`); `gpt2jax.parallel` alone maps them to a mesh. Its initial value depends on the seed and on its
own path only, so that swapping one component leaves every other initial value as it was.
"""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp
from flax import nnx

Axes = tuple[str | None, ...]


def child_key(key: jax.Array, name: str) -> jax.Array:
    """The key of the part called `name`: a function of the parent's key and the name, not of the order in which parts are made."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def normal(key: jax.Array, shape: tuple[int, ...], axes: Axes, std: float) -> nnx.Param[jax.Array]:
    """A float32 parameter drawn from N(0, std^2)."""
    return nnx.Param(std * jax.random.normal(key, shape, jnp.float32), axes=axes)


def constant(shape: tuple[int, ...], axes: Axes, value: float) -> nnx.Param[jax.Array]:
    """A float32 parameter that starts at `value` everywhere."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


class Linear(nnx.Module):
    """x @ w + b over any number of input and output axes, computed in `dtype`.

    w: float32 [*inputs, *outputs], the input first as in GPT-2's own Conv1D; b: float32 [*outputs].
    """

    def __init__(
        self, key: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...], *, input_axes: Axes, output_axes: Axes, std: float, dtype: jnp.dtype
    ) -> None:
        draw = normal(key, inputs + outputs, input_axes + output_axes, std)
        self.w = nnx.Param(draw[...], axes=draw.axes, inputs=len(inputs))
        self.b = constant(outputs, output_axes, 0.0)
        self.contracted = len(inputs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., *inputs] -> [..., *outputs] in `dtype`."""
        n = self.contracted
        x, w = x.astype(self.dtype), self.w[...].astype(self.dtype)
        y = jax.lax.dot_general(x, w, ((tuple(range(x.ndim - n, x.ndim)), tuple(range(n))), ((), ())))
        return y + self.b[...].astype(self.dtype)


def residual_std(initializer_range: float, n_layer: int) -> float:
    """GPT-2 scales the projections that write to the residual stream by 1/sqrt(number of such writes) (GPT-2 paper, section 2.3)."""
    return initializer_range / math.sqrt(2 * n_layer)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity without a key (evaluation) or at rate 0."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
