"""The compiled loop: prefill, then chunks of decode steps, each one `lax.scan` over the live part of the cache.

Between chunks the host takes the new tokens (streaming), moves the live part behind the frozen part (donated), lets the cache grow to the next bucket, and
stops early. Compiled programs: one prefill for each prompt bucket, one chunk and one commit for each cache bucket, per batch size; nothing else is static.

Letters: B rows, T padded prompt, K steps of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.decoding.filters import Sampling, draw
from gpt2jax.decoding.weights import logits
from gpt2jax.model.cache import DecodeState
from gpt2jax.model.gpt2 import GPT2

#: Steps of a chunk: also the slots of the live cache.
CHUNK = 32
#: Emitted by a row that has ended.
ENDED = -1
#: Emitted, once, by a row whose logits are not finite.
BROKEN = -2
_SMALLEST_PROMPT, _SMALLEST_CACHE = 16, 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What one step hands to the next: the state without its frozen part, each row's last token and end, and the number of tokens drawn so far."""

    state: DecodeState
    token_B: jax.Array
    done_B: jax.Array
    drawn: jax.Array


def prompt_bucket(length: int, n_positions: int) -> int:
    """The padded length of a prompt: a power of two from 16 on, at most the context."""
    return min(_power_of_two(max(length, _SMALLEST_PROMPT)), n_positions)


def cache_bucket(slots: int) -> int:
    """The slots of a frozen cache that holds `slots`: a power of two from 128 on."""
    return _power_of_two(max(slots, _SMALLEST_CACHE))


def decode(model: GPT2, tokens_BT: np.ndarray, length_B: np.ndarray, sampling: Sampling, *, eos: int, new_tokens: int) -> Iterator[np.ndarray]:
    """New tokens of all rows as they come: int32 [B, 1] after the prefill, then [B, up to CHUNK] a chunk; ENDED where a row has already ended.

    model: as `weights.prepare` makes it. tokens_BT int32: prompts padded on the right to a `prompt_bucket`; length_B: their real lengths. The caller has
    checked that ids are in the vocabulary and that each length + new_tokens <= n_positions + 1. A row ends with its first drawn `eos` (negative: never), which
    it emits; the loop ends after `new_tokens` tokens or when all rows have ended.
    """
    T = tokens_BT.shape[1]
    end, slots = jnp.int32(eos), cache_bucket(T)
    frozen, carry, new_B = _prefill(model, jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(length_B, jnp.int32), sampling, end, slots=slots)
    yield np.asarray(new_B)[:, None]
    for first in range(1, new_tokens, CHUNK):
        if np.asarray(carry.done_B).all():
            return
        if first > 1:
            filled = T + first - 1
            if filled > slots:
                slots = cache_bucket(filled)
                frozen, carry = _grow(model, frozen, carry, slots=slots)
            frozen, carry = _commit(model, frozen, carry)
        steps = min(CHUNK, new_tokens - first)
        carry, new_BK = _chunk(model, frozen, carry, sampling, end, jnp.int32(steps))
        yield np.asarray(new_BK)[:, :steps]


@functools.partial(jax.jit, static_argnames="slots")
def _prefill(
    model: GPT2, tokens_BT: jax.Array, length_B: jax.Array, sampling: Sampling, eos: jax.Array, *, slots: int
) -> tuple[tuple[Any, ...], Carry, jax.Array]:
    hidden_BD, state = model.prefill(tokens_BT, length_B, slots=slots, recent=CHUNK)
    start = Carry(dataclasses.replace(state, frozen=()), jnp.zeros_like(length_B), jnp.zeros_like(length_B, bool), jnp.int32(0))
    carry, new_B = _take(model, hidden_BD, start, sampling, eos)
    return state.frozen, carry, new_B


@functools.partial(jax.jit, donate_argnames="carry")
def _chunk(model: GPT2, frozen: tuple[Any, ...], carry: Carry, sampling: Sampling, eos: jax.Array, steps: jax.Array) -> tuple[Carry, jax.Array]:
    def advance(carry: Carry) -> tuple[Carry, jax.Array]:
        hidden_B1D, state = model.step(carry.token_B[:, None], dataclasses.replace(carry.state, frozen=frozen))
        carry = dataclasses.replace(carry, state=dataclasses.replace(state, frozen=()))
        return _take(model, hidden_B1D[:, 0], carry, sampling, eos)

    def rest(carry: Carry) -> tuple[Carry, jax.Array]:
        return carry, jnp.full_like(carry.token_B, ENDED)

    def step(carry: Carry, i: jax.Array) -> tuple[Carry, jax.Array]:
        return jax.lax.cond((i < steps) & ~carry.done_B.all(), advance, rest, carry)

    carry, new_KB = jax.lax.scan(step, carry, jnp.arange(CHUNK))
    return carry, new_KB.T


@functools.partial(jax.jit, donate_argnames=("frozen", "carry"))
def _commit(model: GPT2, frozen: tuple[Any, ...], carry: Carry) -> tuple[tuple[Any, ...], Carry]:
    return _split(model.commit(dataclasses.replace(carry.state, frozen=frozen)), carry)


@functools.partial(jax.jit, static_argnames="slots")
def _grow(model: GPT2, frozen: tuple[Any, ...], carry: Carry, *, slots: int) -> tuple[tuple[Any, ...], Carry]:
    return _split(model.grow(dataclasses.replace(carry.state, frozen=frozen), slots), carry)


def _split(state: DecodeState, carry: Carry) -> tuple[tuple[Any, ...], Carry]:
    return state.frozen, dataclasses.replace(carry, state=dataclasses.replace(state, frozen=()))


def _take(model: GPT2, hidden_BD: jax.Array, carry: Carry, sampling: Sampling, eos: jax.Array) -> tuple[Carry, jax.Array]:
    """Draw each row's next token behind `hidden`, and note which rows it ends."""
    logits_BV = logits(model, hidden_BD)[:, : model.config.vocab_size]
    token_B = draw(logits_BV, sampling, carry.drawn)
    broken_B = token_B < 0
    new_B = jnp.where(carry.done_B, ENDED, jnp.where(broken_B, BROKEN, token_B))
    done_B = carry.done_B | broken_B | (token_B == eos)
    return dataclasses.replace(carry, token_B=jnp.maximum(token_B, 0), done_B=done_B, drawn=carry.drawn + 1), new_B


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
