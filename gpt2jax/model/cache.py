"""The functional decode state.

Letters: B batch, S slots of the large cache, R slots of the recent one, N = S + R, G key/value heads, K head width.

A mixer's state has two parts. `frozen` stays constant for a chunk of decode steps; `live` is carried by the scan and takes the new tokens. Between chunks
`commit` writes live into frozen. Why two: XLA copies a buffer that a loop both reads and updates, at every step, so the large part must not be in the carry.

Slots are used alike by all rows: prompts are padded on the right to one length, generated tokens follow in the next slots, and `valid` says which slots hold
real tokens. A slot's index is therefore no position; positions are counted per row (`length_B`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gpt2jax.model.linear import quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens handed to a mixer: position_BT int32; valid_BT bool (False marks padding; None: all are real); segment_BT int32, for whole sequences.

    Tokens see those of their own segment only, and a negative segment is padding; None says that causal order alone hides what must be hidden, as it does
    where padding stands behind the real tokens. counts_BT (bool): which real tokens count in the loads of experts; None: all.
    """

    position_BT: jax.Array
    valid_BT: jax.Array | None = None
    segment_BT: jax.Array | None = None
    counts_BT: jax.Array | None = None

    @staticmethod
    def of(shape: tuple[int, int], valid_BT: jax.Array | None = None, segment_BT: jax.Array | None = None) -> Span:
        """A whole sequence: each segment (by default the row is one) starts at position 0; padding, on either side of a row, takes no position."""
        t_BT = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        if segment_BT is not None:
            segment_BT = segment_BT if valid_BT is None else jnp.where(valid_BT, segment_BT, -1)
            starts_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)))
            return Span(t_BT - jax.lax.cummax(jnp.where(starts_BT, t_BT, 0), 1), segment_BT >= 0, segment_BT)
        if valid_BT is None:
            return Span(t_BT)
        return Span(jnp.maximum(jnp.cumsum(valid_BT, -1, dtype=jnp.int32) - 1, 0), valid_BT, jnp.where(valid_BT, 0, -1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KV:
    """Keys and values of one layer: k, v [B, G, S or R, K], head-major so that attention reads them without a copy.

    Kept as int8 they stand for k * k_scale and v * v_scale: one scale, float32 [B, G, S], a slot of each head.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    def kept_in(self, dtype: Any) -> KV:
        """The same in another dtype; int8 is rounded to 255 levels."""
        if jnp.dtype(dtype) != jnp.int8:
            return KV(self.k.astype(dtype), self.v.astype(dtype))
        (k, k_scale), (v, v_scale) = quantized(self.k, (3,)), quantized(self.v, (3,))
        return KV(k, v, k_scale, v_scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What the slots of all layers hold: valid_BS, valid_BR bool; filled, recent int32 scalars (slots in use of the large and the recent part)."""

    valid_BS: jax.Array
    valid_BR: jax.Array
    filled: jax.Array
    recent: jax.Array

    def position_BN(self) -> jax.Array:
        """The position of the token in each of the S + R slots, int32; of no meaning where a slot holds none."""
        return jnp.cumsum(jnp.concatenate([self.valid_BS, self.valid_BR], 1), 1, dtype=jnp.int32) - 1

    def push(self, valid_BT: jax.Array) -> Slots:
        """T more tokens in the recent part. The caller has planned for them: recent + T <= R."""
        valid_BR = jax.lax.dynamic_update_slice(self.valid_BR, valid_BT, (0, self.recent))
        return dataclasses.replace(self, valid_BR=valid_BR, recent=self.recent + valid_BT.shape[1])

    def commit(self) -> Slots:
        """Recent slots become large ones; the recent part is empty again."""
        valid_BS = jax.lax.dynamic_update_slice(self.valid_BS, self.valid_BR, (0, self.filled))
        return Slots(valid_BS, jnp.zeros_like(self.valid_BR), self.filled + self.recent, jnp.zeros_like(self.recent))

    def trim(self, length_B: jax.Array) -> Slots:
        """Only each row's first `length_B` real tokens stay; slots at the end that no row needs any more are free again."""
        S = self.valid_BS.shape[1]
        valid_BN = jnp.concatenate([self.valid_BS, self.valid_BR], 1)
        valid_BN = valid_BN & (jnp.cumsum(valid_BN, 1, dtype=jnp.int32) <= length_B[:, None])
        used = lambda valid: jnp.max(jnp.where(valid, jnp.arange(1, valid.shape[1] + 1, dtype=jnp.int32), 0))  # noqa: E731
        return Slots(valid_BN[:, :S], valid_BN[:, S:], used(valid_BN[:, :S]), used(valid_BN[:, S:]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that decoding carries: per layer a mixer's frozen and live state, the slots they share, and length_B int32, real tokens so far of each row."""

    frozen: tuple[Any, ...]
    live: tuple[Any, ...]
    slots: Slots
    length_B: jax.Array

    def rows(self, index_N: jax.Array) -> DecodeState:
        """The state of rows index_N (int32), in that order; a row may come more than once. All leaves but the slots' two counters lead with the batch."""
        take = lambda tree: jax.tree.map(lambda leaf: leaf[index_N], tree)  # noqa: E731
        valid_NS, valid_NR = take((self.slots.valid_BS, self.slots.valid_BR))
        slots = dataclasses.replace(self.slots, valid_BS=valid_NS, valid_BR=valid_NR)
        return DecodeState(take(self.frozen), take(self.live), slots, self.length_B[index_N])
