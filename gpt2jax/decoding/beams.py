"""Beam search: the K likeliest continuations that a search finds which keeps K unfinished ones at a time. The same beams and scores as transformers'.

At each step every unfinished beam is continued by every token, and the best 2 K candidates of a row are looked at: those that end (by the end-of-text token, or
at the last step) compete for its K finished places, if they are among the best K; the best K of the others go on. A beam's score is the sum of its tokens'
log-probabilities, after penalties, over its length to the power of `length_penalty`.

All of it runs on the device. The prompt's keys and values are the same for all beams of a row, and beams never change rows: so the frozen part of the cache
holds the prompt and stays as it is, and only the live part, which takes all new tokens here, is put in a new order at each step.

Letters: B rows, K beams, N = B K, C = 2 K candidates, V vocabulary, H tokens of prompt and continuation, D width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.decoding.filters import History, Sampling, penalised
from gpt2jax.decoding.loop import CHUNK, Decoder, _padded, cache_bucket, power_of_two
from gpt2jax.decoding.weights import logits
from gpt2jax.errors import InputError
from gpt2jax.model.cache import DecodeState
from gpt2jax.model.gpt2 import GPT2

#: Most slots of the live cache at first; they double when they are full.
_LIVE = 128


@dataclasses.dataclass(frozen=True)
class Beam:
    """tokens: the new ids, with the end-of-text id if it came. score: the sum of their log-probabilities / length ** length_penalty."""

    tokens: list[int]
    score: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rule:
    """When a row is at its end, scalars. eager: once it has K finished beams. Else once its best unfinished beam could not enter any more: if it ended now, or,
    if `hopeful`, at the last step, should that give it a better score."""

    new_tokens: Any
    length_penalty: Any
    eager: Any
    hopeful: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What one step hands to the next: the cache (without its frozen part), the hidden state behind each beam and its tokens; the sums of unfinished beams,
    best first, -inf where there is none; the finished beams' tokens, lengths and scores alike; rows still open; rows whose logits were not finite; steps."""

    state: DecodeState
    hidden_ND: jax.Array
    history: History
    sum_BK: jax.Array
    finished_BKH: jax.Array
    length_BK: jax.Array
    score_BK: jax.Array
    open_B: jax.Array
    broken_B: jax.Array
    step: jax.Array


def search(
    model: GPT2,
    rows: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    new_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    returned: int = 1,
) -> list[list[Beam]]:
    """The best `returned` beams of each row, best first.

    model: as `weights.prepare` makes it for len(rows) num_beams rows. rows: ids, of any lengths together; each gets what it gets alone. Of `sampling`, what
    acts before the temperature counts. early_stopping: True ends a row once it has num_beams finished beams; False, once no unfinished beam is better than the
    worst of them by its score so far; 'never', once none can become better (exact for a length_penalty of 0 or more).

    A row has fewer beams than asked for where fewer texts are possible. The caller has checked that everything fits the context, and `check_beams`. Raises
    InputError if logits are not finite, or the settings leave no text at all.
    """
    sampling = sampling.rows(jnp.repeat(jnp.arange(len(rows)), num_beams))
    decoder = Decoder(model)
    decoder.prefill(rows)
    token_BH, count_B = _padded(rows, cache_bucket(max(map(len, rows)) + new_tokens))
    carry = _start(model, decoder._hidden_BD, decoder.state, token_BH, count_B, beams=num_beams, live=min(max(power_of_two(new_tokens), CHUNK), _LIVE))
    frozen, carry = carry.state.frozen, dataclasses.replace(carry, state=dataclasses.replace(carry.state, frozen=()))
    rule = Rule(jnp.int32(new_tokens), jnp.float32(length_penalty), jnp.bool(early_stopping is True), jnp.bool(early_stopping == "never"))
    carry = _advance(model, frozen, carry, sampling, rule)
    while carry.open_B.any() and carry.step < new_tokens:
        carry = _widen(model, carry, live=2 * carry.state.slots.valid_BR.shape[1])
        carry = _advance(model, frozen, carry, sampling, rule)
    finished_BKH, length_BK, score_BK, broken_B = map(np.asarray, (carry.finished_BKH, carry.length_BK, carry.score_BK, carry.broken_B))
    results = []
    for row, ids in enumerate(rows):
        if broken_B[row]:
            raise InputError(f"the model's logits after prompt {row} are not finite (NaN or infinity): its weights are damaged; try another checkpoint")
        real = [beam for beam in range(returned) if score_BK[row, beam] > -np.inf]
        if not real:
            raise InputError(f"the settings leave no text that may follow prompt {row}; forbid fewer tokens, or lower no_repeat_ngram_size or min_new_tokens")
        results.append([Beam(finished_BKH[row, beam, len(ids) : length_BK[row, beam]].tolist(), float(score_BK[row, beam])) for beam in real])
    return results


@functools.partial(jax.jit, static_argnames=("beams", "live"))
def _start(model: GPT2, hidden_BD: jax.Array, state: DecodeState, token_BH: jax.Array, count_B: jax.Array, *, beams: int, live: int) -> Carry:
    B, H = token_BH.shape
    index_N = jnp.repeat(jnp.arange(B), beams)
    state, count_N = _with_live(model, state.rows(index_N), live, fresh=True), count_B[index_N]
    none_BK = jnp.full((B, beams), -jnp.inf)
    return Carry(
        state=state,
        hidden_ND=hidden_BD[index_N],
        history=History(token_BH[index_N], count_N, count_N),
        sum_BK=none_BK.at[:, 0].set(0.0),  # beams are equal at first: all but one would bring the same candidates again
        finished_BKH=jnp.zeros((B, beams, H), jnp.int32),
        length_BK=jnp.zeros((B, beams), jnp.int32),
        score_BK=none_BK,
        open_B=jnp.ones(B, bool),
        broken_B=jnp.zeros(B, bool),
        step=jnp.int32(0),
    )


@functools.partial(jax.jit, static_argnames="live")
def _widen(model: GPT2, carry: Carry, *, live: int) -> Carry:
    return dataclasses.replace(carry, state=_with_live(model, carry.state, live, fresh=False))


def _with_live(model: GPT2, state: DecodeState, live: int, *, fresh: bool) -> DecodeState:
    """The state with `live` slots in its live part, empty if `fresh`."""
    valid_NR = jnp.zeros_like(state.slots.valid_BR) if fresh else state.slots.valid_BR
    mixers = [block.mixer for block in model.unstacked()]
    entries = tuple(mixer.renew(entry, live) if fresh else mixer.grow(entry, live) for mixer, entry in zip(mixers, state.live, strict=True))
    valid_NR = jnp.pad(valid_NR, ((0, 0), (0, max(live - valid_NR.shape[1], 0))))[:, :live]
    return dataclasses.replace(state, live=entries, slots=dataclasses.replace(state.slots, valid_BR=valid_NR))


@functools.partial(jax.jit, donate_argnames="carry")
def _advance(model: GPT2, frozen: tuple[Any, ...], carry: Carry, sampling: Sampling, rule: Rule) -> Carry:
    """Steps until all rows are at their end or the live cache is full."""
    live = carry.state.slots.valid_BR.shape[1]

    def goes_on(carry: Carry) -> jax.Array:
        return (carry.step < rule.new_tokens - 1) & carry.open_B.any() & (carry.state.slots.recent < live)

    def step(carry: Carry) -> Carry:
        carry, parent_N, token_N = _choose(model, carry, sampling, rule)
        hidden_N1D, state = model.step(token_N[:, None], dataclasses.replace(carry.state.rows(parent_N), frozen=frozen))
        return dataclasses.replace(carry, hidden_ND=hidden_N1D[:, 0], state=dataclasses.replace(state, frozen=()))

    carry = jax.lax.while_loop(goes_on, step, carry)
    last = (carry.step == rule.new_tokens - 1) & carry.open_B.any()  # what it chooses is not fed: it takes no position
    return jax.lax.cond(last, lambda carry: _choose(model, carry, sampling, rule)[0], lambda carry: carry, carry)


def _choose(model: GPT2, carry: Carry, sampling: Sampling, rule: Rule) -> tuple[Carry, jax.Array, jax.Array]:
    """One more token for each beam, int32 [N], and the beam that it continues; finished beams are put aside."""
    B, K = carry.sum_BK.shape
    V, C, new_length = model.config.vocab_size, 2 * K, carry.step + 1
    logits_NV = logits(model, carry.hidden_ND)[:, :V]
    broken_BK = ~jnp.isfinite(logits_NV.max(-1)).reshape(B, K) & (carry.sum_BK > -jnp.inf)
    log_prob_NV = penalised(jax.nn.log_softmax(logits_NV, -1), sampling, carry.history, carry.step)
    sum_BC, place_BC = jax.lax.top_k((carry.sum_BK[..., None] + log_prob_NV.reshape(B, K, V)).reshape(B, K * V), C)
    parent_BC, token_BC = place_BC // V, place_BC % V
    ends_BC = (token_BC == sampling.eos) | (new_length == rule.new_tokens)

    row_B1 = jnp.arange(B)[:, None]
    token_BKH, count_B = carry.history.token_BH.reshape(B, K, -1), carry.history.count_B.reshape(B, K)[:, 0]
    token_BCH = token_BKH[row_B1, parent_BC].at[row_B1, jnp.arange(C), count_B[:, None]].set(token_BC)
    enters_BC = ends_BC & (jnp.arange(C) < K) & carry.open_B[:, None]
    score_BC = jnp.where(enters_BC, sum_BC / new_length.astype(jnp.float32) ** rule.length_penalty, -jnp.inf)
    score_BK, kept_BK = jax.lax.top_k(jnp.concatenate([carry.score_BK, score_BC], 1), K)
    merge = lambda old, new: jnp.concatenate([old, new], 1)[row_B1, kept_BK]  # noqa: E731

    sum_BK, next_BK = jax.lax.top_k(jnp.where(ends_BC, -jnp.inf, sum_BC), K)
    parent_N = (row_B1 * K + parent_BC[row_B1, next_BK]).reshape(-1)
    reach = jnp.where(rule.hopeful & (rule.length_penalty > 0), rule.new_tokens, new_length).astype(jnp.float32)
    better_B = sum_BK[:, 0] / reach**rule.length_penalty > score_BK[:, -1]
    full_B = score_BK[:, -1] > -jnp.inf
    carry = dataclasses.replace(
        carry,
        history=dataclasses.replace(carry.history, token_BH=token_BCH[row_B1, next_BK].reshape(B * K, -1), count_B=carry.history.count_B + 1),
        sum_BK=sum_BK,
        finished_BKH=merge(carry.finished_BKH, token_BCH),
        length_BK=merge(carry.length_BK, jnp.broadcast_to(count_B[:, None] + 1, (B, C))),
        score_BK=score_BK,
        open_B=carry.open_B & better_B & ~(rule.eager & full_B),
        broken_B=carry.broken_B | (broken_BK.any(1) & carry.open_B),
        step=new_length,
    )
    return carry, parent_N, token_BC[row_B1, next_BK].reshape(-1)
