"""Drafting changes how fast tokens come, never which ones (temperature 0) or how they are distributed. Letters: B rows, K tokens, V vocabulary."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import prompt, slow_greedy, tiny

from gpt2jax.decoding import filters, speculative
from gpt2jax.decoding.filters import BROKEN, STUCK, History
from gpt2jax.decoding.generate import generate
from gpt2jax.decoding.loop import CHUNK, ENDED, Drawn
from gpt2jax.decoding.request import sampling_of
from gpt2jax.decoding.speculative import MOST_DRAFTED, SpeculativeDecoder, check_draft
from gpt2jax.decoding.weights import prepare
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_named

GREEDY = dict(temperature=0.0)


def near(model: GPT2) -> GPT2:
    """A draft model that agrees often."""
    random = np.random.default_rng(0)
    return map_named(lambda name, leaf: leaf * (1 + 0.05 * random.standard_normal(leaf.shape, np.float32)), model)


def stranger(model: GPT2) -> GPT2:
    """A draft model that agrees by chance only. (Of the same sizes, so that nothing is compiled for it.)"""
    return map_named(lambda name, leaf: jnp.roll(leaf, 1, 0) if name == "token_table" else leaf, model)


def blocks_of(
    model: GPT2, draft: GPT2, prompts: list[list[int]], settings: dict[str, Any], new_tokens: int, draft_tokens: int, *, eos: int = -1, alternatives: Any = None
) -> tuple[list[Drawn], SpeculativeDecoder]:
    rows = len(prompts)
    check_draft(model, draft, draft_tokens, max(map(len, prompts)) + new_tokens - 1)
    sampling = sampling_of(settings, rows, model.config.vocab_size, eos=eos, new_tokens=new_tokens)
    decoder = SpeculativeDecoder(prepare(model, turned=False), prepare(draft, turned=False), draft_tokens, alternatives)
    decoder.prefill(prompts)
    lengths = list(map(len, prompts))
    return list(decoder.decode(prompts, sampling, new_tokens, prompt_lengths=lengths, drawn=0, stopped_B=np.zeros(rows, bool))), decoder


def tokens_of(blocks: list[Drawn], row: int) -> list[int]:
    for block in blocks:
        real = block.token[row] != ENDED
        assert not (real[1:] & ~real[:-1]).any(), "a row's tokens stand on the left"
    return [int(token) for block in blocks for token in block.token[row] if token != ENDED]


def decode(*arguments: Any, **options: Any) -> list[list[int]]:
    blocks, _ = blocks_of(*arguments, **options)
    return [tokens_of(blocks, row) for row in range(len(arguments[2]))]


def test_greedy_tokens_are_those_without_a_draft() -> None:
    """A ragged batch, drafts that are good and bad, through commits and a growing cache."""
    model, prompts = tiny(), [prompt(n) for n in (1, 7, 30)]
    expected = [slow_greedy(model, ids, 90) for ids in prompts]
    for draft, least, most, slots in ((near(model), 0.3, 0.95, 256), (stranger(model), 0.0, 0.1, 128)):
        blocks, decoder = blocks_of(model, draft, prompts, GREEDY, 90, 4)
        assert [tokens_of(blocks, row) for row in range(3)] == expected
        assert blocks[0].token.shape == (3, 1), "the first token does not wait for a round"
        assert least <= decoder.acceptance.rate <= most
        assert (decoder.acceptance.rounds + decoder.acceptance.accepted == 89).all(), "a round brings what was accepted and one more"
        for half in decoder._pair:
            assert half.state.slots.valid_BS.shape == (3, slots), "slots between rows make the cache grow"


def test_a_perfect_draft_is_always_accepted() -> None:
    model, ids = tiny(), prompt(7)
    compiled = speculative._rounds._cache_size()
    for settings in (GREEDY, dict(temperature=0.9, top_p=0.9, seed=5)):
        blocks, decoder = blocks_of(model, model, [ids], settings, 1 + 9 * 5 + 3, 4)
        assert decoder.acceptance.rounds == 10 and decoder.acceptance.rate == 1.0
        assert decoder.acceptance.drafted == 9 * 4 + 2, "the last round has use for two drafts only"
        assert len(tokens_of(blocks, 0)) == 49
    assert speculative._rounds._cache_size() <= compiled + 1, "one program for all chunks and settings"


def test_one_row_gives_rejected_slots_back() -> None:
    model, ids = tiny(), prompt(7)
    _, decoder = blocks_of(model, stranger(model), [ids], GREEDY, 49, 4)
    for half in decoder._pair:
        assert int(half.state.slots.filled + half.state.slots.recent) == int(half.state.length_B[0]) == 7 + 48


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    """With settings of its own that look at the history, and draws."""
    model, prompts = tiny(), [prompt(n) for n in (3, 17, 9)]
    settings: dict[str, Any] = dict(
        temperature=[0.9, 0.0, 1.2], top_k=[0, 5, 20], repetition_penalty=[1.0, 1.3, 1.7], no_repeat_ngram_size=[2, 0, 1], seed=[4, 5, 6]
    )
    together = decode(model, near(model), prompts, settings, 30, 4)
    for row, ids in enumerate(prompts):
        alone = {name: values[row] for name, values in settings.items()}
        assert decode(model, near(model), [ids], alone, 30, 4)[0] == together[row]
    assert len(set(together[2])) == 30


def test_settings_that_change_with_the_place_act_at_each_place() -> None:
    """At temperature 0 with every such setting: as without a draft. Rows differ, so that an index of another row would show."""
    model, prompts = tiny(), [prompt(n) for n in (5, 9, 2)]
    end = slow_greedy(model, prompts[0], 1)[0]
    settings = dict(
        min_new_tokens=[9, 0, 14],
        repetition_penalty=[1.0, 1.5, 1.2],
        frequency_penalty=[0.0, 0.4, 3.0],
        no_repeat_ngram_size=[1, 2, 0],
        forced_tokens=[{2: 7, 11: 8}, {}, {3: 5, -1: 6}],
        **GREEDY,
    )
    expected = [result.tokens for result in generate(model, prompts, max_new_tokens=20, eos_token_id=end, **settings)]
    assert decode(model, near(model), prompts, settings, 20, 4, eos=end) == expected
    assert end in expected[0][9:] and end in expected[1][:14] and len(expected[2]) == 20 and expected[2][-1] == 6


def test_an_end_among_accepted_drafts_ends_the_row() -> None:
    model, prompts = tiny(), [prompt(n) for n in (5, 9, 2)]
    free = [slow_greedy(model, ids, 40) for ids in prompts]
    ends = [next((i for i, token in enumerate(row) if token == eos), 39) for eos in [free[0][8]] for row in free]
    assert ends[0] == 8 and (ends[0] - 1) % 5 == 2, "in the middle of a round of 5 after the first token"
    blocks, decoder = blocks_of(model, model, prompts, GREEDY, 40, 4, eos=free[0][8])
    assert [tokens_of(blocks, row) for row in range(3)] == [row[: end + 1] for row, end in zip(free, ends, strict=True)]
    assert decoder.acceptance.rounds.tolist() == [1 + (end - 1) // 5 for end in ends] and len(set(ends)) > 1
    blocks, _ = blocks_of(model, model, prompts[:1], GREEDY, 40, 4, eos=free[0][8])
    assert tokens_of(blocks, 0) == free[0][:9]


def test_a_row_that_the_caller_stops_takes_no_more() -> None:
    model, prompts = tiny(), [prompt(n) for n in (5, 9, 2)]
    sampling = sampling_of(GREEDY, 3, 257, eos=-1, new_tokens=90)
    decoder = SpeculativeDecoder(prepare(model, turned=False), prepare(model, turned=False), 4)
    decoder.prefill(prompts)
    stopped_B, blocks = np.zeros(3, bool), []
    for block in decoder.decode(prompts, sampling, 90, prompt_lengths=[5, 9, 2], drawn=0, stopped_B=stopped_B):
        blocks.append(block)
        stopped_B[0] = len(blocks) == 2
    assert tokens_of(blocks, 0) == slow_greedy(model, prompts[0], 31)
    assert tokens_of(blocks, 1) == slow_greedy(model, prompts[1], 90)


def test_the_whole_context_and_log_probs() -> None:
    """69 tokens leave room for 7 in a context of 75, the last of which is never fed back; a shorter row beside it; a round that takes the whole live cache.
    Log-probabilities are the model's own, before all settings."""
    model, prompts = tiny(n_positions=75), [prompt(69), prompt(3)]
    expected = [slow_greedy(model, ids, 7) for ids in prompts]
    settings = GREEDY | dict(logit_bias={int(expected[0][0]): 0.1})
    blocks, _ = blocks_of(model, near(model), prompts, settings, 7, MOST_DRAFTED, alternatives=2)
    assert [tokens_of(blocks, row) for row in range(2)] == expected
    for row, ids in enumerate(prompts):
        tokens = (ids + expected[row])[:75]
        log_prob_KV = jax.nn.log_softmax(model(jnp.asarray([tokens + [0] * (75 - len(tokens))]))[0, len(ids) - 1 :][:7], -1)
        real = [block.token[row] != ENDED for block in blocks]
        got = [np.concatenate([x[row][keep] for x, keep in zip(part, real, strict=True)]) for part in zip(*map(jax.tree.leaves, blocks), strict=True)]
        np.testing.assert_allclose(got[1], log_prob_KV.max(-1), atol=1e-4)
        np.testing.assert_array_equal(got[2], jax.lax.top_k(log_prob_KV, 2)[1])
        np.testing.assert_allclose(got[3], jax.lax.top_k(log_prob_KV, 2)[0], atol=1e-4)
    longer = [prompt(35), prompt(1)]
    assert decode(model, near(model), longer, GREEDY, 40, MOST_DRAFTED, alternatives=2) == [slow_greedy(model, ids, 40) for ids in longer]
    assert decode(model, model, [prompt(75)], GREEDY, 1, 1) == [slow_greedy(model, prompt(75), 1)]


V, NEW, ROWS, BATCHES = 5, 4, 2048, 6


def exact_joint(model: GPT2, ids: list[int], settings: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The probability of each text of NEW tokens, [V**NEW]: filtered log-probabilities behind each beginning, from the uncached forward."""
    begins = np.array([[*ids, *begin] for begin in itertools.product(range(V), repeat=NEW - 1)])
    rows, prompt_length = len(begins), len(ids)
    logits_BTV = model(jnp.asarray(begins))
    sampling = sampling_of({**settings, "seed": 0}, rows, V, eos=-1, new_tokens=NEW)
    joint = np.ones(1)
    for step in range(NEW):
        history = History(jnp.asarray(begins), jnp.full(rows, prompt_length + step), jnp.full(rows, prompt_length))
        log_prob_BV = jax.jit(filters.filtered_log_probs)(logits_BTV[:, prompt_length + step - 1], sampling, history, jnp.int32(step))
        each = slice(None, None, V ** (NEW - 1 - step))  # one row for each beginning of `step` tokens
        joint = (joint[:, None] * np.exp(np.asarray(log_prob_BV[each], np.float64))).reshape(-1)
    return joint


def test_draws_follow_the_models_own_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of all 625 texts of 4 tokens in 12,288 draws, half of them under filters and penalties. The first token needs no draft; then a round has up to 2
    useful drafts, so that all ways through a round are taken."""
    monkeypatch.setattr(filters, "BLOCK", 8)  # 250 random numbers less a draw
    sizes = dict(vocab_size=V, n_positions=12, vocab_multiple=8)
    flat = lambda model: map_named(lambda name, leaf: leaf * (0.15 if name == "token_table" else 1), model)  # noqa: E731
    model, draft = flat(tiny(**sizes)), flat(tiny(**sizes, n_embd=6, n_layer=1))
    ids, plain, filtered = [3, 1, 4, 1], dict(), dict(temperature=1.4, top_p=0.9, repetition_penalty=1.8, presence_penalty=0.9, min_p=0.02)
    mixed = {name: [1.0, value] * (ROWS // 2) for name, value in filtered.items()} | {
        name: [0.0, filtered[name]] * (ROWS // 2) for name in ("presence_penalty", "min_p")
    }
    texts, rates = [], []
    for batch in range(BATCHES):
        seeds = [batch * ROWS + row for row in range(ROWS)]
        blocks, decoder = blocks_of(model, draft, [ids] * ROWS, {**mixed, "seed": seeds}, NEW, 3)
        packed = np.concatenate([block.token for block in blocks], 1)
        texts.append(packed[packed != ENDED].reshape(ROWS, NEW))
        rates.append(decoder.acceptance.rate)
    assert 0.3 < np.mean(rates) < 0.85, "a draft that is always or never right would prove little"
    code = np.concatenate(texts) @ V ** np.arange(NEW)[::-1]
    for half, settings in enumerate((plain, filtered)):
        counts = np.bincount(code[half::2], minlength=V**NEW).reshape([V] * NEW)
        expected = exact_joint(model, ids, settings).reshape([V] * NEW) * counts.sum()
        assert counts[expected == 0].sum() == 0, "a text that the filters rule out"
        assert (expected >= 8).sum() > 100
        for hidden in ((), (0, 1), (1, 2), (2, 3), (0, 3)):  # whole texts, and each pair of places, which shows less at a time, but sharper
            check_counts(counts.sum(hidden).reshape(-1), expected.sum(hidden).reshape(-1))


def check_counts(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    large = expected >= 8
    counts, expected = np.append(counts[large], counts[~large].sum()), np.append(expected[large], expected[~large].sum() + 1e-9)
    deviation = (counts - expected) / np.sqrt(expected * (1 - expected / counts.sum()))
    assert np.abs(deviation).max() < 4
    chi_square, degrees = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


def test_damaged_models_and_settings_that_leave_nothing() -> None:
    model, ids = tiny(), prompt(4)
    damaged = map_named(lambda name, leaf: leaf.at[200].set(jnp.nan) if name == "token_table" else leaf, model)
    assert decode(damaged, damaged, [ids], GREEDY, 12, 4)[0] == [BROKEN], "its logits are never finite"
    assert decode(model, damaged, [ids], GREEDY, 12, 4)[0] == slow_greedy(model, ids, 12), "a damaged draft costs speed alone"
    later = map_named(lambda name, leaf: leaf.at[6].set(jnp.nan) if name == "position.table" else leaf, model)
    (row,) = decode(later, later, [ids], dict(forced_tokens={1: 7, 2: 8, 3: 9}, **GREEDY), 12, 4)
    assert row[-1] == BROKEN and len(row) <= 4, "forced tokens do not hide it: without a draft the fourth token finds it"
    few = dict(temperature=1.0, no_repeat_ngram_size=1, forbidden_tokens=list(range(7, 257)))
    for draft in (model, near(model)):
        (row,) = decode(model, draft, [[1]], few, 12, 4)
        assert row[-1] == STUCK and sorted(row[:-1]) == [0, 2, 3, 4, 5, 6]


def test_drafts_that_cannot_work_are_refused() -> None:
    model = tiny()
    for draft, draft_tokens, positions, words in (
        (tiny(vocab_size=256), 4, 20, "256 ids and the model one of 257"),
        (tiny(n_positions=75), 4, 76, "76 places, more than the draft model's context of 75"),
        (model, 0, 20, "draft_tokens=0"),
        (model, CHUNK, 20, "between 1 and 31"),
    ):
        with pytest.raises(InputError, match=words):
            check_draft(model, draft, draft_tokens, positions)
    check_draft(model, tiny(n_positions=75), 4, 75)
