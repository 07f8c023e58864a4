"""GPT-2 in JAX and Flax: train, sample, convert, and swap one component at a time.

    import gpt2jax
    model, tokenizer = gpt2jax.load("runs/quickstart")
    results = gpt2jax.generate(model, ["def "], max_new_tokens=64, tokenizer=tokenizer)
    print(results[0].text)

Names are loaded when first used, so that importing the package, and `gpt2jax --help`, do not start JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2jax.config import Config, ModelConfig, load_config
    from gpt2jax.decoding.generate import Generation, Piece, generate, stream
    from gpt2jax.decoding.score import Score, score
    from gpt2jax.decoding.session import Session
    from gpt2jax.decoding.weights import quantize
    from gpt2jax.errors import InputError
    from gpt2jax.loading import load
    from gpt2jax.model.gpt2 import GPT2
    from gpt2jax.parallel.mesh import shard
    from gpt2jax.tokenizer import Tokenizer, load_tokenizer

__version__ = "0.1.0"

_HOMES = {
    "Config": "gpt2jax.config",
    "GPT2": "gpt2jax.model.gpt2",
    "Generation": "gpt2jax.decoding.generate",
    "InputError": "gpt2jax.errors",
    "ModelConfig": "gpt2jax.config",
    "Piece": "gpt2jax.decoding.generate",
    "Score": "gpt2jax.decoding.score",
    "Session": "gpt2jax.decoding.session",
    "Tokenizer": "gpt2jax.tokenizer",
    "generate": "gpt2jax.decoding.generate",
    "load": "gpt2jax.loading",
    "load_config": "gpt2jax.config",
    "load_tokenizer": "gpt2jax.tokenizer",
    "quantize": "gpt2jax.decoding.weights",
    "score": "gpt2jax.decoding.score",
    "shard": "gpt2jax.parallel.mesh",
    "stream": "gpt2jax.decoding.generate",
}
__all__ = [
    "GPT2",
    "Config",
    "Generation",
    "InputError",
    "ModelConfig",
    "Piece",
    "Score",
    "Session",
    "Tokenizer",
    "generate",
    "load",
    "load_config",
    "load_tokenizer",
    "quantize",
    "score",
    "shard",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpt2jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
