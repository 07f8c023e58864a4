"""Positions. B batch, T tokens, C context, D width, H heads, K head width, J = K/2 pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gpt2jax.model.config import ModelConfig
from gpt2jax.model.linear import normal

Rotation = Callable[[jax.Array, jax.Array], jax.Array]


class LearnedPositions(nnx.Module):
    """GPT-2's learned absolute positions: one row of the table is added to each token's embedding."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        self.table = normal(key, (config.n_positions, config.n_embd), ("position", "embed"), config.position_initializer_range)

    def __call__(self, x_BTD: jax.Array, position_BT: jax.Array) -> jax.Array:
        """x_BTD float32, position_BT int32 in [0, C): the sum, [B, T, D]. The caller keeps positions inside the table."""
        return x_BTD + self.table[...][position_BT]


class NoPositions(nnx.Module):
    """Embeddings stay as they are: positions come from rotated queries and keys, or from causal order alone (Kazemnejad et al., arXiv:2305.19466)."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        pass

    def __call__(self, x_BTD: jax.Array, position_BT: jax.Array) -> jax.Array:
        return x_BTD


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions (RoFormer, arXiv:2104.09864, section 3.2.2) for heads of `width` numbers: pair j turns by position * theta^(-2j/K).

    Pairs are (j, j + K/2) in the layout `half`, (2j, 2j + 1) in `interleaved`. Scaling changes the angles only, and for YaRN the length of queries and keys.
    """

    config: ModelConfig
    width: int

    def __call__(self, x_BTHK: jax.Array, position_BT: jax.Array) -> jax.Array:
        """x of any float dtype at int32 positions, the same for all heads: x turned, in its dtype; angles and products are float32."""
        wave_J, length = self.waves()
        angle_BT1J = (position_BT.astype(jnp.float32)[..., None] * wave_J)[:, :, None]
        cos, sin = jnp.cos(angle_BT1J) * length, jnp.sin(angle_BT1J) * length
        x = x_BTHK.astype(jnp.float32)
        half = self.config.rope_layout == "half"
        a, b = jnp.split(x, 2, -1) if half else (x[..., 0::2], x[..., 1::2])
        turned = a * cos - b * sin, b * cos + a * sin
        y = jnp.concatenate(turned, -1) if half else jnp.stack(turned, -1).reshape(x.shape)
        return y.astype(x_BTHK.dtype)

    def waves(self) -> tuple[np.ndarray, float]:
        """Radians a position of each pair, float32 [J], rounded as in transformers' modeling_rope_utils.py; and the factor on the result's length."""
        c, exponent_J = self.config, np.arange(0, self.width, 2, dtype=np.float32) / np.float32(self.width)
        period_J = np.power(c.rope_theta, exponent_J.astype(np.float64)).astype(np.float32)
        wave_J, factor = np.float32(1) / period_J, np.float32(c.rope_factor)
        if c.rope_scaling == "linear":  # position interpolation, arXiv:2306.15595
            return wave_J / factor, 1.0
        turns_J = (c.rope_original_positions or 0) * wave_J / np.float32(2 * math.pi)  # in the context before stretching
        if c.rope_scaling == "llama3":  # Llama 3.1's reference code, apply_scaling
            low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
            kept_J = np.clip((turns_J - np.float32(low)) / np.float32(high - low), 0, 1)
            return ((1 - kept_J) / factor + kept_J) * wave_J, 1.0
        if c.rope_scaling == "yarn":  # arXiv:2309.00071, section 3.2, with its code's whole-numbered ends of the ramp
            pair = lambda turns: self.width * math.log((c.rope_original_positions or 0) / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))  # noqa: E731
            first, last = max(math.floor(pair(c.rope_beta_fast)), 0), min(math.ceil(pair(c.rope_beta_slow)), self.width - 1)
            stretched_J = np.clip((np.arange(self.width // 2, dtype=np.float32) - first) / np.float32(last - first or 1e-3), 0, 1)
            length = c.rope_attention_factor or (0.1 * math.log(c.rope_factor) + 1.0 if c.rope_factor > 1 else 1.0)
            return stretched_J * (np.float32(1) / (factor * period_J)) + (1 - stretched_J) * wave_J, length
        return wave_J, 1.0


def unrotated(x_BTHK: jax.Array, position_BT: jax.Array) -> jax.Array:
    """Queries and keys as they are: positions are in the embeddings, or nowhere."""
    return x_BTHK


def rotation(config: ModelConfig, width: int) -> Rotation:
    """What turns a mixer's queries and keys, `width` numbers a head."""
    return Rotary(config, width) if config.position == "rope" else unrotated
