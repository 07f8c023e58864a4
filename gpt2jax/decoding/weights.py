"""Smaller weights, and the model in the form that decodes fastest, by platform: the one place that knows about it. A form is the same function of the weights.

On any platform blocks become a list: slicing a stack inside the loop would copy the weights at every layer. On a CPU linear maps are also turned to [out, in],
and the product depends on the weights' dtype and on the number of rows, because XLA has no one form that is always fast there (figures: all products of a step
of GPT-2 124M, jax 0.10.2, 2 cores of an AMD EPYC with AVX-512, VNNI and bfloat16 unless AVX2 is named):

- float32: one row is a matrix-vector product at the speed of memory (17 ms). For x @ w with more rows XLA first packs the whole matrix into another order, at
  every step, unless the rows stand as columns beside it (2 to 16 rows: a quarter of the time; 32: a third; AVX2).
- int8: `w.astype(float32)` before a dot writes the whole matrix out as float32 (8 rows: 63 ms). The int8 dot does not, but it packs the weights too, and is
  fast from two rows on only. So few rows are plain integer sums, which XLA compiles to one loop over the weights as they lie in memory (1 row: 6 ms, the dot:
  12); more rows are the dot, each as two int8 rows, which makes up for the rounding of activations.
- bfloat16: only CPUs with instructions for it multiply it fast; for the others the weights are widened to float32 once. Few rows are float32 sums, with the
  weights widened in registers (1 row: 9 ms, the dot: 17). More float32 rows are two bfloat16 rows each.

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
from jax.experimental.xla_metadata import set_xla_metadata

from gpt2jax.decoding.settings import CACHE_DTYPES, WEIGHTS_DTYPES
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.linear import Linear, QuantizedLinear, QuantizedTable, add_bias
from gpt2jax.model.moe import ExpertLinear

#: Most rows for which `turned_product` is faster than a plain product, for float32.
FEW = 32
#: Most rows for which integer products are faster than the matrix written out as float32.
FEW_INT8 = 64
#: Most rows for which sums are faster than the library's dot, by the dtype of the weights.
FEW_SUMS = {"int8": 8, "bfloat16": 4}
#: Numbers side by side in the loop of a sum, and how many such parts it takes at a time: with fewer XLA unrolls the loop before it could become one of vectors,
#: with more it takes the sum apart. 12 * 32 products of 16 and 8 bits stay within 32 bits.
_LANES, _FEWEST_PARTS, _MOST_PARTS = 32, 4, 12


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
    def cast(linear: Any) -> Any:
        linear = nnx.clone(linear)
        linear.w = nnx.Param(linear.w[...].astype(weights_dtype), axes=linear.w.axes)
        return linear

    small: Any = nnx.clone(model)

    def int8(linear: Any) -> nnx.Module:
        return linear.quantized() if isinstance(linear, ExpertLinear) else QuantizedLinear(linear)

    change = functools.partial(_with_linears, change=int8 if weights_dtype == "int8" else cast, kinds=(Linear, ExpertLinear))
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
        if w_OI.dtype == jnp.float32:
            w_OI = w_OI.astype(dtype)
        if w_OI.dtype == jnp.bfloat16 and "avx512_bf16" not in cpu_flags():
            w_OI = w_OI.astype(jnp.float32)
        self.w_OI, self.dtype = nnx.Param(w_OI), dtype
        self.scale_O = None if scale_O is None else nnx.Param(scale_O)

    def __call__(self, x_RI: jax.Array) -> jax.Array:
        w_OI = self.w_OI[...]
        product = {"int8": int8_product, "bfloat16": bfloat16_product, "float32": turned_product}[w_OI.dtype.name]
        y_RO = product(x_RI.astype(self.dtype), w_OI)
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

    def turned(self) -> tuple[jax.Array, jax.Array | None]:
        """As `Linear.turned`."""
        scale_O = self.product.scale_O
        return self.product.w_OI[...].reshape(*self.outputs, *self.inputs), None if scale_O is None else scale_O[...].reshape(self.outputs)


def turned_product(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x w^T, float32 [R, O], for float32 weights."""
    x_RI = x_RI.astype(jnp.float32)
    if not 1 < x_RI.shape[0] <= FEW:
        return jnp.einsum("RI,OI->RO", x_RI, w_OI)
    # without both constraints XLA keeps the transposes as views and takes a path that is many times slower
    x_IR = with_layout_constraint(x_RI.T, Layout((0, 1)))
    return with_layout_constraint(w_OI @ x_IR, Layout((0, 1))).T


def int8_product(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x w^T, float32 [R, O], for int8 weights; a few rows by integer products alone, with an error within 1/64,000 of each row's largest number."""
    x_RI = x_RI.astype(jnp.float32)
    if x_RI.shape[0] > FEW_INT8:
        return jnp.einsum("RI,OI->RO", x_RI, w_OI.astype(jnp.float32))
    if not (parts := _parts(x_RI, w_OI)):
        return _int8_dot(x_RI, w_OI)
    rows_RI, step_R1 = _called(_in_16_bits, x_RI)
    return _called(_int8_sums, rows_RI, w_OI, parts).sum(1).T * step_R1


def bfloat16_product(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x w^T, float32 [R, O], for bfloat16 weights. Each float32 row is taken as it is, or as the sum of two bfloat16 rows, within 1/130,000 of each number."""
    if parts := _parts(x_RI, w_OI):
        return _called(_float_sums, x_RI.astype(jnp.float32), w_OI, parts).sum((1, 3)).T
    high_RI = x_RI.astype(jnp.bfloat16)
    if x_RI.dtype == jnp.float32 and x_RI.shape[0] > FEW:
        return jnp.einsum("RI,OI->RO", x_RI, w_OI.astype(jnp.float32))
    low_RI = (x_RI - high_RI.astype(x_RI.dtype)).astype(jnp.bfloat16) if x_RI.dtype == jnp.float32 else high_RI[: max(2 - x_RI.shape[0], 0)]
    rows = jnp.concatenate([high_RI, low_RI])  # two or more: a single row would have the weights widened to float32
    y_RO = jnp.einsum("RI,OI->RO", rows, w_OI, preferred_element_type=jnp.float32)
    return y_RO[: x_RI.shape[0]] + y_RO[x_RI.shape[0] :] if x_RI.dtype == jnp.float32 else y_RO[: x_RI.shape[0]]


def _called(function: Callable[..., Any], *args: Any) -> Any:
    """A call that XLA does not inline: else rounding would be fused into the loop of the sums, anew for every output, and that loop into what follows."""
    with set_xla_metadata(inlineable="false"):
        return function(*args)


def _parts(x_RI: jax.Array, w_OI: jax.Array) -> int:
    """How many parts of `_LANES` numbers a sum takes at a time; 0 if there are too many rows for sums, or too few numbers."""
    (rows, inputs), sizes = x_RI.shape, range(_MOST_PARTS, _FEWEST_PARTS - 1, -1)
    return next((U for U in sizes if inputs % (U * _LANES) == 0), 0) if rows <= FEW_SUMS[w_OI.dtype.name] else 0


def _products(x_RI: jax.Array, w_OI: jax.Array, U: int, dtype: type) -> jax.Array:
    """Products in `dtype`, each the sum of U: [O, G, R, K] where I = G * U * K."""
    x_GRUK, w_OGUK = x_RI.reshape(x_RI.shape[0], -1, U, _LANES).swapaxes(0, 1), w_OI.reshape(w_OI.shape[0], -1, U, _LANES)
    return functools.reduce(jnp.add, [w_OGUK[:, :, None, u].astype(dtype) * x_GRUK[None, :, :, u].astype(dtype) for u in range(U)])


@functools.partial(jax.jit, static_argnums=2)
def _int8_sums(rows_RI: jax.Array, w_OI: jax.Array, U: int) -> jax.Array:
    """float32 [O, G, R]."""
    return _products(rows_RI, w_OI, U, jnp.int32).sum(-1).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def _float_sums(x_RI: jax.Array, w_OI: jax.Array, U: int) -> jax.Array:
    """float32 [O, G, R, K], K numbers to be summed later: within one loop only sums whose order is free become vectors."""
    return _products(x_RI, w_OI, U, jnp.float32)


@jax.jit
def _in_16_bits(x_RI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows rounded to int16, and the size of each one's step, float32 [R, 1]."""
    step_R1 = jnp.maximum(jnp.abs(x_RI).max(1, keepdims=True), 1e-30) / 32767
    return jax.lax.round(x_RI / step_R1, jax.lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int16), step_R1


def _int8_dot(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """Each row is the sum of two int8 rows, a coarse one and the rest of it."""
    step_R1 = jnp.maximum(jnp.abs(x_RI).max(1, keepdims=True), 1e-30) / 127
    coarse_RI = jnp.round(x_RI / step_R1)
    fine_RI = jnp.round((x_RI / step_R1 - coarse_RI) * 254)
    rows = jnp.concatenate([coarse_RI, fine_RI]).astype(jnp.int8)
    coarse_RO, fine_RO = jnp.split(jnp.einsum("RI,OI->RO", rows, w_OI, preferred_element_type=jnp.int32).astype(jnp.float32), 2)
    return (coarse_RO + fine_RO / 254) * step_R1


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets that Linux names for this processor; empty elsewhere, which means the forms that need none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def _with_linears(module: Any, change: Callable[[Any], nnx.Module], kinds: tuple[type, ...] = (Linear, QuantizedLinear)) -> Any:
    module = nnx.clone(module)
    for name, part in vars(module).items():
        if isinstance(part, kinds):
            setattr(module, name, change(part))
        elif isinstance(part, nnx.Module):
            setattr(module, name, _with_linears(part, change, kinds))
    return module
