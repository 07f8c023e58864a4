"""Causal multi-head attention.

Letters: B batch, T tokens, S large cache slots, R recent slots, D width, H heads, G key/value heads (= H here), K head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.config import ModelConfig
from gpt2jax.kernels.attention import attend, attention_scores, masked_softmax, weigh_values
from gpt2jax.model.cache import KV, Slots, Span
from gpt2jax.model.linear import Linear, child_key, residual_std


class Attention(nnx.Module):
    """GPT-2's attention (Radford et al. 2019; its src/model.py `attn`). Two calls: a whole sequence, and a few tokens on top of a cache."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        d, h, k, dtype = config.n_embd, config.n_head, config.head_dim, jnp.dtype(config.compute_dtype)
        std, out_std = config.initializer_range, residual_std(config.initializer_range, config.n_layer)
        self.query = Linear(child_key(key, "query"), (d,), (h, k), input_axes=("embed",), output_axes=("heads", "head"), std=std, dtype=dtype)
        self.key_value = Linear(
            child_key(key, "key_value"), (d,), (2, h, k), input_axes=("embed",), output_axes=(None, "kv_heads", "head"), std=std, dtype=dtype
        )
        self.out = Linear(child_key(key, "out"), (h, k), (d,), input_axes=("heads", "head"), output_axes=("embed",), std=out_std, dtype=dtype)
        self.dropout_rate = config.attn_pdrop

    def __call__(self, x_BTD: jax.Array, span: Span, dropout_key: jax.Array | None = None) -> tuple[jax.Array, KV]:
        """A whole sequence: y [B, T, D], and the keys and values that a cache can start from."""
        q_BTHK, kv_BTGK = self._project(x_BTD)
        T = x_BTD.shape[1]
        mask_BTS = jnp.tril(jnp.ones((1, T, T), bool))
        if span.valid_BT is not None:
            mask_BTS = mask_BTS & span.valid_BT[:, None, :]
        o_BTHK = attend(q_BTHK, kv_BTGK.k, kv_BTGK.v, mask_BTS, dropout_rate=self.dropout_rate, dropout_key=dropout_key)
        return self.out(o_BTHK), kv_BTGK

    def start(self, kv_BTGK: KV, slots: int, recent: int) -> tuple[KV, KV]:
        """A sequence's keys and values as (frozen, live): the first T of S slots are filled, the R recent ones are empty."""
        B, T, G, K = kv_BTGK.k.shape
        pad = lambda x: jnp.pad(x, ((0, 0), (0, slots - T), (0, 0), (0, 0)))  # noqa: E731
        empty = jnp.zeros((B, recent, G, K), kv_BTGK.k.dtype)
        return KV(pad(kv_BTGK.k), pad(kv_BTGK.v)), KV(empty, empty)

    def step(self, x_BTD: jax.Array, frozen: KV, live: KV, slots: Slots, span: Span) -> tuple[jax.Array, KV]:
        """T more tokens, already counted in `slots` (they are its last T recent ones): y [B, T, D] and live with their keys and values."""
        q_BTHK, new_BTGK = self._project(x_BTD)
        T, R = x_BTD.shape[1], live.k.shape[1]
        first = slots.recent - T
        write = lambda old, new: jax.lax.dynamic_update_slice(old, new, (0, first, 0, 0))  # noqa: E731
        # the barrier keeps XLA from fusing the update into the reads below, which would copy the buffer
        live = jax.lax.optimization_barrier(KV(write(live.k, new_BTGK.k), write(live.v, new_BTGK.v)))
        seen_TR = jnp.arange(R)[None, :] <= first + jnp.arange(T)[:, None]
        mask_BTR = seen_TR[None] & slots.valid_BR[:, None, :]
        mask_BTS = jnp.broadcast_to(slots.valid_BS[:, None, :], (x_BTD.shape[0], T, frozen.k.shape[1]))
        scores = [attention_scores(q_BTHK, frozen.k), attention_scores(q_BTHK, live.k)]
        weights = masked_softmax(jnp.concatenate(scores, -1), jnp.concatenate([mask_BTS, mask_BTR], -1)[:, None, None])
        S = frozen.k.shape[1]
        o_BTHK = weigh_values(weights[..., :S], frozen.v) + weigh_values(weights[..., S:], live.v)
        return self.out(o_BTHK), live

    def commit(self, frozen: KV, live: KV, slots: Slots) -> KV:
        """Live keys and values written behind the frozen ones. The caller has planned for them: filled + R <= S."""
        write = lambda old, new: jax.lax.dynamic_update_slice(old, new, (0, slots.filled, 0, 0))  # noqa: E731
        return KV(write(frozen.k, live.k), write(frozen.v, live.v))

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, KV]:
        kv_BT2GK = self.key_value(x_BTD)
        return self.query(x_BTD), KV(kv_BT2GK[:, :, 0], kv_BT2GK[:, :, 1])
