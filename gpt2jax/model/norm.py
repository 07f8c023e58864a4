"""Normalisation. B batch, T tokens, D width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.kernels.product import recomputed
from gpt2jax.model.config import ModelConfig
from gpt2jax.model.linear import constant


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) * scale + bias over the last axis; statistics in float32, result in x's dtype (Ba et al., arXiv:1607.06450)."""

    def __init__(self, config: ModelConfig) -> None:
        self.scale = constant((config.n_embd,), ("embed",), 1.0)
        self.bias = constant((config.n_embd,), ("embed",), 0.0)
        self.eps = config.layer_norm_epsilon

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return recomputed(self._run)((self.scale[...], self.bias[...]), x_BTD)

    def _run(self, weights: tuple[jax.Array, jax.Array], x_BTD: jax.Array) -> jax.Array:
        scale, bias = weights
        x32_BTD = x_BTD.astype(jnp.float32)
        centred_BTD = x32_BTD - x32_BTD.mean(-1, keepdims=True)
        variance_BT1 = jnp.square(centred_BTD).mean(-1, keepdims=True)
        y_BTD = centred_BTD * jax.lax.rsqrt(variance_BT1 + self.eps) * scale + bias
        return y_BTD.astype(x_BTD.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang & Sennrich, arXiv:1910.07467), by default of the residual stream's width.

    All in float32 and cast to x's dtype last, as in Gemma and Flax; Llama's code casts before it multiplies, which in bfloat16 differs by up to 2^-7.
    """

    def __init__(self, config: ModelConfig, width: int | None = None, axis: str = "embed", eps: float | None = None) -> None:
        self.scale = constant((width or config.n_embd,), (axis,), 1.0)
        self.eps = eps or config.layer_norm_epsilon

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return recomputed(self._run)(self.scale[...], x_BTD)

    def _run(self, scale: jax.Array, x_BTD: jax.Array) -> jax.Array:
        x32_BTD = x_BTD.astype(jnp.float32)
        square_BT1 = jnp.square(x32_BTD).mean(-1, keepdims=True)
        return (x32_BTD * jax.lax.rsqrt(square_BT1 + self.eps) * scale).astype(x_BTD.dtype)
