"""Attention over keys and values, plain XLA: the schedule that does everything, and that the others must equal.

Letters: B batch, T queries, S keys, H query heads, G key/value heads (G divides H; query head h reads key head h // (H/G)), Q = H/G, N = Q T, K head width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gpt2jax.model.linear import dropout

#: Queries of a block of `attend_causally`: fewer skip more of what the mask hides, more make larger products.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Rule:
    """The static part of attention.

    window: a token sees itself and window - 1 tokens before it (Mistral, arXiv:2310.06825), None all. softcap: scores become cap tanh(score / cap) (Gemma 2,
    arXiv:2408.00118, section 2). scale: factor on dot products, None is 1/sqrt(K).
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None


#: Nothing but causality.
CAUSAL = Rule()


def attend_causally(
    q_BTHK: jax.Array,
    k_BGTK: jax.Array,
    v_BGTK: jax.Array,
    segment_BT: jax.Array | None = None,
    sink_H: jax.Array | None = None,
    *,
    rule: Rule = CAUSAL,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """`attend` where each token sees itself and what stands before it in its own segment.

    segment_BT int32: documents packed in one row have numbers of their own; a negative one marks padding, which sees nothing and is seen by nothing (zeros).
    In blocks of queries, each against the keys that it can see at all: almost half of all scores would be masked.
    """
    T, outs = q_BTHK.shape[1], []
    for start in range(0, T, BLOCK):
        end = min(start + BLOCK, T)
        first = 0 if rule.window is None else max(0, start - rule.window + 1)
        t_T1, s_S = jnp.arange(start, end)[:, None], jnp.arange(first, end)
        mask_BTS = (s_S <= t_T1)[None]
        if rule.window is not None:
            mask_BTS = mask_BTS & (t_T1 - s_S < rule.window)
        if segment_BT is not None:
            mask_BTS = mask_BTS & same_segment(segment_BT[:, start:end], segment_BT[:, first:end])
        key = dropout_key if dropout_key is None or start == 0 else jax.random.fold_in(dropout_key, start)
        k, v = k_BGTK[:, :, first:end], v_BGTK[:, :, first:end]
        outs.append(attend(q_BTHK[:, start:end], k, v, mask_BTS, sink_H, rule=rule, dropout_rate=dropout_rate, dropout_key=key))
    return jnp.concatenate(outs, 1)


def same_segment(segment_BT: jax.Array, segment_BS: jax.Array) -> jax.Array:
    """bool [B, T, S]: equal numbers, and no padding."""
    return (segment_BT[:, :, None] == segment_BS[:, None, :]) & (segment_BS >= 0)[:, None, :]


def attend(
    q_BTHK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSK: jax.Array,
    mask: jax.Array,
    sink_H: jax.Array | None = None,
    *,
    rule: Rule = CAUSAL,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v where `mask` (bool, broadcastable to [B, T, S]) is True; a query with no key at all gets zeros, not NaN.

    Scores and softmax are float32 (Vaswani et al., arXiv:1706.03762, section 3.2.1); the result is [B, T, H, K] in v's dtype. Keys and values are head-major:
    a batched product whose batch axes do not lead is several times slower on a CPU, and a cache kept this way is read without a copy. `mask` alone says what is
    seen: the rule's window is the caller's.
    """
    weights_BGQTS = masked_softmax(attention_scores(q_BTHK, k_BGSK, rule=rule), mask[:, None, None], sink_H)
    return weigh_values(dropout(weights_BGQTS, dropout_rate, dropout_key), v_BGSK)


def attention_scores(q_BTHK: jax.Array, k_BGSK: jax.Array, scale_BGS: jax.Array | None = None, *, rule: Rule = CAUSAL) -> jax.Array:
    """Scaled dot products in float32, [B, G, Q, T, S]. Keys of another dtype, times `scale` if they are int8, are read as q's."""
    B, T, H, K = q_BTHK.shape
    G, S = k_BGSK.shape[1:3]
    scale = 1 / math.sqrt(K) if rule.scale is None else rule.scale
    q_BGNK = (q_BTHK * jnp.asarray(scale, q_BTHK.dtype)).transpose(0, 2, 1, 3).reshape(B, G, H // G * T, K)
    scores_BGNS = jnp.einsum("BGNK,BGSK->BGNS", q_BGNK, k_BGSK.astype(q_BTHK.dtype), preferred_element_type=jnp.float32)
    scores_BGNS = scores_BGNS if scale_BGS is None else scores_BGNS * scale_BGS[:, :, None]
    return capped(scores_BGNS, rule).reshape(B, G, H // G, T, S)


def capped(scores: jax.Array, rule: Rule) -> jax.Array:
    """The rule's soft cap on float32 scores."""
    return scores if rule.softcap is None else rule.softcap * jnp.tanh(scores / rule.softcap)


def masked_softmax(scores_BGQTS: jax.Array, mask: jax.Array, sink_H: jax.Array | None = None) -> jax.Array:
    """Softmax over the last axis of the entries where mask is True; rows without any are zero, with zero gradient.

    sink_H: float32 logits, one a query head, that take part in the softmax of each of its rows and are then dropped (gpt-oss, arXiv:2508.10925, section 2.2).
    """
    # one finite fill, once: exp underflows to exactly 0 beside any real score, and a row of fills stays finite until it is zeroed
    scores = jnp.where(mask, scores_BGQTS, -1e30)
    if sink_H is not None:
        B, G, Q, T, _ = scores.shape
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink_H.astype(jnp.float32).reshape(G, Q, 1, 1), (B, G, Q, T, 1))], -1)
    weights = jax.nn.softmax(scores, -1)[..., : scores_BGQTS.shape[-1]]
    return jnp.where(mask.any(-1, keepdims=True), weights, 0.0)


def weigh_values(weights_BGQTS: jax.Array, v_BGSK: jax.Array, scale_BGS: jax.Array | None = None, *, dtype: Any = None) -> jax.Array:
    """Sum of values, times `scale` if they are int8, by weight: [B, T, H, K] in `dtype`, by default v's."""
    B, G, Q, T, S = weights_BGQTS.shape
    weights_BGNS = weights_BGQTS.reshape(B, G, Q * T, S)
    weights_BGNS = (weights_BGNS if scale_BGS is None else weights_BGNS * scale_BGS[:, :, None]).astype(dtype or v_BGSK.dtype)
    out_BGNK = jnp.einsum("BGNS,BGSK->BGNK", weights_BGNS, v_BGSK.astype(weights_BGNS.dtype))
    return out_BGNK.reshape(B, G * Q, T, -1).transpose(0, 2, 1, 3)
