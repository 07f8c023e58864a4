"""Models in the form that decodes fastest, kept for the next call."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from gpt2jax.decoding.weights import prepare, turns_weights
from gpt2jax.model.gpt2 import GPT2

_PREPARED: weakref.WeakKeyDictionary[GPT2, tuple[list[Any], str | None, GPT2]] = weakref.WeakKeyDictionary()


def prepared(model: GPT2, cache_dtype: str | None = None) -> GPT2:
    """`weights.prepare(model)`, kept as long as the model lives and its arrays are the same ones: a second call need not copy the weights again."""
    leaves = jax.tree.leaves(model)
    known, known_dtype, ready = _PREPARED.get(model, ([], cache_dtype, model))
    if known_dtype != cache_dtype or len(known) != len(leaves) or any(old is not new for old, new in zip(known, leaves, strict=True)):
        _PREPARED.pop(model, None)  # first, so that memory holds the weights twice and not three times
        ready = prepare(model, turned=turns_weights(), cache_dtype=cache_dtype)
        _PREPARED[model] = leaves, cache_dtype, ready
    return ready
