"""The pre-norm residual block, put together from the components that the config names. B batch, T tokens, D width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from gpt2jax.model.attention import Attention
from gpt2jax.model.cache import Slots, Span
from gpt2jax.model.config import ModelConfig
from gpt2jax.model.linear import child_key, dropout
from gpt2jax.model.mla import LatentAttention
from gpt2jax.model.mlp import MLP, GatedMLP
from gpt2jax.model.moe import MoE, Routing
from gpt2jax.model.norm import LayerNorm, RMSNorm
from gpt2jax.model.position import LearnedPositions, NoPositions
from gpt2jax.parallel.table import STREAM, constrain

# The one place where a name in the config picks a class. A new component is one file and one line here.
NORMS: dict[str, Callable[[ModelConfig], Any]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
MIXERS: dict[str, Callable[[ModelConfig, jax.Array], Any]] = {"mha": Attention, "mla": LatentAttention}
MLPS: dict[str, Callable[[ModelConfig, jax.Array], Any]] = {"gelu": MLP, "swiglu": GatedMLP, "geglu": GatedMLP, "moe": MoE}
POSITIONS: dict[str, Callable[[ModelConfig, jax.Array], Any]] = {"learned": LearnedPositions, "rope": NoPositions, "none": NoPositions}


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) (Radford et al. 2019, section 2.3: the norm stands before each sub-layer)."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        self.mixer_norm = NORMS[config.norm](config)
        self.mixer = MIXERS[config.attention](config, child_key(key, "mixer"))
        self.mlp_norm = NORMS[config.norm](config)
        self.mlp = MLPS[config.mlp](config, child_key(key, "mlp"))
        self.dropout_rate = config.resid_pdrop
        self.routes = config.mlp == "moe"

    def __call__(self, x_BTD: jax.Array, span: Span, dropout_key: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """A whole sequence: x [B, T, D], and what the mixer's cache can start from."""
        return self.routed(x_BTD, span, dropout_key)[:2]

    def routed(self, x_BTD: jax.Array, span: Span, dropout_key: jax.Array | None = None) -> tuple[jax.Array, Any, Routing | None]:
        """`__call__`, and where its tokens went, if the MLP is a mixture of experts."""
        keys = (None, None, None) if dropout_key is None else tuple(jax.random.split(dropout_key, 3))
        y_BTD, entry = self.mixer(self.mixer_norm(x_BTD), span, keys[0])
        x_BTD, routing = self._add(x_BTD, y_BTD, span, keys[1], keys[2])
        return constrain(x_BTD, STREAM), entry, routing

    def step(self, x_BTD: jax.Array, frozen: Any, live: Any, slots: Slots, span: Span) -> tuple[jax.Array, Any]:
        """T more tokens on top of a cache: x [B, T, D] and the mixer's new live state."""
        y_BTD, live = self.mixer.step(self.mixer_norm(x_BTD), frozen, live, slots, span)
        return self._add(x_BTD, y_BTD, span)[0], live

    def _add(
        self, x_BTD: jax.Array, y_BTD: jax.Array, span: Span, mixer_key: jax.Array | None = None, mlp_key: jax.Array | None = None
    ) -> tuple[jax.Array, Routing | None]:
        x_BTD = x_BTD + dropout(y_BTD, self.dropout_rate, mixer_key)
        h_BTD = self.mlp_norm(x_BTD)
        y_BTD, routing = self.mlp(h_BTD, span.valid_BT, span.counts_BT) if self.routes else (self.mlp(h_BTD), None)
        return x_BTD + dropout(y_BTD, self.dropout_rate, mlp_key), routing
