"""The model in the form that decodes fastest, by platform: the one place that knows about it. Everywhere it is the same function of the same weights.

On any platform blocks become a list: slicing a stack inside the loop would copy the weights at every layer. On a CPU, for batches of two rows or more, linear
maps are also turned to [out, in]: XLA multiplies a few rows by such a matrix at the speed of memory if the rows stand as columns beside it, where for x @ w it
first packs the whole matrix into another order, at every step (measured: 2 to 16 rows take a quarter of the time, 32 a third). One row is fastest as x @ w.

Letters: R rows, I inputs, O outputs, B batch, D width, P padded vocabulary.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.linear import Linear

#: Most rows for which `turned_product` is faster than a plain product.
FEW = 32


def turns_weights(batch: int) -> bool:
    """Whether a batch of this size decodes faster with turned weights here."""
    return jax.default_backend() == "cpu" and batch > 1


@functools.partial(jax.jit, static_argnames="turned")
def prepare(model: GPT2, *, turned: bool) -> GPT2:
    """The model for the decode loop only: blocks as a list, its linear maps `turned` if `turns_weights` says so."""
    model = model.unstack()
    if turned and model.config.compute_dtype == "float32":
        model.blocks = nnx.data(tuple(_with_turned_linears(block) for block in model.blocks))
    return model


def logits(model: GPT2, hidden_BD: jax.Array) -> jax.Array:
    """`model.padded_logits(hidden)`, float32 [B, P], by `turned_product` where that is faster: the token table is [out, in] as it is."""
    if not (turns_weights(hidden_BD.shape[0]) and model.config.compute_dtype == "float32"):
        return model.padded_logits(hidden_BD)
    logits_BP = turned_product(hidden_BD, model.token_table[...])
    return jnp.where(jnp.arange(logits_BP.shape[1]) < model.config.vocab_size, logits_BP, -jnp.inf)


def turned_product(x_RI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x w^T, [R, O], for a CPU."""
    if not 1 < x_RI.shape[0] <= FEW:
        return jnp.einsum("RI,OI->RO", x_RI, w_OI)
    # without both constraints XLA keeps the transposes as views and takes a path that is many times slower
    x_IR = with_layout_constraint(x_RI.T, Layout((0, 1)))
    return with_layout_constraint(w_OI @ x_IR, Layout((0, 1))).T


class TurnedLinear(nnx.Module):
    """The same map as a `Linear`, its weights stored [out, in]."""

    def __init__(self, linear: Linear) -> None:
        shape = linear.w.shape
        self.inputs, self.outputs = shape[: linear.contracted], shape[linear.contracted :]
        self.w_OI = nnx.Param(linear.w[...].reshape(math.prod(self.inputs), -1).T)
        self.b = nnx.Param(linear.b[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.shape[: x.ndim - len(self.inputs)]
        y_RO = turned_product(x.reshape(math.prod(rows), -1), self.w_OI[...])
        return y_RO.reshape(*rows, *self.outputs) + self.b[...]


def _with_turned_linears(module: nnx.Module) -> nnx.Module:
    module = nnx.clone(module)
    for name, part in vars(module).items():
        if isinstance(part, Linear):
            setattr(module, name, TurnedLinear(part))
        elif isinstance(part, nnx.Module):
            setattr(module, name, _with_turned_linears(part))
    return module
