"""A tiny model whose greedy text varies, and the slow way to continue a prompt: one full forward a token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.config import ModelConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_named

SIZES: dict[str, Any] = dict(vocab_size=257, n_positions=208, n_layer=2, n_head=3, n_embd=12, n_inner=20, vocab_multiple=64)


@functools.cache
def tiny(**changes: Any) -> GPT2:
    """Weights far larger than at the start of training, so that logits are spread and the next token depends on the whole context; biases are not zero."""
    config = ModelConfig(**{**SIZES, **changes})

    def enlarge(name: str, leaf: jax.Array) -> jax.Array:
        if name.endswith((".b", ".bias", ".scale")):
            return leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)
        return leaf * {"token_table": 40, "position.table": 200}.get(name, 30)

    return map_named(enlarge, jax.jit(lambda key: GPT2(config, key))(jax.random.key(3)))


def prompt(length: int, seed: int = 0, vocabulary: int = 257) -> list[int]:
    return np.random.default_rng((seed, length)).integers(0, vocabulary, length).tolist()


def slow_greedy(model: GPT2, ids: list[int], new_tokens: int) -> list[int]:
    """The most likely next token by the uncached forward, again and again."""
    C = model.config.n_positions
    tokens = list(ids)
    for _ in range(new_tokens):
        logits = model(jnp.asarray([tokens + [0] * (C - len(tokens))]))[0, len(tokens) - 1]  # causal: what stands behind cannot matter
        tokens.append(int(logits.argmax()))
    return tokens[len(ids) :]
