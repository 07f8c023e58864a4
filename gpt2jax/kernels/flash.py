"""Attention in blocks of queries and keys, in plain JAX: it runs everywhere, and no T x T array is ever in memory.

FlashAttention-2 (Dao, arXiv:2307.08691, algorithms 1 and 2): a running softmax over blocks of keys; backward, the weights of a block once more, from queries,
keys and the logarithm of each row's sum.

Letters: B batch, T tokens, H query heads, G key/value heads, Q = H/G, K key width, V value width; n blocks of S tokens, N = Q S rows of a block of queries.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gpt2jax.kernels.attention import CAUSAL, Rule, capped
from gpt2jax.kernels.product import pack, unpack

#: Most tokens in a block.
BLOCK = 512
#: Score of a pair that the mask hides: finite, so that a row which has seen nothing but such pairs holds no inf - inf, and far below any real score.
HIDDEN = -1e30


def attend_flash(
    q_BTHK: jax.Array,
    k_BGTK: jax.Array,
    v_BGTV: jax.Array,
    segment_BT: jax.Array | None = None,
    sink_H: jax.Array | None = None,
    *,
    rule: Rule = CAUSAL,
) -> jax.Array:
    """`attention.attend_causally` without dropout: [B, T, H, V] in v's dtype. What stands at padding is not zeroed here: it attends to padding."""
    (B, T, H, K), G = q_BTHK.shape, k_BGTK.shape[1]
    n = -(-T // BLOCK)
    S = T if n == 1 else -(-T // (8 * n)) * 8  # equal blocks: 1000 tokens are 4 of 256, 1025 are 5 of 208
    # padding behind the last token: causality hides its keys, and its queries are cut off
    pad = lambda x, axis: jnp.pad(x, [(0, n * S - T if a == axis else 0) for a in range(x.ndim)])  # noqa: E731
    scale = 1 / math.sqrt(K) if rule.scale is None else rule.scale
    q_BnSGQK = pad(q_BTHK * jnp.asarray(scale, q_BTHK.dtype), 1).reshape(B, n, S, G, H // G, K)
    q_nBGNK = q_BnSGQK.transpose(1, 0, 3, 4, 2, 5).reshape(n, B, G, H // G * S, K)
    k_nBGSK, v_nBGSV = (pad(x, 2).reshape(B, G, n, S, -1).transpose(2, 0, 1, 3, 4) for x in (k_BGTK.astype(q_BTHK.dtype), v_BGTV))
    segment_nBS = None if segment_BT is None else pad(segment_BT, 1).reshape(B, n, S).transpose(1, 0, 2)
    sink_GN = None if sink_H is None else jnp.repeat(sink_H.astype(jnp.float32).reshape(G, H // G), S, 1)
    o_nBGNV = _flash(q_nBGNK, k_nBGSK, v_nBGSV, segment_nBS, sink_GN, rule)
    return o_nBGNV.reshape(n, B, G, H // G, S, -1).transpose(1, 0, 4, 2, 3, 5).reshape(B, n * S, H, -1)[:, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(q_nBGNK: jax.Array, k_nBGSK: jax.Array, v_nBGSV: jax.Array, segment_nBS: jax.Array | None, sink_GN: jax.Array | None, rule: Rule) -> jax.Array:
    return _forward(q_nBGNK, k_nBGSK, v_nBGSV, segment_nBS, sink_GN, rule)[0]


def _forward(
    q_nBGNK: jax.Array, k_nBGSK: jax.Array, v_nBGSV: jax.Array, segment_nBS: jax.Array | None, sink_GN: jax.Array | None, rule: Rule
) -> tuple[jax.Array, tuple[Any, ...]]:
    n, B, G, N, _ = q_nBGNK.shape
    S, V = v_nBGSV.shape[-2:]

    def queries(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        i, q_BGNK = block

        def keys(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            top_BGN, sum_BGN, o_BGNV = carry
            scores_BGNS = jnp.where(_mask(i, j, N, S, segment_nBS, rule), capped(_dot("BGNK,BGSK->BGNS", q_BGNK, k_nBGSK[j]), rule), HIDDEN)
            new_BGN = jnp.maximum(top_BGN, scores_BGNS.max(-1))
            weights_BGNS, decay_BGN = jnp.exp(scores_BGNS - new_BGN[..., None]), jnp.exp(top_BGN - new_BGN)
            values_BGNV = _dot("BGNS,BGSV->BGNV", weights_BGNS.astype(v_nBGSV.dtype), v_nBGSV[j])
            return new_BGN, sum_BGN * decay_BGN + weights_BGNS.sum(-1), o_BGNV * decay_BGN[..., None] + values_BGNV

        # a sink is one more key, seen before all others, with no value
        top_BGN = jnp.broadcast_to(jnp.float32(HIDDEN) if sink_GN is None else sink_GN, (B, G, N))
        sum_BGN = jnp.full((B, G, N), 0.0 if sink_GN is None else 1.0, jnp.float32)
        start = (top_BGN, sum_BGN, jnp.zeros((B, G, N, V), jnp.float32))
        top_BGN, sum_BGN, o_BGNV = lax.fori_loop(_first_keys(i, S, rule), i + 1, keys, start)
        return None, ((o_BGNV / sum_BGN[..., None]).astype(v_nBGSV.dtype), top_BGN + jnp.log(sum_BGN))

    _, (o_nBGNV, log_sum_nBGN) = lax.scan(queries, None, (jnp.arange(n), q_nBGNK))
    return o_nBGNV, (pack(q_nBGNK), pack(k_nBGSK), pack(v_nBGSV), segment_nBS, sink_GN, pack(o_nBGNV), log_sum_nBGN)


def _backward(rule: Rule, saved: tuple[Any, ...], do_nBGNV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None]:
    q_nBGNK, k_nBGSK, v_nBGSV, segment_nBS, sink_GN, o_nBGNV, log_sum_nBGN = saved
    q_nBGNK, k_nBGSK, v_nBGSV, o_nBGNV = (unpack(x) for x in (q_nBGNK, k_nBGSK, v_nBGSV, o_nBGNV))
    n, N, S = len(q_nBGNK), q_nBGNK.shape[3], k_nBGSK.shape[3]
    # sum over keys of weight x its gradient: what the softmax's derivative takes off each
    mean_nBGN = (do_nBGNV.astype(jnp.float32) * o_nBGNV.astype(jnp.float32)).sum(-1)

    def keys(dq_nBGKN: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        j, k_BGSK, k_BGKS, v_BGSV = block

        def queries(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            dq_nBGKN, dk_BGSK, dv_BGSV = carry
            q_BGNK, do_BGNV = q_nBGNK[i], do_nBGNV[i]
            scores_BGSN = capped(_dot("BGSK,BGNK->BGSN", k_BGSK, q_BGNK), rule)
            mask_BGSN = _mask(i, j, N, S, segment_nBS, rule).swapaxes(2, 3)
            weights_BGSN = jnp.exp(jnp.where(mask_BGSN, scores_BGSN, HIDDEN) - log_sum_nBGN[i][:, :, None])
            ds_BGSN = weights_BGSN * (_dot("BGSV,BGNV->BGSN", v_BGSV, do_BGNV) - mean_nBGN[i][:, :, None])
            if rule.softcap is not None:
                ds_BGSN = ds_BGSN * (1 - (scores_BGSN / rule.softcap) ** 2)
            ds_BGSN = ds_BGSN.astype(q_BGNK.dtype)
            dv_BGSV = dv_BGSV + _dot("BGSN,BGNV->BGSV", weights_BGSN.astype(do_BGNV.dtype), do_BGNV)
            dk_BGSK = dk_BGSK + _dot("BGSN,BGNK->BGSK", ds_BGSN, q_BGNK)
            return dq_nBGKN.at[i].add(_dot("BGKS,BGSN->BGKN", k_BGKS, ds_BGSN)), dk_BGSK, dv_BGSV

        start = (dq_nBGKN, jnp.zeros(k_BGSK.shape, jnp.float32), jnp.zeros(v_BGSV.shape, jnp.float32))
        dq_nBGKN, dk_BGSK, dv_BGSV = lax.fori_loop(j, _last_queries(j, n, S, rule), queries, start)
        return dq_nBGKN, (dk_BGSK.astype(k_BGSK.dtype), dv_BGSV.astype(v_BGSV.dtype))

    blocks = (jnp.arange(n), k_nBGSK, k_nBGSK.swapaxes(-1, -2), v_nBGSV)
    dq_nBGKN, (dk_nBGSK, dv_nBGSV) = lax.scan(keys, jnp.zeros((*q_nBGNK.shape[:3], q_nBGNK.shape[4], N), jnp.float32), blocks)
    dsink_GN = None if sink_GN is None else -(jnp.exp(sink_GN - log_sum_nBGN) * mean_nBGN).sum((0, 1))
    return dq_nBGKN.swapaxes(-1, -2).astype(q_nBGNK.dtype), dk_nBGSK, dv_nBGSV, None, dsink_GN


_flash.defvjp(_forward, _backward)


def _mask(i: jax.Array, j: jax.Array, N: int, S: int, segment_nBS: jax.Array | None, rule: Rule) -> jax.Array:
    """Which keys of block j the queries of block i see: bool [1 or B, 1, N, S]."""
    t_N1, s_S = (i * S + jnp.arange(N) % S)[:, None], j * S + jnp.arange(S)
    seen_BGNS = (s_S <= t_N1)[None, None]
    if rule.window is not None:
        seen_BGNS = seen_BGNS & (t_N1 - s_S < rule.window)
    if segment_nBS is not None:
        seen_BGNS = seen_BGNS & (jnp.tile(segment_nBS[i], (1, N // S))[:, None, :, None] == segment_nBS[j][:, None, None, :])
    return seen_BGNS


def _first_keys(i: jax.Array, S: int, rule: Rule) -> jax.Array:
    """First block of keys that block i of queries sees."""
    return jnp.zeros_like(i) if rule.window is None else jnp.maximum(i * S - rule.window + 1, 0) // S


def _last_queries(j: jax.Array, n: int, S: int, rule: Rule) -> jax.Array:
    """One behind the last block of queries that sees block j of keys."""
    return jnp.full_like(j, n) if rule.window is None else jnp.minimum(((j + 1) * S + rule.window - 2) // S + 1, n)


def _dot(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)
