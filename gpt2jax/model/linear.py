"""Parameters and the linear map that every component is made of.

A parameter names its logical axes where it is made (`axes=`); `gpt2jax.parallel` alone maps them to a mesh. Its initial value depends on the seed and on its
own path only, so that swapping one component leaves every other initial value as it was.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.kernels.product import affine, on_one_cpu

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

    w: [*inputs, *outputs], the input first as in GPT-2's own Conv1D, float32 (bfloat16 where a model for decoding was made smaller); b: float32 [*outputs], or
    None.
    """

    def __init__(
        self,
        key: jax.Array,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        input_axes: Axes,
        output_axes: Axes,
        std: float,
        dtype: jnp.dtype,
        bias: bool = True,
    ) -> None:
        draw = normal(key, inputs + outputs, input_axes + output_axes, std)
        self.w = nnx.Param(draw[...], axes=draw.axes, inputs=len(inputs))
        self.b = constant(outputs, output_axes, 0.0) if bias else None
        self.contracted = len(inputs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., *inputs] -> [..., *outputs] in `dtype`."""
        x, w, n = x.astype(self.dtype), self.w[...], self.contracted
        if self.dtype == jnp.bfloat16 and w.dtype == jnp.float32 and on_one_cpu():
            inputs, outputs = w.shape[:n], w.shape[n:]
            b = None if self.b is None else self.b[...].reshape(-1)
            return affine(x.reshape(-1, math.prod(inputs)), w.reshape(math.prod(inputs), -1), b).reshape(*x.shape[: x.ndim - n], *outputs)
        return add_bias(contract(x, w.astype(self.dtype), n), self.b)

    def turned(self) -> tuple[jax.Array, jax.Array | None]:
        """The weights [*outputs, *inputs], and what each output is to be multiplied by, [*outputs] or None."""
        return turned(self.w[...], self.contracted), None


class QuantizedLinear(nnx.Module):
    """A `Linear` with int8 weights and one float32 scale an output: w = int8 * scale, computed as (x @ int8) * scale + b in `dtype`.

    w: int8 [*inputs, *outputs]; scale, b: float32 [*outputs]. Weights are exact multiples of the scale, rounded to the nearest; activations are not quantised.
    """

    def __init__(self, linear: Linear) -> None:
        w, scale = quantized(linear.w[...], tuple(range(linear.contracted)))
        output_axes = linear.w.axes[linear.contracted :]
        self.w, self.scale, self.b = nnx.Param(w, axes=linear.w.axes), nnx.Param(scale, axes=output_axes), linear.b
        self.contracted, self.dtype = linear.contracted, linear.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., *inputs] -> [..., *outputs] in `dtype`."""
        y = contract(x.astype(self.dtype), self.w[...].astype(self.dtype), self.contracted)
        return add_bias(y * self.scale[...].astype(self.dtype), self.b)

    def turned(self) -> tuple[jax.Array, jax.Array | None]:
        """As `Linear.turned`."""
        return turned(self.w[...], self.contracted), self.scale[...]


class QuantizedTable(nnx.Module):
    """A token table with int8 rows and one float32 scale a row; `table[ids]` are rows of the float32 table that it stands for, `table[...]` is all of it."""

    def __init__(self, table: nnx.Param[jax.Array]) -> None:
        w, scale = quantized(table[...], (1,))
        self.w, self.scale = nnx.Param(w, axes=table.axes), nnx.Param(scale, axes=table.axes[:1])

    def __getitem__(self, index: Any) -> jax.Array:
        return self.w[index] * self.scale[index][..., None]


def quantized(w: jax.Array, over: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 in [-127, 127] and the float32 scale of the largest magnitude along the axes `over`, which the scale lacks."""
    w = w.astype(jnp.float32)
    most = jnp.abs(w).max(over, keepdims=True)
    scale = jnp.where(most > 0, most, 127.0) / 127
    return jnp.round(w / scale).astype(jnp.int8), scale.squeeze(over)


def add_bias(y: jax.Array, b: nnx.Param[jax.Array] | None) -> jax.Array:
    """y + b in y's dtype; y where there is no bias."""
    return y if b is None else y + b[...].astype(y.dtype)


def contract(x: jax.Array, w: jax.Array, n: int) -> jax.Array:
    """The last n axes of x against the first n of w."""
    return jax.lax.dot_general(x, w, ((tuple(range(x.ndim - n, x.ndim)), tuple(range(n))), ((), ())))


def turned(w: jax.Array, n: int) -> jax.Array:
    """w [*inputs, *outputs], n of them inputs, as [*outputs, *inputs]."""
    return w.transpose(*range(n, w.ndim), *range(n))


def residual_std(initializer_range: float, n_layer: int) -> float:
    """GPT-2 scales the projections that write to the residual stream by 1/sqrt(number of such writes) (GPT-2 paper, section 2.3)."""
    return initializer_range / math.sqrt(2 * n_layer)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity without a key (evaluation) or at rate 0."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
