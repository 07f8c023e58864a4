"""Attention on an NVIDIA GPU: cuDNN's kernel, through jax.nn.dot_product_attention.

Letters: B batch, T tokens, H query heads, G key/value heads, K key width, V value width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from gpt2jax.kernels.attention import CAUSAL, Rule


def attend_cudnn(q_BTHK: jax.Array, k_BGTK: jax.Array, v_BGTV: jax.Array, segment_BT: None = None, sink_H: None = None, *, rule: Rule = CAUSAL) -> jax.Array:
    """`attention.attend_causally` in float16 or bfloat16 without segments, sinks, caps and dropout: [B, T, H, V] in v's dtype.

    The kernel wants keys and values equally wide, in multiples of 8, and JAX's gradient an even T. Zeros behind a key change no score, those behind a value are
    cut off; causality hides keys behind the last token, and their queries are cut off.
    """
    (_, T, _, K), V = q_BTHK.shape, v_BGTV.shape[3]
    width = -(-max(K, V) // 8) * 8
    padded = lambda x_BTHK: jnp.pad(x_BTHK.astype(q_BTHK.dtype), [(0, 0), (0, T % 2), (0, 0), (0, width - x_BTHK.shape[3])])  # noqa: E731
    o_BTHV = jax.nn.dot_product_attention(
        padded(q_BTHK), padded(k_BGTK.transpose(0, 2, 1, 3)), padded(v_BGTV.transpose(0, 2, 1, 3)),
        scale=1 / math.sqrt(K) if rule.scale is None else rule.scale, is_causal=True, implementation="cudnn",
        local_window_size=None if rule.window is None else (rule.window - 1, 0),
    )  # fmt: skip
    return o_BTHV[:, :T, :, :V].astype(v_BGTV.dtype)
