"""Attention on a TPU: splash attention, the Pallas kernel that comes with JAX (jax.experimental.pallas.ops.tpu.splash_attention).

It takes one sequence without a batch, queries that are scaled already, and lengths that are multiples of a block.

Letters: B batch, T tokens, H query heads, G key/value heads, K key width, V value width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as lib

from gpt2jax.kernels.attention import CAUSAL, Rule

#: Sides of a block, best first: large ones keep the matrix unit busy (MaxText's defaults), small ones fit lengths that are no multiple. 128 is the least.
BLOCKS = (512, 256, 128)


def attend_splash(
    q_BTHK: jax.Array,
    k_BGTK: jax.Array,
    v_BGTV: jax.Array,
    segment_BT: jax.Array | None = None,
    sink_H: jax.Array | None = None,
    *,
    rule: Rule = CAUSAL,
    interpret: bool = False,
) -> jax.Array:
    """`attention.attend_causally` without dropout: [B, T, H, V] in v's dtype. What stands at padding is not zeroed here: it attends to padding.

    interpret: run without a TPU, very slowly.
    """
    T, H, K = q_BTHK.shape[1:]
    block = next(b for b in BLOCKS if -T % b <= T // 8 or b == BLOCKS[-1])
    # padding behind the last token: causality hides its keys, and its queries are cut off
    pad = lambda x, axis: jnp.pad(x, [(0, -T % block if a == axis else 0) for a in range(x.ndim)])  # noqa: E731
    scale = 1 / math.sqrt(K) if rule.scale is None else rule.scale
    q_BHTK = pad(q_BTHK * jnp.asarray(scale, q_BTHK.dtype), 1).transpose(0, 2, 1, 3)
    k_BGTK, v_BGTV = pad(k_BGTK.astype(q_BTHK.dtype), 2), pad(v_BGTV, 2)
    segments = None if segment_BT is None else lib.SegmentIds(pad(segment_BT, 1), pad(segment_BT, 1))
    sides = (q_BHTK.shape[2],) * 2
    mask = lib.CausalMask(sides) if rule.window is None else lib.LocalMask(sides, (rule.window - 1, 0), 0)
    kernel = lib.make_splash_mha(
        lib.MultiHeadMask([mask] * H),
        block_sizes=_block_sizes(block),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=rule.softcap,
        interpret=interpret,
    )
    o_BHTV = jax.vmap(kernel, (0, 0, 0, 0, None))(q_BHTK, k_BGTK, v_BGTV, segments, sink_H)
    return o_BHTV.transpose(0, 2, 1, 3)[:, :T].astype(v_BGTV.dtype)


def _block_sizes(b: int) -> lib.BlockSizes:
    """The same side in the forward pass and both backward ones."""
    return lib.BlockSizes(b, b, b, block_q_dkv=b, block_kv_dkv=b, block_kv_dkv_compute=b, block_q_dq=b, block_kv_dq=b)
