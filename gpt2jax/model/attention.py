"""Causal attention: multi-head, grouped-query and multi-query.

Letters: B batch, T tokens, S large cache slots, R recent slots, D width, H heads, G key/value heads (G divides H), K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.kernels.attention import Rule, attention_scores, masked_softmax, weigh_values
from gpt2jax.kernels.backends import attention
from gpt2jax.model.cache import KV, Slots, Span
from gpt2jax.model.config import ModelConfig
from gpt2jax.model.linear import Linear, child_key, normal, residual_std
from gpt2jax.model.norm import RMSNorm
from gpt2jax.model.position import rotation


class Cached(nnx.Module):
    """What mixers with a cache of keys and values have in common. Each has a call for whole sequences, and for `step` its own `_project` (queries, and the new
    tokens' entries), `_scores` (queries over entries: float32 [B, G, Q, T, S]) and `_output` (sums of the entries' values to y)."""

    cache_dtype: str | None = None  # of the frozen part of the cache; None is the compute dtype
    can_trim = True  # a cache of keys and values forgets its last tokens by masking their slots
    rule: Rule
    backend: str
    dropout_rate: float
    sinks: nnx.Param[jax.Array] | None
    _project: Callable[..., tuple[Any, KV]]
    _scores: Callable[..., jax.Array]
    _output: Callable[..., jax.Array]

    def start(self, kv: KV, slots: int, recent: int) -> tuple[KV, KV]:
        """A sequence's keys and values as (frozen, live): the first T of S slots are filled, the R recent ones are empty."""
        return self.grow(kv.kept_in(self.cache_dtype or kv.k.dtype), slots), self.renew(kv, recent)

    def grow(self, frozen: KV, slots: int) -> KV:
        """The frozen part with room for `slots` slots."""
        pad = lambda x: jnp.pad(x, [(0, slots - x.shape[2] if axis == 2 else 0) for axis in range(x.ndim)])  # noqa: E731
        return jax.tree.map(pad, frozen)

    def renew(self, live: KV, recent: int) -> KV:
        """The live part after a commit, empty, with room for `recent` tokens."""
        return jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], recent, *x.shape[3:]), x.dtype), live)

    def step(self, x_BTD: jax.Array, frozen: KV, live: KV, slots: Slots, span: Span) -> tuple[jax.Array, KV]:
        """T more tokens, already counted in `slots` (they are its last T recent ones): y [B, T, D] and live with their keys and values."""
        q, new = self._project(x_BTD, span)
        B, T, S, R = *x_BTD.shape[:2], frozen.k.shape[2], live.k.shape[2]
        first = slots.recent - T
        # the barrier keeps XLA from fusing the update into the reads below, which would copy the buffer
        live = jax.lax.optimization_barrier(KV(_write(live.k, new.k, first), _write(live.v, new.v, first)))
        seen_TR = jnp.arange(R)[None, :] <= first + jnp.arange(T)[:, None]
        mask_BTR = seen_TR[None] & slots.valid_BR[:, None, :]
        mask_BTS = jnp.broadcast_to(slots.valid_BS[:, None, :], (B, T, S))
        mask_BTN = jnp.concatenate([mask_BTS, mask_BTR], -1)
        if self.rule.window is not None:
            mask_BTN = mask_BTN & (span.position_BT[:, :, None] - slots.position_BN()[:, None] < self.rule.window)
        scores = jnp.concatenate([self._scores(q, frozen), self._scores(q, live)], -1)
        weights = masked_softmax(scores, mask_BTN[:, None, None], self._sink_H)
        o_BTHK = weigh_values(weights[..., :S], frozen.v, frozen.v_scale, dtype=live.v.dtype) + weigh_values(weights[..., S:], live.v)
        return self._output(o_BTHK), live

    def commit(self, frozen: KV, live: KV, slots: Slots) -> KV:
        """Live keys and values written behind the frozen ones. The caller has planned for them: filled + R <= S."""
        return jax.tree.map(lambda old, new: _write(old, new, slots.filled), frozen, live.kept_in(frozen.k.dtype))

    def _attend(self, q_BTHK: jax.Array, k_BGTK: jax.Array, v_BGTV: jax.Array, span: Span, dropout_key: jax.Array | None) -> jax.Array:
        """A whole sequence, on the schedule that the config names."""
        how: Any = dict(rule=self.rule, backend=self.backend, dropout_rate=self.dropout_rate, dropout_key=dropout_key)
        return attention(q_BTHK, k_BGTK, v_BGTV, span.segment_BT, self._sink_H, **how)

    @property
    def _sink_H(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...]


class Attention(Cached):
    """GPT-2's attention (Radford et al. 2019; its src/model.py `attn`), with the parts that later models changed. Two calls: a whole sequence, and a few tokens
    on top of a cache.

    G < H key/value heads: query head h reads head h // (H/G), and none is repeated in memory (GQA, Ainslie et al., arXiv:2305.13245). qk_norm: RMSNorm over
    each head of queries and keys, before they turn (as in Qwen3; Henry et al., arXiv:2010.04245). sinks: see `masked_softmax`.
    """

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        d, h, g, k, dtype = config.n_embd, config.n_head, config.kv_head_count, config.head_width, jnp.dtype(config.compute_dtype)
        std, out_std, bias = config.initializer_range, residual_std(config.initializer_range, config.n_layer), config.attention_bias
        self.query = Linear(child_key(key, "query"), (d,), (h, k), input_axes=("embed",), output_axes=("heads", "head"), std=std, dtype=dtype, bias=bias)
        kv_axes = (None, "kv_heads", "head")
        self.key_value = Linear(child_key(key, "key_value"), (d,), (2, g, k), input_axes=("embed",), output_axes=kv_axes, std=std, dtype=dtype, bias=bias)
        self.out = Linear(child_key(key, "out"), (h, k), (d,), input_axes=("heads", "head"), output_axes=("embed",), std=out_std, dtype=dtype, bias=bias)
        self.query_norm = RMSNorm(config, k, "head") if config.qk_norm else None
        self.key_norm = RMSNorm(config, k, "head") if config.qk_norm else None
        self.sinks = normal(child_key(key, "sinks"), (h,), ("heads",), std) if config.attention_sinks else None
        self.rotate = rotation(config, k)
        self.rule = Rule(config.sliding_window, config.attention_softcap)
        self.backend, self.dropout_rate = config.attention_backend, config.attn_pdrop

    def __call__(self, x_BTD: jax.Array, span: Span, dropout_key: jax.Array | None = None) -> tuple[jax.Array, KV]:
        """A whole sequence: y [B, T, D], and the keys and values that a cache can start from."""
        q_BTHK, kv = self._project(x_BTD, span)
        return self.out(self._attend(q_BTHK, kv.k, kv.v, span, dropout_key)), kv

    def _project(self, x_BTD: jax.Array, span: Span) -> tuple[jax.Array, KV]:
        q_BTHK, kv_BT2GK = self.query(x_BTD), self.key_value(x_BTD)
        k_BTGK, v_BTGK = kv_BT2GK[:, :, 0], kv_BT2GK[:, :, 1]
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHK, k_BTGK = self.query_norm(q_BTHK), self.key_norm(k_BTGK)
        q_BTHK, k_BTGK = self.rotate(q_BTHK, span.position_BT), self.rotate(k_BTGK, span.position_BT)
        return q_BTHK, KV(k_BTGK.transpose(0, 2, 1, 3), v_BTGK.transpose(0, 2, 1, 3))

    def _scores(self, q_BTHK: jax.Array, kv: KV) -> jax.Array:
        return attention_scores(q_BTHK, kv.k, kv.k_scale, rule=self.rule)

    def _output(self, o_BTHK: jax.Array) -> jax.Array:
        return self.out(o_BTHK)


def _write(old: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new, slot, 2)
