"""Attention over keys and values, plain XLA.

Letters: B batch, T queries, S keys, H query heads, G key/value heads (G divides H; query head h reads key head h // (H/G)), Q = H/G, K head width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from gpt2jax.model.linear import dropout


def attend(
    q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask: jax.Array, *, dropout_rate: float = 0.0, dropout_key: jax.Array | None = None
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v where `mask` (bool, broadcastable to [B, T, S]) is True; a query with no key at all gets zeros, not NaN.

    Scores and softmax are float32 (Vaswani et al., arXiv:1706.03762, section 3.2.1); the result is [B, T, H, K] in q's dtype.
    """
    scores_BGQTS = attention_scores(q_BTHK, k_BSGK)
    weights_BGQTS = masked_softmax(scores_BGQTS, mask[:, None, None])
    weights_BGQTS = dropout(weights_BGQTS, dropout_rate, dropout_key)
    return weigh_values(weights_BGQTS, v_BSGK)


def attention_scores(q_BTHK: jax.Array, k_BSGK: jax.Array) -> jax.Array:
    """Scaled dot products in float32, [B, G, Q, T, S]."""
    B, T, H, K = q_BTHK.shape
    G = k_BSGK.shape[2]
    q_BTGQK = q_BTHK.reshape(B, T, G, H // G, K) * jnp.asarray(1 / math.sqrt(K), q_BTHK.dtype)
    return jnp.einsum("BTGQK,BSGK->BGQTS", q_BTGQK, k_BSGK, preferred_element_type=jnp.float32)


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis of the entries where mask is True; rows without any are zero, with zero gradient."""
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0, 1.0, total)


def weigh_values(weights_BGQTS: jax.Array, v_BSGK: jax.Array) -> jax.Array:
    """Sum of values by weight, [B, T, H, K] in v's dtype."""
    B, G, Q, T, _ = weights_BGQTS.shape
    out_BTGQK = jnp.einsum("BGQTS,BSGK->BTGQK", weights_BGQTS.astype(v_BSGK.dtype), v_BSGK)
    return out_BTGQK.reshape(B, T, G * Q, v_BSGK.shape[-1])
