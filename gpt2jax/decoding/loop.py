"""The compiled loop: prefill, then chunks of decode steps, each one `lax.scan` over the live part of the cache.

Between chunks the host takes the new tokens (streaming), moves the live part behind the frozen part (donated), lets the cache grow to the next bucket, and
stops early. Compiled programs: one prefill for each prompt bucket, one chunk and one commit for each cache bucket, per batch size; no setting is static.

Letters: B rows, T padded tokens, K steps of a chunk, H tokens of history, V vocabulary, N alternatives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.decoding.filters import History, Sampling, draw
from gpt2jax.decoding.weights import logits
from gpt2jax.model.cache import DecodeState
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.parallel.mesh import rows_sharding
from gpt2jax.parallel.table import in_mesh_of

#: Steps of a chunk: also the slots of the live cache.
CHUNK = 32
#: Emitted by a row that has ended. (BROKEN and STUCK of filters.py end a row too.)
ENDED = -1
_SMALLEST_PROMPT, _SMALLEST_CACHE = 16, 128
#: A prefix that all prompts share is prefilled on its own from this many tokens on: below, the second pass costs more than it saves.
_SHARED = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What one step hands to the next: the cache, the tokens so far, each row's last token and end, and the number of tokens drawn so far."""

    state: DecodeState
    history: History
    token_B: jax.Array
    done_B: jax.Array
    drawn: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """New tokens, int32 [B, K], ENDED where a row had ended before. On request their log-probabilities, float32 [B, K], and the N likeliest tokens instead of
    them with theirs, [B, K, N]: of the model's own distribution, before all settings.
    """

    token: Any
    log_prob: Any = None
    top_id: Any = None
    top_log_prob: Any = None


def prompt_bucket(length: int, context: int | None) -> int:
    """The padded length of a prompt: a power of two from 16 on, at most the context, if there is an end to it."""
    bucket = power_of_two(max(length, _SMALLEST_PROMPT))
    return bucket if context is None else min(bucket, context)


def cache_bucket(slots: int) -> int:
    """The slots of a frozen cache that holds `slots`: a power of two from 128 on."""
    return power_of_two(max(slots, _SMALLEST_CACHE))


class Decoder:
    """A batch on its way: its cache, on the device, and how far it is filled. `prefill`, then `decode`; `trim` and `extend` go on from what the cache holds.

    model: as `weights.prepare` makes it. alternatives: None for tokens alone, else how many of the likeliest tokens come with each one. The caller has checked
    that ids are in the vocabulary and that everything fits the context.
    """

    state: DecodeState
    _hidden_BD: jax.Array  # behind the last token of each row
    _filled: int  # slots in use of the frozen part
    _recent: int  # and of the live one

    def __init__(self, model: GPT2, alternatives: int | None = None) -> None:
        self.model, self.alternatives = model, alternatives

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start with these prompts. Equal ones are computed once, and so is a long beginning that all share."""
        unique = list(dict.fromkeys(map(tuple, prompts)))
        shared = min(common_prefix(*unique), min(map(len, unique)) - 1)
        if len(unique) > 1 and shared >= _SHARED:
            self._prefill([unique[0][:shared]])
            self._gather([0] * len(unique))
            self.extend([row[shared:] for row in unique])
        else:
            self._prefill(unique)
        if len(unique) < len(prompts):
            place = {row: i for i, row in enumerate(unique)}
            self._gather([place[tuple(row)] for row in prompts])

    def extend(self, more: Sequence[Sequence[int]]) -> None:
        """More tokens for every row, at least one each."""
        self._commit()
        tokens_BT, length_B = self._placed(more, prompt_bucket(max(map(len, more)), self.model.config.context))
        self._make_room(tokens_BT.shape[1])
        self._hidden_BD, self.state = _extend(self.model, tokens_BT, length_B, self.state)
        self._filled += max(map(len, more))

    def trim(self, lengths: Sequence[int]) -> None:
        """Keep the first tokens of each row only; `extend` must follow. InputError if the model's cache cannot forget."""
        self.state = _trim(self.model, self.state, np.array(lengths, np.int32))
        self._filled, self._recent = int(self.state.slots.filled), int(self.state.slots.recent)

    def decode(
        self, rows: Sequence[Sequence[int]], sampling: Sampling, new_tokens: int, *, prompt_lengths: Sequence[int], drawn: int, stopped_B: np.ndarray
    ) -> Iterator[Drawn]:
        """New tokens of all rows as they come, numpy arrays: [B, 1] at once, then [B, up to CHUNK] a chunk.

        rows: the tokens that the cache holds, of which the first prompt_lengths are not new; drawn: how many were drawn before this call. A row ends with its
        first drawn `sampling.eos`, which it emits, or where the caller sets stopped_B between two chunks. The loop ends after `new_tokens` tokens or when all
        rows have ended. The next chunk is under way while the caller has the last one.
        """
        self._commit()
        carry = self._start(rows, prompt_lengths, drawn, stopped_B)
        carry, (drawn_now, done_B) = _first(self.model, self._hidden_BD, carry, sampling, self.alternatives)
        yield _on_host(drawn_now, 1)
        if np.asarray(done_B).all():
            return
        waiting = None  # a chunk under way
        for left in range(new_tokens - 1, 0, -CHUNK):
            steps, carry = min(CHUNK, left), self._with_room(carry)
            carry, out = _chunk(self.model, carry.state.frozen, _without_frozen(carry), sampling, stopped_B.copy(), np.int32(steps), self.alternatives)
            carry = _with_state(carry, dataclasses.replace(carry.state, frozen=self.state.frozen))
            self.state, self._recent = carry.state, steps
            if waiting is not None:
                (drawn_now, done_B), taken = waiting
                yield _on_host(drawn_now, taken)
                if np.asarray(done_B).all():
                    return
            waiting = out, steps
        if waiting is not None:
            yield _on_host(waiting[0][0], waiting[1])

    def _start(self, rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int], drawn: int, stopped_B: np.ndarray) -> Carry:
        token_BH, count_B = self._placed(rows, self._slots + CHUNK + 1)
        history = History(token_BH, count_B, jnp.asarray(prompt_lengths, jnp.int32))
        return Carry(self.state, history, jnp.zeros_like(count_B), jnp.asarray(stopped_B.copy()), jnp.int32(drawn))

    def _with_room(self, carry: Carry) -> Carry:
        """The carry with an empty live part, in a frozen part that is large enough."""
        self._commit()
        more = self._slots + CHUNK + 1 - carry.history.token_BH.shape[1]
        history = carry.history if more <= 0 else _lengthen(carry.history, more)
        return dataclasses.replace(carry, state=self.state, history=history)

    @property
    def _slots(self) -> int:
        return self.state.slots.valid_BS.shape[1]

    def _prefill(self, rows: Sequence[Sequence[int]]) -> None:
        tokens_BT, length_B = self._placed(rows, prompt_bucket(max(map(len, rows)), self.model.config.context))
        self._filled, self._recent = max(map(len, rows)), 0
        with in_mesh_of(self.model):
            self._hidden_BD, self.state = _prefill(self.model, tokens_BT, length_B, slots=cache_bucket(tokens_BT.shape[1]))

    def _placed(self, rows: Sequence[Sequence[int]], length: int) -> tuple[jax.Array, jax.Array]:
        """`_padded`, on the devices that the model lies on."""
        return jax.device_put(_padded(rows, length), rows_sharding(self.model, len(rows)))

    def _gather(self, index: Sequence[int]) -> None:
        self._hidden_BD, self.state = _gather(self._hidden_BD, self.state, np.array(index, np.int32))

    def _commit(self) -> None:
        if self._recent:
            self._make_room(CHUNK)  # all live slots are written, though only the first `recent` count
            self.state = _commit(self.model, self.state)
            self._filled, self._recent = self._filled + self._recent, 0

    def _make_room(self, slots: int) -> None:
        if self._filled + slots > self._slots:
            self.state = _grow(self.model, self.state, slots=cache_bucket(self._filled + slots))


@functools.partial(jax.jit, static_argnames="slots")
def _prefill(model: GPT2, tokens_BT: jax.Array, length_B: jax.Array, *, slots: int) -> tuple[jax.Array, DecodeState]:
    return model.prefill(tokens_BT, length_B, slots=slots, recent=CHUNK)


@functools.partial(jax.jit, donate_argnames="state")
def _extend(model: GPT2, tokens_BT: jax.Array, length_B: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
    return model.extend(tokens_BT, length_B, state)


@jax.jit
def _gather(hidden_BD: jax.Array, state: DecodeState, index_N: jax.Array) -> tuple[jax.Array, DecodeState]:
    return hidden_BD[index_N], state.rows(index_N)


@functools.partial(jax.jit, donate_argnames="state")
def _trim(model: GPT2, state: DecodeState, length_B: jax.Array) -> DecodeState:
    return model.trim(state, length_B)


@functools.partial(jax.jit, donate_argnames="state")
def _commit(model: GPT2, state: DecodeState) -> DecodeState:
    return model.commit(state)


@functools.partial(jax.jit, static_argnames="slots")
def _grow(model: GPT2, state: DecodeState, *, slots: int) -> DecodeState:
    return model.grow(state, slots)


@functools.partial(jax.jit, static_argnames="more")
def _lengthen(history: History, more: int) -> History:
    return dataclasses.replace(history, token_BH=jnp.pad(history.token_BH, ((0, 0), (0, more))))


@functools.partial(jax.jit, static_argnames="alternatives")
def _first(model: GPT2, hidden_BD: jax.Array, carry: Carry, sampling: Sampling, alternatives: int | None) -> tuple[Carry, tuple[Drawn, jax.Array]]:
    carry, out = _take(model, hidden_BD, carry, sampling, alternatives)
    return carry, (jax.tree.map(lambda x: x[:, None], out), carry.done_B)


@functools.partial(jax.jit, static_argnames="alternatives", donate_argnames="carry")
def _chunk(
    model: GPT2, frozen: tuple[Any, ...], carry: Carry, sampling: Sampling, stopped_B: jax.Array, steps: jax.Array, alternatives: int | None
) -> tuple[Carry, tuple[Drawn, jax.Array]]:
    def advance(carry: Carry) -> tuple[Carry, Drawn]:
        hidden_B1D, state = model.step(carry.token_B[:, None], dataclasses.replace(carry.state, frozen=frozen))
        return _take(model, hidden_B1D[:, 0], _without_frozen(_with_state(carry, state)), sampling, alternatives)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(advance, carry)[1])
    nothing = dataclasses.replace(nothing, token=jnp.full_like(nothing.token, ENDED))

    def step(carry: Carry, i: jax.Array) -> tuple[Carry, Drawn]:
        return jax.lax.cond((i < steps) & ~carry.done_B.all(), advance, lambda carry: (carry, nothing), carry)

    carry, out_K = jax.lax.scan(step, dataclasses.replace(carry, done_B=carry.done_B | stopped_B), jnp.arange(CHUNK))
    return carry, (jax.tree.map(lambda x: x.swapaxes(0, 1), out_K), carry.done_B)


def _take(model: GPT2, hidden_BD: jax.Array, carry: Carry, sampling: Sampling, alternatives: int | None) -> tuple[Carry, Drawn]:
    """Draw each row's next token behind `hidden`, and note which rows it ends."""
    logits_BV = logits(model, hidden_BD)[:, : model.config.vocab_size]
    token_B = draw(logits_BV, sampling, carry.history, carry.drawn)
    out = Drawn(jnp.where(carry.done_B, ENDED, token_B))
    done_B = carry.done_B | (token_B < 0) | (token_B == sampling.eos)
    token_B = jnp.maximum(token_B, 0)
    if alternatives is not None:
        log_prob_BV = jax.nn.log_softmax(logits_BV, -1)
        top_log_prob_BN, top_id_BN = jax.lax.top_k(log_prob_BV, alternatives)
        out = Drawn(out.token, jnp.take_along_axis(log_prob_BV, token_B[:, None], 1)[:, 0], top_id_BN, top_log_prob_BN)
    return dataclasses.replace(carry, history=carry.history.push(token_B), token_B=token_B, done_B=done_B, drawn=carry.drawn + 1), out


def _on_host(drawn: Drawn, steps: int) -> Drawn:
    """The first `steps` of them as numpy arrays."""
    return jax.tree.map(lambda x: np.asarray(x)[:, :steps], drawn)


def _with_state(carry: Carry, state: DecodeState) -> Carry:
    return dataclasses.replace(carry, state=state)


def _without_frozen(carry: Carry) -> Carry:
    return _with_state(carry, dataclasses.replace(carry.state, frozen=()))


def common_prefix(*rows: Sequence[int]) -> int:
    """How many first tokens all rows share."""
    shortest = min(map(len, rows))
    return next((i for i in range(shortest) if any(row[i] != rows[0][i] for row in rows)), shortest)


def _padded(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows padded on the right, int32 [B, length], and their real lengths, int32 [B]."""
    tokens_BT = np.zeros((len(rows), length), np.int32)
    for row, ids in zip(tokens_BT, rows, strict=True):
        row[: len(ids)] = ids
    return tokens_BT, np.array([len(ids) for ids in rows], np.int32)


def power_of_two(n: int) -> int:
    """The least one that is at least n."""
    return 1 << (n - 1).bit_length()
