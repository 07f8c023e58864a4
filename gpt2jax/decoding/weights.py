"""Smaller weights, and the model in the form that decodes fastest, by platform: the one place that knows about it. A form is the same function of the weights.

On any platform blocks become a list: slicing a stack inside the loop would copy the weights at every layer. On a CPU linear maps are also turned to [out, in],
and the product depends on the weights' dtype and on the number of rows, because XLA has no one form that is always fast there (figures: GPT-2 124M, 2 cores of
an AMD EPYC with AVX2, jax 0.10.2):

- float32: one row is a matrix-vector product at the speed of memory. For x @ w with more rows XLA first packs the whole matrix into another order, at every
  step, unless the rows stand as columns beside it (2 to 16 rows: a quarter of the time; 32: a third).
- int8: `w.astype(float32)` before a dot writes the whole matrix out as float32, which takes longer than reading float32 weights would. The int8 dot does not,
  but it is fast from two rows on only: each row becomes two, `int8_product`, which also makes up for the rounding of activations (1 row: 16 ms a step, 24 in
  float32; the float32 product with a matrix written out: 68).
- bfloat16: only CPUs with instructions for it multiply it fast; for the others the weights are widened to float32 once.

Letters: R rows, I inputs, O outputs, B batch, D width, P padded vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from gpt2jax.decoding.settings import CACHE_DTYPES, WEIGHTS_DTYPES
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.linear import Linear, QuantizedLinear, QuantizedTable, add_bias

#: Most rows for which `turned_product` is faster than a plain product, for float32.
FEW = 32
#: Most rows for which integer products are faster than the matrix written out as float32.
FEW_INT8 = 64


def quantize(model: GPT2, weights_dtype: str) -> GPT2:
    """The model with the weights of its linear maps and its token table in "float32", "bfloat16" or "int8"; biases, norms and positions stay float32.

    int8: each output of a linear map and each row of the token table is rounded to 255 levels of its own scale (symmetric, nearest). An ordinary model comes
    back, for any use but training and saving. The compute dtype stays what it is. InputError for another dtype, or if the model is int8 already.
    """
    check_weights_dtype(weights_dtype)
    if isinstance(model.token_table, QuantizedTable):
        raise InputError("the model's weights are int8 already, which cannot be turned into another dtype without loss; load it anew")
    return _quantize(model, weights_dtype)


def check_weights_dtype(weights_dtype: str) -> None:
    """InputError unless `quantize` knows it."""
    if weights_dtype not in WEIGHTS_DTYPES:
        raise InputError(f"weights_dtype={weights_dtype!r} is unknown; choose one of {', '.join(WEIGHTS_DTYPES)}")


@functools.partial(jax.jit, static_argnames="weights_dtype")
def _quantize(model: GPT2, weights_dtype: str) -> GPT2:
    def cast(linear: Linear) -> Linear:
        linear = nnx.clone(linear)
        linear.w = nnx.Param(linear.w[...].astype(weights_dtype), axes=linear.w.axes)
        return linear

    small: Any = nnx.clone(model)
    change = functools.partial(_with_linears, change=QuantizedLinear if weights_dtype == "int8" else cast)
    small.blocks = nnx.data(tuple(map(change, model.blocks))) if isinstance(model.blocks, tuple) else jax.vmap(change)(model.blocks)
    for name in ("token_table", "head"):
        table: Any = getattr(model, name)
        if table is not None:
            setattr(small, name, QuantizedTable(table) if weights_dtype == "int8" else table.replace(table[...].astype(weights_dtype)))
    return small


def turns_weights() -> bool:
    """Whether a batch of this size decodes faster with turned weights here."""
    return jax.default_backend() == "cpu"


@functools.partial(jax.jit, static_argnames=("turned", "cache_dtype"))
def prepare(model: GPT2, *, turned: bool, cache_dtype: str | None = None) -> GPT2:
    """The model for the decode loop only: blocks as a list, its linear maps and its head `turned` if `turns_weights` says so.

    cache_dtype: what the frozen part of the cache is kept in, one of `CACHE_DTYPES`; None is the compute dtype. InputError for another one, or if a mixer's
    state is not made of keys and values.
    """
    if cache_dtype not in (None, *CACHE_DTYPES):
        raise InputError(f"cache_dtype={cache_dtype!r} is unknown; choose one of {', '.join(CACHE_DTYPES)}")
    ready: Any = model.unstack()
    if turned:
        dtype, table = jnp.dtype(model.config.compute_dtype), ready.head_table
        ready.blocks = nnx.data(tuple(_with_linears(block, TurnedLinear) for block in ready.blocks))
        ready.turned_head = Turned(table.w[...], table.scale[...], dtype) if isinstance(table, QuantizedTable) else Turned(table[...], None, dtype)
    for block in ready.blocks if cache_dtype is not None else ():
        if not hasattr(block.mixer, "cache_dtype"):
            raise InputError(f"cache_dtype={cache_dtype!r}: the state of {type(block.mixer).__name__} has one dtype only; leave cache_dtype out")
        block.mixer.cache_dtype = cache_dtype
    return ready


def logits(model: GPT2, hidden_BD: jax.Array) -> jax.Array:
    """`model.padded_logits(hidden)`, float32 [B, P], by the turned head where there is one: a table of tokens is [out, in] as it is."""
    head = getattr(model, "turned_head", None)
    if head is None:
        return model.padded_logits(hidden_BD)
    logits_BP = head(hidden_BD)
    return jnp.where(jnp.arange(logits_BP.shape[1]) < model.config.vocab_size, logits_BP, -jnp.inf)


class Turned(nnx.Module):
    """x w^T * scale for a CPU, x [R, I] -> float32 [R, O]; weights [out, in] in the dtype that is multiplied fastest."""

    def __init__(self, w_OI: jax.Array, scale_O: jax.Array | None, dtype: jnp.dtype) -> None:
        if w_OI.dtype != jnp.int8:
            w_OI = w_OI.astype(dtype).astype(dtype if "avx512_bf16" in cpu_flags() else jnp.float32)
        self.w_OI = nnx.Param(w_OI)
        self.scale_O = None if scale_O is None else nnx.Param(scale_O)

    def __call__(self, x_RI: jax.Array) -> jax.Array:
        w_OI = self.w_OI[...]
        product = {"int8": int8_product, "bfloat16": _bfloat16_dot, "float32": turned_product}[w_OI.dtype.name]
        y_RO = product(x_RI, w_OI)
        return y_RO if self.scale_O is None else y_RO * self.scale_O[...]


class TurnedLinear(nnx.Module):
    """The same map as a `Linear` or a `QuantizedLinear`, its weights stored [out, in]."""

    def __init__(self, linear: Linear | QuantizedLinear) -> None:
        shape = linear.w.shape
        self.inputs, self.outputs, self.dtype = shape[: linear.contracted], shape[linear.contracted :], linear.dtype
        scale = linear.scale[...].reshape(-1) if isinstance(linear, QuantizedLinear) else None
        self.product = Turned(linear.w[...].reshape(math.prod(self.inputs), -1).T, scale, linear.dtype)
        self.b = None if linear.b is None else nnx.Param(linear.b[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.shape[: x.ndim - len(self.inputs)]
        y_RO = self.product(x.reshape(math.prod(rows), -1)).astype(self.dtype)
        return add_bias(y_RO.reshape(*rows, *self.outputs), self.b)


def turned_product(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x w^T, float32 [R, O], for float32 weights."""
    x_RI = x_RI.astype(jnp.float32)
    if not 1 < x_RI.shape[0] <= FEW:
        return jnp.einsum("RI,OI->RO", x_RI, w_OI)
    # without both constraints XLA keeps the transposes as views and takes a path that is many times slower
    x_IR = with_layout_constraint(x_RI.T, Layout((0, 1)))
    return with_layout_constraint(w_OI @ x_IR, Layout((0, 1))).T


def int8_product(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x w^T, float32 [R, O], for int8 weights.

    A few rows by integer products alone: each row is the sum of two int8 rows, a coarse one and the rest of it, so within 1/64,000 of its largest number.
    """
    x_RI = x_RI.astype(jnp.float32)
    if x_RI.shape[0] > FEW_INT8:
        return jnp.einsum("RI,OI->RO", x_RI, w_OI.astype(jnp.float32))
    step_R1 = jnp.maximum(jnp.abs(x_RI).max(1, keepdims=True), 1e-30) / 127
    coarse_RI = jnp.round(x_RI / step_R1)
    fine_RI = jnp.round((x_RI / step_R1 - coarse_RI) * 254)
    rows = jnp.concatenate([coarse_RI, fine_RI]).astype(jnp.int8)
    coarse_RO, fine_RO = jnp.split(jnp.einsum("RI,OI->RO", rows, w_OI, preferred_element_type=jnp.int32).astype(jnp.float32), 2)
    return (coarse_RO + fine_RO / 254) * step_R1


def _bfloat16_dot(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """In two rows or more: a single one would be widened to float32."""
    rows = jnp.concatenate([x_RI, x_RI]) if x_RI.shape[0] == 1 else x_RI
    return jnp.einsum("RI,OI->RO", rows.astype(jnp.bfloat16), w_OI, preferred_element_type=jnp.float32)[: x_RI.shape[0]]


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets that Linux names for this processor; empty elsewhere, which means the forms that need none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def _with_linears(module: Any, change: Callable[[Any], nnx.Module]) -> Any:
    module = nnx.clone(module)
    for name, part in vars(module).items():
        if isinstance(part, (Linear, QuantizedLinear)):
            setattr(module, name, change(part))
        elif isinstance(part, nnx.Module):
            setattr(module, name, _with_linears(part, change))
    return module
