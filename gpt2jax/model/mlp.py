"""The position-wise MLP. B batch, T tokens, D width, F inner width."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.config import ModelConfig
from gpt2jax.model.linear import Linear, child_key, residual_std

#: By the names that Hugging Face configs use. GPT-2 was trained with the tanh form (its src/model.py); the erf form differs by up to 5e-4.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class MLP(nnx.Module):
    """act(x W_up + b) W_down + b."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        d, f, dtype = config.n_embd, config.mlp_width, jnp.dtype(config.compute_dtype)
        std, out_std = config.initializer_range, residual_std(config.initializer_range, config.n_layer)
        self.up = Linear(child_key(key, "up"), (d,), (f,), input_axes=("embed",), output_axes=("mlp",), std=std, dtype=dtype)
        self.down = Linear(child_key(key, "down"), (f,), (d,), input_axes=("mlp",), output_axes=("embed",), std=out_std, dtype=dtype)
        self.activation = config.activation_function

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = ACTIVATIONS[self.activation](self.up(x_BTD))
        return self.down(h_BTF)
