"""The position-wise MLP. B batch, T tokens, D width, F inner width."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.kernels.product import recomputed
from gpt2jax.model.config import ModelConfig
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
        d, f = config.n_embd, config.mlp_width
        options = _options(config, config.mlp_bias is not False)
        self.up = Linear(child_key(key, "up"), (d,), (f,), input_axes=("embed",), output_axes=("mlp",), std=config.initializer_range, **options)
        self.down = _down(config, key, f, options)
        self.activation = config.activation_function

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return recomputed(self._activate_and_go_down)(self.down, self.up(x_BTD))

    def _activate_and_go_down(self, down: Linear, h_BTF: jax.Array) -> jax.Array:
        # in float32 at once: rounding to bfloat16 after each of its operations costs more and is less exact
        return down(ACTIVATIONS[self.activation](h_BTF.astype(jnp.float32)))


class GatedMLP(nnx.Module):
    """(act(x W_gate) * (x W_up)) W_down, by default without biases (Shazeer, arXiv:2002.05202, section 2): SwiGLU with silu, GeGLU with gelu.

    Gate and up are one map to [2, F], gate first: tensor sharding splits F, so that both of a column stay together.
    """

    def __init__(self, config: ModelConfig, key: jax.Array, width: int | None = None) -> None:
        d, f = config.n_embd, width or config.mlp_width
        options = _options(config, config.mlp_bias is True)
        std = config.initializer_range
        self.gate_up = Linear(child_key(key, "gate_up"), (d,), (2, f), input_axes=("embed",), output_axes=(None, "mlp"), std=std, **options)
        self.down = _down(config, key, f, options)
        self.activation = config.activation_function if config.mlp == "geglu" else "silu"

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return recomputed(self._activate_and_go_down)(self.down, self.gate_up(x_BTD))

    def _activate_and_go_down(self, down: Linear, h_BT2F: jax.Array) -> jax.Array:
        h_BT2F = h_BT2F.astype(jnp.float32)
        return down(ACTIVATIONS[self.activation](h_BT2F[..., 0, :]) * h_BT2F[..., 1, :])


def _options(config: ModelConfig, bias: bool) -> dict[str, Any]:
    return dict(dtype=jnp.dtype(config.compute_dtype), bias=bias)


def _down(config: ModelConfig, key: jax.Array, width: int, options: dict[str, Any]) -> Linear:
    std = residual_std(config.initializer_range, config.n_layer)
    return Linear(child_key(key, "down"), (width,), (config.n_embd,), input_axes=("mlp",), output_axes=("embed",), std=std, **options)
