"""Positions. B batch, T tokens, C context, D width."""

from __future__ import annotations

import jax
from flax import nnx

from gpt2jax.config import ModelConfig
from gpt2jax.model.linear import normal


class LearnedPositions(nnx.Module):
    """GPT-2's learned absolute positions: one row of the table is added to each token's embedding."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        self.table = normal(key, (config.n_positions, config.n_embd), ("position", "embed"), config.position_initializer_range)

    def __call__(self, x_BTD: jax.Array, position_BT: jax.Array) -> jax.Array:
        """x_BTD float32, position_BT int32 in [0, C): the sum, [B, T, D]. The caller keeps positions inside the table."""
        return x_BTD + self.table[...][position_BT]
