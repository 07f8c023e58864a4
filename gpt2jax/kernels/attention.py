"""Attention over keys and values, plain XLA.

Letters: B batch, T queries, S keys, H query heads, G key/value heads (G divides H; query head h reads key head h // (H/G)), Q = H/G, N = Q T, K head width.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from gpt2jax.model.linear import dropout

#: Queries of a block of `attend_causally`: fewer skip more of what the mask hides, more make larger products.
BLOCK = 256


def attend_causally(
    q_BTHK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, valid_BT: jax.Array | None, *, dropout_rate: float = 0.0, dropout_key: jax.Array | None = None
) -> jax.Array:
    """`attend` where each token sees itself and what stands before it, but for keys whose valid_BT (bool) is False.

    In blocks of queries, each against the keys up to its own end: almost half of all scores would be masked.
    """
    T, outs = q_BTHK.shape[1], []
    for start in range(0, T, BLOCK):
        end = min(start + BLOCK, T)
        mask_BTS = jnp.tril(jnp.ones((1, end - start, end), bool), start)
        if valid_BT is not None:
            mask_BTS = mask_BTS & valid_BT[:, None, :end]
        key = dropout_key if dropout_key is None or start == 0 else jax.random.fold_in(dropout_key, start)
        outs.append(attend(q_BTHK[:, start:end], k_BGTK[:, :, :end], v_BGTK[:, :, :end], mask_BTS, dropout_rate=dropout_rate, dropout_key=key))
    return jnp.concatenate(outs, 1)


def attend(
    q_BTHK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array, mask: jax.Array, *, dropout_rate: float = 0.0, dropout_key: jax.Array | None = None
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v where `mask` (bool, broadcastable to [B, T, S]) is True; a query with no key at all gets zeros, not NaN.

    Scores and softmax are float32 (Vaswani et al., arXiv:1706.03762, section 3.2.1); the result is [B, T, H, K] in v's dtype. Keys and values are head-major:
    a batched product whose batch axes do not lead is several times slower on a CPU, and a cache kept this way is read without a copy.
    """
    weights_BGQTS = masked_softmax(attention_scores(q_BTHK, k_BGSK), mask[:, None, None])
    return weigh_values(dropout(weights_BGQTS, dropout_rate, dropout_key), v_BGSK)


def attention_scores(q_BTHK: jax.Array, k_BGSK: jax.Array, scale_BGS: jax.Array | None = None) -> jax.Array:
    """Scaled dot products in float32, [B, G, Q, T, S]. Keys of another dtype, times `scale` if they are int8, are read as q's."""
    B, T, H, K = q_BTHK.shape
    G, S = k_BGSK.shape[1:3]
    q_BGNK = (q_BTHK * jnp.asarray(1 / math.sqrt(K), q_BTHK.dtype)).transpose(0, 2, 1, 3).reshape(B, G, H // G * T, K)
    scores_BGNS = jnp.einsum("BGNK,BGSK->BGNS", q_BGNK, k_BGSK.astype(q_BTHK.dtype), preferred_element_type=jnp.float32)
    scores_BGNS = scores_BGNS if scale_BGS is None else scores_BGNS * scale_BGS[:, :, None]
    return scores_BGNS.reshape(B, G, H // G, T, S)


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis of the entries where mask is True; rows without any are zero, with zero gradient."""
    # one finite fill, once: exp underflows to exactly 0 beside any real score, and a row of fills stays finite until it is zeroed
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    return jnp.where(mask.any(-1, keepdims=True), weights, 0.0)


def weigh_values(weights_BGQTS: jax.Array, v_BGSK: jax.Array, scale_BGS: jax.Array | None = None, *, dtype: Any = None) -> jax.Array:
    """Sum of values, times `scale` if they are int8, by weight: [B, T, H, K] in `dtype`, by default v's."""
    B, G, Q, T, S = weights_BGQTS.shape
    weights_BGNS = weights_BGQTS.reshape(B, G, Q * T, S)
    weights_BGNS = (weights_BGNS if scale_BGS is None else weights_BGNS * scale_BGS[:, :, None]).astype(dtype or v_BGSK.dtype)
    out_BGNK = jnp.einsum("BGNS,BGSK->BGNK", weights_BGNS, v_BGSK.astype(weights_BGNS.dtype))
    return out_BGNK.reshape(B, G * Q, T, -1).transpose(0, 2, 1, 3)
