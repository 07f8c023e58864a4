"""The loss. B batch, T tokens, P padded vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gpt2jax.model.gpt2 import GPT2


def token_losses(logits_BTP: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of each target in nats, float32 [B, T], and which targets count, bool [B, T].

    A negative target (-1 as nanoGPT, -100 as Hugging Face) is ignored: its loss is exactly 0 and so is its gradient. JAX would read -1 as the last class.
    """
    counts_BT = targets_BT >= 0
    picked_BT = jnp.take_along_axis(logits_BTP, jnp.where(counts_BT, targets_BT, 0)[..., None], -1)[..., 0]
    losses_BT = jax.nn.logsumexp(logits_BTP, -1) - picked_BT
    return jnp.where(counts_BT, losses_BT, 0.0), counts_BT


def mean_loss(
    model: GPT2, inputs_BT: jax.Array, targets_BT: jax.Array, dropout_key: jax.Array | None = None, remat: str = "none"
) -> tuple[jax.Array, jax.Array]:
    """(mean loss in nats over the targets that count, their number); the mean of none is 0."""
    losses_BT, counts_BT = token_losses(model.padded_logits(model.hidden(inputs_BT, dropout_key=dropout_key, remat=remat)), targets_BT)
    number = counts_BT.sum()
    return losses_BT.sum() / jnp.maximum(number, 1), number
