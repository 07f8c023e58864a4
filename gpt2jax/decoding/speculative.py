"""Speculative decoding: a small model drafts a few tokens, the model checks all of them in one step (Leviathan et al., arXiv:2211.17192; Chen et al.,
arXiv:2302.01318). What comes out follows the model's own distribution, under every sampling setting.

A round: the draft model draws G tokens, each from its distribution q, one after the other. The model's distributions p at all G + 1 places come from one step.
Going from left to right a drafted token stays with probability min(1, p/q); where the first one falls, another is drawn from max(p - q, 0), and if none falls,
one more from p. Both caches then forget the tokens that fell. Rows advance by different numbers of tokens, so slots between them may stay unused.

Letters: B rows, J = G + 1 places of a round, R = B J, V vocabulary, H tokens of history, K new tokens of a chunk, D width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.decoding import filters, loop
from gpt2jax.decoding.filters import BROKEN, STUCK, History, Sampling
from gpt2jax.decoding.loop import CHUNK, ENDED, Decoder, Drawn
from gpt2jax.decoding.weights import logits
from gpt2jax.errors import InputError
from gpt2jax.model.cache import DecodeState
from gpt2jax.model.gpt2 import GPT2

#: Most drafted tokens a round: a round must fit the live cache.
MOST_DRAFTED = CHUNK - 1
#: What each of the three random numbers of a place is for.
_DRAFT, _ACCEPT, _REPLACE = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """How well the draft model did, int32 [B] each: rounds in which the row took part, drafted tokens that it could have used, and those that it took."""

    rounds: Any
    drafted: Any
    accepted: Any

    @property
    def rate(self) -> float:
        """The share of drafted tokens that were taken; 0 without any."""
        return float(np.sum(self.accepted) / max(np.sum(self.drafted), 1))

    def of(self, row: int) -> float:
        """`rate` of one row."""
        return jax.tree.map(lambda x: x[row], self).rate


def check_draft(model: GPT2, draft: GPT2, draft_tokens: int, positions: int) -> None:
    """InputError unless `draft` can draft for `model` up to `positions` tokens of prompt and new text that are fed (all but the last new one)."""
    if not 1 <= draft_tokens <= MOST_DRAFTED:
        raise InputError(f"draft_tokens={draft_tokens} must be between 1 and {MOST_DRAFTED}")
    if draft.config.vocab_size != model.config.vocab_size:
        raise InputError(
            f"the draft model has a vocabulary of {draft.config.vocab_size} ids and the model one of {model.config.vocab_size}; "
            "both must have the same tokenizer: choose another draft model"
        )
    if draft.config.context is not None and positions > draft.config.context:
        raise InputError(
            f"prompt and new text take {positions} places, more than the draft model's context of {draft.config.context}; "
            "shorten the prompt, lower max_new_tokens, or choose another draft model"
        )
    if not (model.can_trim and draft.can_trim):
        raise InputError("the cache of a model that keeps a running state cannot forget rejected tokens; decode without a draft model")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What one round hands to the next: both models' caches (without their frozen parts), the tokens so far, each row's last token, which no cache holds yet,
    how many tokens it has drawn and may still draw (0 once it has ended), and the count of what was accepted."""

    states: tuple[DecodeState, DecodeState]
    history: History
    token_B: jax.Array
    drawn_B: jax.Array
    left_B: jax.Array
    acceptance: Acceptance


class SpeculativeDecoder:
    """A `loop.Decoder` that drafts: the same calls, with `draft`, a model of the same vocabulary, and the number of tokens that it drafts a round.

    Both models as `weights.prepare` makes them: `model` for batches of B (draft_tokens + 1) rows, `draft` for B. The caller has asked `check_draft`.
    """

    #: Of the last `decode`, up to the block that it yielded last.
    acceptance: Acceptance

    def __init__(self, model: GPT2, draft: GPT2, draft_tokens: int, alternatives: int | None = None) -> None:
        self.draft_tokens = draft_tokens
        self._pair = Decoder(model, alternatives), Decoder(draft)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        for decoder in self._pair:
            decoder.prefill(prompts)

    def extend(self, more: Sequence[Sequence[int]]) -> None:
        for decoder in self._pair:
            decoder.extend(more)

    def trim(self, lengths: Sequence[int]) -> None:
        for decoder in self._pair:
            decoder.trim(lengths)

    def decode(
        self, rows: Sequence[Sequence[int]], sampling: Sampling, new_tokens: int, *, prompt_lengths: Sequence[int], drawn: int, stopped_B: np.ndarray
    ) -> Iterator[Drawn]:
        """`Decoder.decode`, but rows advance by different numbers of tokens: in each block a row's tokens stand on the left and ENDED fills up behind them.

        A row gets no more than new_tokens in all. At temperature 0 the tokens are those of `Decoder.decode`; else they are other draws from the same
        distribution. A row's tokens depend on its own seed, prompt and settings alone.
        """
        target, draft = self._pair
        token_BH, count_B = map(jnp.asarray, loop._padded(rows, loop.cache_bucket(max(map(len, rows)) + new_tokens + self.draft_tokens)))
        history = History(token_BH, count_B, jnp.asarray(prompt_lengths, jnp.int32))
        start = loop.Carry(target.state, history, jnp.zeros_like(count_B), jnp.asarray(stopped_B.copy()), jnp.int32(drawn))
        start, (out, done_B) = loop._first(target.model, target._hidden_BD, start, sampling, target.alternatives)
        none = Acceptance(*jnp.zeros((3, len(rows)), jnp.int32))
        left_B = jnp.where(done_B, 0, jnp.int32(new_tokens - 1))
        carry = Carry((target.state, draft.state), start.history, start.token_B, jnp.full_like(count_B, drawn + 1), left_B, none)
        self.acceptance = jax.tree.map(np.array, carry.acceptance)
        yield jax.tree.map(np.asarray, out)
        while ((np.asarray(carry.left_B) > 0) & ~stopped_B).any():
            for decoder in self._pair:
                decoder._commit()
            frozen = target.state.frozen, draft.state.frozen
            carry = dataclasses.replace(carry, states=(_without_frozen(target.state), _without_frozen(draft.state)))
            carry, out, count_B = _rounds(target.model, draft.model, frozen, carry, sampling, stopped_B.copy(), self.draft_tokens, target.alternatives)
            for decoder, state, kept in zip(self._pair, carry.states, frozen, strict=True):
                decoder.state = dataclasses.replace(state, frozen=kept)
                decoder._filled, decoder._recent = int(state.slots.filled), int(state.slots.recent)
            self.acceptance = jax.tree.map(np.array, carry.acceptance)
            width = int(np.asarray(count_B).max())
            yield jax.tree.map(lambda x, width=width: np.asarray(x)[:, :width], out)


@functools.partial(jax.jit, static_argnames=("draft_tokens", "alternatives"), donate_argnames="carry")
def _rounds(
    model: GPT2,
    draft: GPT2,
    frozen: tuple[Any, Any],
    carry: Carry,
    sampling: Sampling,
    stopped_B: jax.Array,
    draft_tokens: int,
    alternatives: int | None,
) -> tuple[Carry, Drawn, jax.Array]:
    """Rounds until the live caches may be full or all rows have ended: the new tokens, [B, K], and how many each row got."""
    B, J = stopped_B.shape[0], draft_tokens + 1
    one_round = functools.partial(_round, model, draft, frozen, sampling, J, alternatives)
    empty = jax.tree.map(lambda x: jnp.full((B, CHUNK, *x.shape[2:]), ENDED, x.dtype), jax.eval_shape(one_round, carry)[1])

    def goes_on(loop_carry: tuple[Carry, Drawn, jax.Array]) -> jax.Array:
        carry = loop_carry[0]
        return (carry.states[0].slots.recent + J <= CHUNK) & (carry.left_B > 0).any()

    def advance(loop_carry: tuple[Carry, Drawn, jax.Array]) -> tuple[Carry, Drawn, jax.Array]:
        carry, out, written_B = loop_carry
        carry, new, count_B = one_round(carry)
        place_BJ = jnp.where(jnp.arange(J) < count_B[:, None], written_B[:, None] + jnp.arange(J), CHUNK)  # past the end: dropped
        out = jax.tree.map(lambda x, more: x.at[jnp.arange(B)[:, None], place_BJ].set(more, mode="drop"), out, new)
        return carry, out, written_B + count_B

    carry = dataclasses.replace(carry, left_B=jnp.where(stopped_B, 0, carry.left_B))
    return jax.lax.while_loop(goes_on, advance, (carry, empty, jnp.zeros_like(carry.left_B)))


def _round(
    model: GPT2, draft: GPT2, frozen: tuple[Any, Any], sampling: Sampling, J: int, alternatives: int | None, carry: Carry
) -> tuple[Carry, Drawn, jax.Array]:
    """Draft, check, accept: new tokens [B, J], of which the first count_B are real."""
    B, V = carry.token_B.shape[0], model.config.vocab_size
    state, draft_state = (dataclasses.replace(state, frozen=part) for state, part in zip(carry.states, frozen, strict=True))
    usable_B = jnp.minimum(J, carry.left_B)  # a row that is nearly full checks fewer drafts, and one that has ended none
    valid_BJ = jnp.arange(J) < usable_B[:, None]
    index_BJ = carry.drawn_B[:, None] + jnp.arange(J)
    bits_BJ3 = _random_bits(sampling.seed_B, index_BJ)

    drafted_BJ, log_q_BJV, draft_state, token_BH = _draft(draft, draft_state, sampling, carry, valid_BJ, bits_BJ3[..., _DRAFT])
    fed_BJ = jnp.concatenate([carry.token_B[:, None], drafted_BJ[:, :-1]], 1)
    hidden_BJD, state = model.step(fed_BJ, state, valid_BJ)
    logits_RV = logits(model, hidden_BJD.reshape(B * J, -1))[:, :V]
    row_R = jnp.repeat(jnp.arange(B), J)
    past = History(token_BH[row_R], (carry.history.count_B[:, None] + jnp.arange(J)).reshape(-1), carry.history.prompt_B[row_R])
    log_p_BJV = _log_probs(logits_RV, sampling.rows(row_R), past, index_BJ.reshape(-1)).reshape(B, J, V)
    finite_BJ = jnp.isfinite(logits_RV.max(-1)).reshape(B, J)

    at_BJ = lambda x_BJV: jnp.take_along_axis(x_BJV, drafted_BJ[..., None], 2)[..., 0]  # noqa: E731
    chance_BJ = jnp.log((bits_BJ3[..., _ACCEPT] >> 8).astype(jnp.float32) / (1 << 24))  # of a uniform number in [0, 1)
    # a NaN of either model accepts nothing
    stays_BJ = (chance_BJ < at_BJ(log_p_BJV) - at_BJ(log_q_BJV)) & finite_BJ & (jnp.arange(1, J + 1) < usable_B[:, None])
    accepted_B = jnp.cumprod(stays_BJ, 1).sum(1)

    at_B = lambda x_BJ: jnp.take_along_axis(x_BJ, accepted_B.reshape(B, *[1] * (x_BJ.ndim - 1)), 1)[:, 0]  # noqa: E731
    log_p_BV = at_B(log_p_BJV)
    fell_B = accepted_B + 1 < usable_B
    last_B = _draw(jnp.where(fell_B[:, None], _residual(log_p_BV, at_B(log_q_BJV)), log_p_BV), sampling, at_B(bits_BJ3)[:, _REPLACE])
    last_B = jnp.where(at_B(finite_BJ), jnp.where(jnp.isfinite(log_p_BV.max(-1)), last_B, STUCK), BROKEN)

    place_J = jnp.arange(J)
    new_BJ = jnp.where(place_J == accepted_B[:, None], last_B[:, None], drafted_BJ)
    ends_BJ = ((new_BJ == sampling.eos) | (new_BJ < 0)) & (place_J <= accepted_B[:, None])
    count_B = jnp.minimum(jnp.where(ends_BJ.any(1), jnp.argmax(ends_BJ, 1), accepted_B) + 1, usable_B)
    length_B = state.length_B - usable_B + count_B
    states = tuple(_without_frozen(m.trim(s, length_B)) for m, s in ((model, state), (draft, draft_state)))
    token_B = jnp.take_along_axis(jnp.concatenate([carry.token_B[:, None], jnp.maximum(new_BJ, 0)], 1), count_B[:, None], 1)[:, 0]
    token_BH = token_BH.at[jnp.arange(B), carry.history.count_B + count_B - 1].set(token_B, mode="drop")
    carry = Carry(
        states=(states[0], states[1]),
        history=dataclasses.replace(carry.history, token_BH=token_BH, count_B=carry.history.count_B + count_B),
        token_B=token_B,
        drawn_B=carry.drawn_B + count_B,
        left_B=jnp.where(ends_BJ.any(1), 0, carry.left_B - count_B),
        acceptance=jax.tree.map(
            jnp.add, carry.acceptance, Acceptance((usable_B > 0).astype(jnp.int32), jnp.maximum(usable_B - 1, 0), jnp.minimum(accepted_B, count_B))
        ),
    )
    return carry, _report(logits_RV, new_BJ, alternatives), count_B


def _draft(
    draft: GPT2, state: DecodeState, sampling: Sampling, carry: Carry, valid_BJ: jax.Array, bits_BJ: jax.Array
) -> tuple[jax.Array, jax.Array, DecodeState, jax.Array]:
    """Drafted tokens [B, J] and the distributions that they come from [B, J, V]; the draft model's state behind them; the history with them.

    The last step only feeds the last draft, which the cache needs if all are accepted; what it returns is not used.
    """
    J = valid_BJ.shape[1]

    def step(loop_carry: tuple[DecodeState, History, jax.Array], now: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        state, history, token_B = loop_carry
        j, valid_B, bits_B = now
        hidden_B1D, state = draft.step(token_B[:, None], state, valid_B[:, None])

        def propose() -> tuple[jax.Array, jax.Array]:
            logits_BV = logits(draft, hidden_B1D[:, 0])[:, : draft.config.vocab_size]
            log_q_BV = _log_probs(logits_BV, sampling, history, carry.drawn_B + j)
            return _draw(log_q_BV, sampling, bits_B), log_q_BV

        nothing = jnp.zeros_like(token_B), jnp.zeros((token_B.shape[0], draft.config.vocab_size))
        token_B, log_q_BV = jax.lax.cond(j < J - 1, propose, lambda: nothing)
        return (state, history.push(token_B), token_B), (token_B, log_q_BV)

    (state, history, _), (token_JB, log_q_JBV) = jax.lax.scan(step, (state, carry.history, carry.token_B), (jnp.arange(J), valid_BJ.T, bits_BJ.T))
    return token_JB.T, log_q_JBV.swapaxes(0, 1), state, history.token_BH


def _log_probs(logits_BV: jax.Array, sampling: Sampling, history: History, index_B: jax.Array) -> jax.Array:
    """What the row's new token number index_B follows, after all settings, [B, V]; at temperature 0 the most likely token is certain. NaN if none may come."""
    F = sampling.forced_BF.shape[1]
    forced_B1 = jnp.take_along_axis(sampling.forced_BF, jnp.minimum(index_B, F - 1)[:, None], 1)
    # the filters take one index for all rows: settings that count from each row's own
    sampling = dataclasses.replace(sampling, forced_BF=jnp.where(index_B[:, None] < F, forced_B1, -1), min_new_tokens_B=sampling.min_new_tokens_B - index_B)
    scores_BV = filters._scores(logits_BV, sampling, history, jnp.int32(0))
    likeliest_BV = jnp.arange(scores_BV.shape[1]) == jnp.argmax(scores_BV, -1, keepdims=True)
    return jax.nn.log_softmax(jnp.where(likeliest_BV | (sampling.temperature_B > 0)[:, None], scores_BV, -jnp.inf), -1)


def _residual(log_p_BV: jax.Array, log_q_BV: jax.Array) -> jax.Array:
    """log max(p - q, 0), not normalised. p itself where nothing is left of it, which rounding alone can bring about, or where the draft model gave NaN."""
    rest_BV = jnp.maximum(jnp.exp(log_p_BV) - jnp.exp(log_q_BV), 0.0)
    return jnp.where(rest_BV.sum(-1, keepdims=True) > 0, jnp.log(rest_BV), log_p_BV)


def _draw(log_prob_BV: jax.Array, sampling: Sampling, bits_B: jax.Array) -> jax.Array:
    """A token of each row, int32 [B], by a random uint32. A row at temperature 0 has one that is certain."""
    best_B = jnp.argmax(log_prob_BV, -1).astype(jnp.int32)
    draw = lambda: filters._draw_by_blocks(log_prob_BV, bits_B, jnp.int32(0)).astype(jnp.int32)  # noqa: E731
    return jax.lax.cond((sampling.temperature_B > 0).any(), draw, lambda: best_B)


def _random_bits(seed_B: jax.Array, index_BJ: jax.Array) -> jax.Array:
    """uint32 [B, J, 3]: of each place what its row's seed and its index make, whatever round it stands in. All at once, for each call is slow to compile.

    What a round threw away at a place is drawn with the same numbers in the next. That keeps the distribution: nothing that was kept depends on them.
    """
    one = lambda seed, index: jax.random.bits(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index), (3,))  # noqa: E731
    return jax.vmap(jax.vmap(one, (None, 0)))(seed_B, index_BJ)


def _report(logits_RV: jax.Array, new_BJ: jax.Array, alternatives: int | None) -> Drawn:
    if alternatives is None:
        return Drawn(new_BJ)
    log_prob_BJV = jax.nn.log_softmax(logits_RV, -1).reshape(*new_BJ.shape, -1)
    top_log_prob_BJN, top_id_BJN = jax.lax.top_k(log_prob_BJV, alternatives)
    return Drawn(new_BJ, jnp.take_along_axis(log_prob_BJV, jnp.maximum(new_BJ, 0)[..., None], 2)[..., 0], top_id_BJN, top_log_prob_BJN)


def _without_frozen(state: DecodeState) -> DecodeState:
    return dataclasses.replace(state, frozen=())
