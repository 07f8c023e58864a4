"""Multi-head latent attention.

Letters: B batch, T tokens, S slots, D width, H heads, E rank of the latent, N width of what never turns, P width of what turns, K = N + P, V width of values.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from gpt2jax.kernels.attention import Rule, attention_scores, capped
from gpt2jax.model.attention import Cached
from gpt2jax.model.cache import KV, Span
from gpt2jax.model.config import ModelConfig
from gpt2jax.model.linear import Linear, child_key, normal, residual_std
from gpt2jax.model.norm import RMSNorm
from gpt2jax.model.position import rotation

#: Of the norms of latents, whatever the model's own is (DeepSeek's inference/model.py and transformers).
EPSILON = 1e-6


class LatentAttention(Cached):
    """Keys and values of all heads are made from one latent a token, and the cache keeps that (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A key is [nope | rope]: the nope part is a head's own, from the latent; the rope part, all heads' in common, is from the residual stream and alone turns
    (with model.position=rope; else nothing does, as in Kimi Linear, arXiv:2510.26692). Whole sequences are multi-head attention over keys and values made for
    each head. A step never makes them: a head's key map is taken to its query and its value map to its sum (the paper's appendix B, equation 12), which leaves
    multi-query attention over latents. A cache's `KV` holds k [B, 1, S, P], turned, and v [B, 1, S, E], the latents after their norm.
    """

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        d, h, self.rank, self.nope = config.n_embd, config.n_head, config.kv_rank, config.nope_dim
        std, bias, dtype, q_rank = config.initializer_range, config.attention_bias, jnp.dtype(config.compute_dtype), config.mla_q_rank

        def from_stream(name: str, width: int) -> Linear:
            return Linear(child_key(key, name), (d,), (width,), input_axes=("embed",), output_axes=("latent",), std=std, dtype=dtype, bias=bias)

        def to_heads(name: str, width: int, rank: int | None) -> Linear:
            axis = "latent" if rank else "embed"
            axes = ("heads", "head")
            return Linear(child_key(key, name), (rank or d,), (h, width), input_axes=(axis,), output_axes=axes, std=std, dtype=dtype, bias=False)

        self.query_down = from_stream("query_down", q_rank) if q_rank else None
        self.query_norm = RMSNorm(config, q_rank, "latent", EPSILON) if q_rank else None
        self.query = to_heads("query", config.key_width, q_rank)
        self.latent = from_stream("latent", self.rank + config.rope_dim)
        self.latent_norm = RMSNorm(config, self.rank, "latent", EPSILON)
        self.key_up = to_heads("key_up", self.nope, self.rank)
        self.value_up = to_heads("value_up", config.value_width, self.rank)
        sizes, out_std = (h, config.value_width), residual_std(std, config.n_layer)
        self.out = Linear(child_key(key, "out"), sizes, (d,), input_axes=("heads", "head"), output_axes=("embed",), std=out_std, dtype=dtype, bias=bias)
        self.sinks = normal(child_key(key, "sinks"), (h,), ("heads",), std) if config.attention_sinks else None
        self.rotate = rotation(config, config.rope_dim)
        stretch = 0.1 * config.rope_mscale_all_dim * math.log(config.rope_factor) + 1.0
        self.rule = Rule(config.sliding_window, config.attention_softcap, stretch**2 / math.sqrt(config.key_width))
        self.backend, self.dropout_rate = config.attention_backend, config.attn_pdrop

    def __call__(self, x_BTD: jax.Array, span: Span, dropout_key: jax.Array | None = None) -> tuple[jax.Array, KV]:
        """A whole sequence: y [B, T, D], and the latents and turned keys that a cache can start from."""
        q_BTHN, q_BTHP = self._queries(x_BTD, span)
        kv = self._latents(x_BTD, span)
        k_BHTN, v_BHTV = (make(kv.v[:, 0]).transpose(0, 2, 1, 3) for make in (self.key_up, self.value_up))
        k_BHTP = jnp.broadcast_to(kv.k, (*k_BHTN.shape[:3], kv.k.shape[3]))
        q_BTHK, k_BHTK = jnp.concatenate([q_BTHN, q_BTHP], -1), jnp.concatenate([k_BHTN, k_BHTP], -1)
        return self.out(self._attend(q_BTHK, k_BHTK, v_BHTV, span, dropout_key)), kv

    def _project(self, x_BTD: jax.Array, span: Span) -> tuple[tuple[jax.Array, jax.Array], KV]:
        """What multi-query attention over the cache takes: queries for latents [B, T, H, E] and for turned keys [B, T, H, P]; and the new tokens' entries."""
        q_BTHN, q_BTHP = self._queries(x_BTD, span)
        w_HNE, scale_HN = self.key_up.turned()
        q_BTHN = q_BTHN if scale_HN is None else q_BTHN * scale_HN.astype(q_BTHN.dtype)
        return (jnp.einsum("BTHN,HNE->BTHE", q_BTHN, w_HNE.astype(q_BTHN.dtype)), q_BTHP), self._latents(x_BTD, span)

    def _scores(self, q: tuple[jax.Array, jax.Array], kv: KV) -> jax.Array:
        """[B, 1, H, T, S] in float32."""
        (q_BTHE, q_BTHP), plain = q, Rule(scale=self.rule.scale)
        return capped(attention_scores(q_BTHE, kv.v, kv.v_scale, rule=plain) + attention_scores(q_BTHP, kv.k, kv.k_scale, rule=plain), self.rule)

    def _output(self, o_BTHE: jax.Array) -> jax.Array:
        """Sums of latents to y [B, T, D]."""
        w_HVE, scale_HV = self.value_up.turned()
        o_BTHV = jnp.einsum("BTHE,HVE->BTHV", o_BTHE, w_HVE.astype(o_BTHE.dtype))
        return self.out(o_BTHV if scale_HV is None else o_BTHV * scale_HV.astype(o_BTHV.dtype))

    def _queries(self, x_BTD: jax.Array, span: Span) -> tuple[jax.Array, jax.Array]:
        if self.query_down is not None and self.query_norm is not None:
            x_BTD = self.query_norm(self.query_down(x_BTD))
        q_BTHK = self.query(x_BTD)
        return q_BTHK[..., : self.nope], self.rotate(q_BTHK[..., self.nope :], span.position_BT)

    def _latents(self, x_BTD: jax.Array, span: Span) -> KV:
        both_BTL = self.latent(x_BTD)
        c_BTE, k_BT1P = self.latent_norm(both_BTL[..., : self.rank]), both_BTL[:, :, None, self.rank :]
        return KV(self.rotate(k_BT1P, span.position_BT).transpose(0, 2, 1, 3), c_BTE[:, None])
