"""The loss: cross-entropy, and the z-loss, over whole batches or in blocks of tokens.

Letters: B batch, T tokens, D width, P padded vocabulary, N blocks; S and U parts that a mesh cuts rows and tokens into, R and C rows and tokens of one part's
block.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from gpt2jax.kernels.product import on_one_cpu, sum_of_outer_products
from gpt2jax.model.gpt2 import GPT2, table_logits
from gpt2jax.model.moe import routing_loss
from gpt2jax.parallel.table import axes_of, constrain

#: Where a block's logits, and each part's sum of the table's gradient, lie.
_BLOCK_LOGITS, _PART_TABLE = ("batch", None, "tokens", None, "vocab"), ("batch", "tokens", "vocab", None)

Sums = tuple[jax.Array, jax.Array, jax.Array | None]


def token_losses(logits_BTP: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of each target in nats, float32 [B, T], and which targets count, bool [B, T].

    A negative target (-1 as nanoGPT, -100 as Hugging Face) is ignored: its loss is exactly 0 and so is its gradient. JAX would read -1 as the last class.
    """
    losses_BT, _, counts_BT = _losses_and_normalizers(logits_BTP, targets_BT)
    return losses_BT, counts_BT


def mean_loss(
    model: GPT2, inputs_BT: jax.Array, targets_BT: jax.Array, dropout_key: jax.Array | None = None, remat: str = "none", chunk: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(mean loss in nats over the targets that count, their number); the mean of none is 0."""
    total, _ = summed_loss(model, inputs_BT, targets_BT, dropout_key, remat, chunk)
    number = (targets_BT >= 0).sum()
    return total / jnp.maximum(number, 1), number


def summed_loss(
    model: GPT2,
    inputs_BT: jax.Array,
    targets_BT: jax.Array,
    dropout_key: jax.Array | None = None,
    remat: str = "none",
    chunk: int | None = None,
    z_loss: float = 0.0,
    separator: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(what to minimise, the cross-entropy in it), both summed over the targets that count, in nats. Only the first has a gradient.

    z_loss: coefficient of log(sum of exp(logits))^2, which keeps the softmax's normaliser near 1 (PaLM, arXiv:2204.02311, section 5; ST-MoE, arXiv:2202.08906).
    chunk: the most tokens a device whose logits are held at once; `_chunked` goes over blocks of them. None: all logits at once, and JAX's own gradient.
    separator: the id that begins a document; with one, tokens see their own document only, and its positions start at 0. None: all of their row.
    What is minimised has the losses of routers in it (`routing_loss`), if there are any.
    """
    return summed_loss_and_loads(model, inputs_BT, targets_BT, dropout_key, remat, chunk, z_loss, separator)[:2]


def summed_loss_and_loads(
    model: GPT2,
    inputs_BT: jax.Array,
    targets_BT: jax.Array,
    dropout_key: jax.Array | None = None,
    remat: str = "none",
    chunk: int | None = None,
    z_loss: float = 0.0,
    separator: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`summed_loss`, and how many tokens whose targets count chose each expert, float32 [L, E]; None without experts."""
    segment_BT = documents(inputs_BT, separator)
    x_BTD, routing = model.routed(inputs_BT, segment_BT=segment_BT, counts_BT=targets_BT >= 0, dropout_key=dropout_key, remat=remat)
    if chunk is not None:
        config = model.config
        total, loss = _chunked(x_BTD, model.head_table[...], targets_BT, config.vocab_size, config.compute_dtype, chunk, z_loss)
    else:
        losses_BT, normalizers_BT, counts_BT = _losses_and_normalizers(model.padded_logits(x_BTD), targets_BT)
        total = loss = losses_BT.sum()
        if z_loss:
            total = loss + z_loss * jnp.where(counts_BT, normalizers_BT**2, 0.0).sum()
    if routing is not None:
        total = total + routing_loss(model.config, routing)
    return total, jax.lax.stop_gradient(loss), None if routing is None else routing.loads


def documents(tokens_BT: jax.Array, separator: int | None) -> jax.Array | None:
    """The number of the document, in its row, that each token belongs to, int32 [B, T]: one begins at each separator. None without one."""
    return None if separator is None else jnp.cumsum(tokens_BT == separator, 1, dtype=jnp.int32)


def _losses_and_normalizers(logits_BTP: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    counts_BT = targets_BT >= 0
    picked_BT = jnp.take_along_axis(logits_BTP, jnp.where(counts_BT, targets_BT, 0)[..., None], -1)[..., 0]
    normalizers_BT = jax.nn.logsumexp(logits_BTP, -1)
    return jnp.where(counts_BT, normalizers_BT - picked_BT, 0.0), normalizers_BT, counts_BT


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _chunked(
    x_BTD: jax.Array, table_PD: jax.Array, targets_BT: jax.Array, vocab_size: int, dtype: str, chunk: int, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """`summed_loss` of hidden states and the head's float32 table, in blocks of at most `chunk` tokens a device: [B, T, P] is never there.

    The forward pass makes the gradients as well, block by block while the block's logits are there (as Liger Kernel does, arXiv:2410.10989): no logits are
    computed twice, and the backward pass scales what there is.
    """
    total, loss, _, _ = _over_blocks(x_BTD, table_PD, targets_BT, vocab_size, dtype, chunk, z_loss, gradients=False)
    return total, loss


def _chunked_forward(
    x_BTD: jax.Array, table_PD: jax.Array, targets_BT: jax.Array, vocab_size: int, dtype: str, chunk: int, z_loss: float
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    total, loss, dx_BTD, dtable_PD = _over_blocks(x_BTD, table_PD, targets_BT, vocab_size, dtype, chunk, z_loss, gradients=True)
    assert dx_BTD is not None and dtable_PD is not None
    return (total, loss), (dx_BTD, dtable_PD)


def _chunked_backward(
    vocab_size: int, dtype: str, chunk: int, z_loss: float, kept: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    dx_BTD, dtable_PD = kept
    return (cotangents[0] * dx_BTD).astype(dx_BTD.dtype), cotangents[0] * dtable_PD, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _over_blocks(
    x_BTD: jax.Array, table_PD: jax.Array, targets_BT: jax.Array, vocab_size: int, dtype: str, chunk: int, z_loss: float, *, gradients: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """(what to minimise, the cross-entropy, and the first's gradients by x, in its dtype, and by the table, float32)."""
    (B, T), S, U = targets_BT.shape, *_parts(targets_BT.shape)
    # a block is some rows, or some tokens of one row, of each device
    row_blocks, token_blocks = math.ceil(B / S / max(chunk // (T // U), 1)), math.ceil(T / U / chunk)
    R, C = math.ceil(B / S / row_blocks), math.ceil(T / U / token_blocks)
    padding = ((0, S * R * row_blocks - B), (0, U * C * token_blocks - T))
    table = table_PD.astype(dtype)

    def blocks(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [N, S, R, U, C, ...]. Every row_blocks-th row and token_blocks-th token make a block: what a device holds stays on it."""
        x = x.reshape(S, R, row_blocks, U, C, token_blocks, *x.shape[2:])
        x = jnp.moveaxis(x, (2, 5), (0, 1))
        return x.reshape(-1, *x.shape[2:])

    def whole(blocks: jax.Array) -> jax.Array:
        x = blocks.reshape(row_blocks, token_blocks, *blocks.shape[1:])
        x = jnp.moveaxis(x, (0, 1), (2, 5))
        return x.reshape(S * R * row_blocks, U * C * token_blocks, *x.shape[6:])[:B, :T]

    def run(sums: Sums, block: tuple[jax.Array, jax.Array]) -> tuple[Sums, jax.Array | None]:
        total, loss, dtable_SUPD = sums
        x, targets = block
        logits = constrain(table_logits(x, table, vocab_size), _BLOCK_LOGITS)
        counts = targets >= 0
        is_target = jnp.arange(logits.shape[-1]) == targets[..., None]  # no gather: the vocabulary may be spread; an ignored target is none
        normalizers = jax.nn.logsumexp(logits, -1)
        block_loss = jnp.where(counts, normalizers - jnp.where(is_target, logits, 0.0).sum(-1), 0.0).sum()
        block_total = block_loss + z_loss * jnp.where(counts, normalizers**2, 0.0).sum() if z_loss else block_loss
        dx = None
        if dtable_SUPD is not None:
            slope = jnp.where(counts, 1.0 + 2.0 * z_loss * normalizers, 0.0)[..., None]
            dlogits = (jnp.exp(logits - normalizers[..., None]) * slope - jnp.where(is_target, 1.0, 0.0)).astype(dtype)
            dx = jax.lax.dot_general(dlogits, table, (((5 - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)
            # each part of the mesh keeps a sum of its own: one sum over devices behind the loop, not one a block
            if dtype == "bfloat16" and on_one_cpu():
                by_part = sum_of_outer_products(dlogits.reshape(-1, P), x.astype(dtype).reshape(-1, D))[None, None]
            else:
                by_part = jnp.einsum("SRUCP,SRUCD->SUPD", dlogits, x.astype(dtype), preferred_element_type=jnp.float32)
            dtable_SUPD = constrain(dtable_SUPD + by_part, _PART_TABLE)
        return (total + block_total, loss + block_loss, dtable_SUPD), dx

    P, D = table_PD.shape
    zeros = constrain(jnp.zeros((S, U, P, D), jnp.float32), _PART_TABLE) if gradients else None
    x_blocks = blocks(jnp.pad(x_BTD, (*padding, (0, 0))))
    target_blocks = blocks(jnp.pad(targets_BT, padding, constant_values=-1))
    (total, loss, dtable_SUPD), dx_blocks = jax.lax.scan(run, (jnp.float32(0), jnp.float32(0), zeros), (x_blocks, target_blocks))
    if dtable_SUPD is None or dx_blocks is None:
        return total, loss, None, None
    return total, loss, whole(dx_blocks), constrain(dtable_SUPD.sum((0, 1)), ("vocab", "embed"))


def _parts(shape: tuple[int, ...]) -> tuple[int, int]:
    """Into how many parts the mesh in context cuts rows and tokens of [B, T]."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1, 1
    rows, tokens = (axes_of(axis, size, mesh.shape) or () for axis, size in zip(("batch", "tokens"), shape, strict=True))
    return math.prod(mesh.shape[name] for name in rows), math.prod(mesh.shape[name] for name in tokens)
