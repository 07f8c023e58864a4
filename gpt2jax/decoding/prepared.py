"""Models in the form that decodes fastest, kept for the next call."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from gpt2jax.decoding.weights import prepare, turns_weights
from gpt2jax.model.gpt2 import GPT2

_PREPARED: weakref.WeakKeyDictionary[GPT2, tuple[list[Any], bool, GPT2]] = weakref.WeakKeyDictionary()


def prepared(model: GPT2, batch: int) -> GPT2:
    """`weights.prepare(model)`, kept as long as the model lives and its arrays are the same ones: a second call need not copy the weights again."""
    leaves, turned = jax.tree.leaves(model), turns_weights(batch)
    known, known_turned, ready = _PREPARED.get(model, ([], turned, model))
    if known_turned != turned or len(known) != len(leaves) or any(old is not new for old, new in zip(known, leaves, strict=True)):
        _PREPARED.pop(model, None)  # first, so that memory holds the weights twice and not three times
        ready = prepare(model, turned=turned)
        _PREPARED[model] = leaves, turned, ready
    return ready
