"""The settings, their order, and the draw. Letters: B rows, V vocabulary, H tokens of history."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_filters
from golden.folders import GOLDEN

from gpt2jax.decoding import filters
from gpt2jax.decoding.filters import BROKEN, STUCK, History, Sampling
from gpt2jax.decoding.request import sampling_of

jit_draw, jit_log_probs, keep_top_k, keep_top_p = map(jax.jit, (filters.draw, filters.filtered_log_probs, filters.keep_top_k, filters.keep_top_p))
V = 601  # three blocks of the draw, the last one not full


def settings(rows: int, vocabulary: int = V, *, eos: int = -1, new_tokens: int = 50, allowed: int | None = None, **values: Any) -> Sampling:
    return sampling_of(values, rows, vocabulary, eos=eos, new_tokens=new_tokens, allowed=allowed)


def history(rows: int = 5, tokens: list[list[int]] | None = None, prompt: int = 0) -> History:
    ids = tokens or [[0]] * rows
    padded = np.array([[*row, *[3] * (40 - len(row))] for row in ids], np.int32)  # what stands behind must not matter
    return History(jnp.asarray(padded), jnp.asarray([len(row) for row in ids]), jnp.full(len(ids), prompt))


def draw(logits_BV: jax.Array, sampling: Sampling, step: Any) -> jax.Array:
    return jit_draw(logits_BV, sampling, history(logits_BV.shape[0]), jnp.int32(step))


def filtered_log_probs(logits_BV: jax.Array, sampling: Sampling, past: History | None = None, step: int = 0) -> jax.Array:
    return jit_log_probs(logits_BV, sampling, past or history(logits_BV.shape[0]), jnp.int32(step))


@pytest.fixture
def logits_BV() -> jax.Array:
    return 4 * jax.random.normal(jax.random.key(1), (5, V)) - 30  # all negative, as GPT-2's often are


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-38])
def test_temperature_zero_and_tiny_are_argmax(logits_BV: jax.Array, temperature: float) -> None:
    np.testing.assert_array_equal(draw(logits_BV, settings(5, temperature=temperature), 3), logits_BV.argmax(-1))


def test_rows_of_a_batch_may_differ_in_settings(logits_BV: jax.Array) -> None:
    """Each row's probabilities and draw are those that it gets alone."""
    mixed = settings(
        5,
        temperature=[0.0, 1.0, 0.7, 0.0, 2.0],
        top_k=[0, 4, 0, 3, 300],
        top_p=[1.0, 0.9, 0.5, 1.0, 0.7],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.01],
        typical_p=[1.0, 0.8, 1.0, 0.6, 1.0],
        repetition_penalty=[1.0, 1.3, 1.0, 0.7, 1.0],
        frequency_penalty=[0.0, 0.0, 2.0, 0.0, 0.1],
        no_repeat_ngram_size=[0, 2, 0, 3, 1],
        logit_bias=[{}, {3: 4.0}, {}, {600: 9.0}, {}],
        seed=[5, 6, 7, 8, 9],
    )
    past = history(tokens=[[1, 2, 1, 2], [5, 600, 5], [9], [1, 2, 3, 1, 2, 3, 1, 2], [7, 7, 8, 300]], prompt=1)
    drawn, log_probs = jit_draw(logits_BV, mixed, past, jnp.int32(2)), filtered_log_probs(logits_BV, mixed, past, 2)
    assert len({int(np.isfinite(row).sum()) for row in log_probs}) >= 4
    for row in range(5):
        alone, own = mixed.rows(jnp.array([row])), jax.tree.map(lambda x, row=row: x[row : row + 1], past)
        np.testing.assert_allclose(log_probs[row], filtered_log_probs(logits_BV[row : row + 1], alone, own, 2)[0], rtol=1e-6)
        assert drawn[row] == jit_draw(logits_BV[row : row + 1], alone, own, jnp.int32(2))[0]


def test_the_stream_is_a_function_of_seed_and_step() -> None:
    flat_BV = jnp.zeros((4, V))
    drawn = np.stack([draw(flat_BV, settings(4, seed=[7, 8, 7, 4294967295]), step) for step in range(20)])
    np.testing.assert_array_equal(drawn[:, 0], drawn[:, 2])
    assert (drawn[:, 0] != drawn[:, 1]).sum() > 15 and (drawn[:, 0] != drawn[:, 3]).sum() > 15
    assert len(set(drawn[:, 0].tolist())) > 15, "each step must draw afresh"


@pytest.mark.parametrize("k", [1, 2, 3, 255, 256, 257, 400, V - 1, V, V + 5])
def test_top_k_is_exact(logits_BV: jax.Array, k: int) -> None:
    mixed_BV = logits_BV + jnp.array([0, 30, 60, 28, 32])[:, None]  # all negative, of both signs, all positive
    kept = np.asarray(keep_top_k(mixed_BV, jnp.full(5, k)))
    for row, source in zip(kept, np.asarray(mixed_BV), strict=True):
        least = np.sort(source)[::-1][min(k, V) - 1]
        np.testing.assert_array_equal(row, np.where(source >= least, source, -np.inf))
        assert np.isfinite(row).sum() == min(k, V)


@pytest.mark.parametrize("k", [17, 300])
def test_top_k_zero_is_no_limit_also_beside_rows_with_one(logits_BV: jax.Array, k: int) -> None:
    kept_BV = keep_top_k(logits_BV, jnp.array([0, 3, 0, k, 1]))
    np.testing.assert_array_equal(kept_BV[0], logits_BV[0])
    np.testing.assert_array_equal(jnp.isfinite(kept_BV).sum(-1), [V, 3, V, k, 1])
    np.testing.assert_array_equal(filtered_log_probs(logits_BV, settings(5)), jax.nn.log_softmax(logits_BV - logits_BV.max(-1, keepdims=True)))


@pytest.mark.parametrize("k", [4, 300])
def test_ties_with_the_last_one_stay(k: int) -> None:
    row = jnp.linspace(-2.0, 2.0, V).at[::2].set(-0.0).at[1::4].set(0.0)
    least = jnp.sort(row)[::-1][k - 1]
    kept = jnp.isfinite(keep_top_k(row[None], jnp.array([k]))[0])
    np.testing.assert_array_equal(kept, row >= least)
    assert kept.sum() == k if k == 4 else kept.sum() > k


def test_forbidden_tokens_are_exactly_minus_infinity(logits_BV: jax.Array) -> None:
    log_probs = np.asarray(filtered_log_probs(logits_BV, settings(5, temperature=0.6, top_k=7, allowed=500)))
    assert (np.isneginf(log_probs).sum(-1) == V - 7).all()
    assert np.isneginf(log_probs[:, 500:]).all()
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("values", [dict(temperature=0.8), dict(temperature=1.3, top_k=9), dict(top_p=0.8, min_p=0.001)])
def test_draws_follow_the_probabilities(values: dict[str, Any]) -> None:
    """1e5 draws, each count within 4 sigma of theory; rare tokens are counted together."""
    logits_V = jnp.log(1 / (1 + jnp.arange(V)[::-1]) ** 1.2).at[250:260].add(4.0)  # likely ones in every block
    rows, steps = 2500, 40
    one = settings(rows, seed=np.arange(rows).tolist(), **values)
    counts = np.zeros(V)
    sample = jax.jit(lambda step: filters.draw(jnp.broadcast_to(logits_V, (rows, V)), one, history(rows), step))
    for step in range(steps):
        counts += np.bincount(np.asarray(sample(step)), minlength=V)
    weights = np.exp(np.asarray(logits_V, np.float64) / values.get("temperature", 1.0))
    weights[weights < np.sort(weights)[::-1][values.get("top_k", V) - 1]] = 0
    above = np.array([weights[weights > weight].sum() for weight in weights]) / weights.sum()
    weights[above >= values.get("top_p", 1.0)] = 0
    weights[weights < values.get("min_p", 0.0) * weights.max()] = 0
    expected = weights / weights.sum() * 1e5
    np.testing.assert_allclose(np.exp(filtered_log_probs(logits_V[None], settings(1, **values))[0]), expected / 1e5, atol=1e-7)
    assert counts.sum() == 1e5 and counts[expected == 0].sum() == 0
    common = expected > 50
    observed, theory = np.append(counts[common], counts[~common].sum()), np.append(expected[common], expected[~common].sum())
    assert (abs(observed - theory) <= 4 * np.sqrt(theory * (1 - theory / 1e5)) + 1e-9).all()
    chi_square = (((observed - theory) ** 2) / np.maximum(theory, 1e-9)).sum()
    assert chi_square < len(theory) + 5 * np.sqrt(2 * len(theory))


def test_logits_that_are_not_finite_are_reported(logits_BV: jax.Array) -> None:
    broken_BV = logits_BV.at[1, 17].set(jnp.nan).at[3, 400].set(jnp.inf).at[4, 2].set(-jnp.inf)
    drawn = draw(broken_BV, settings(5), 0)
    assert drawn[1] == drawn[3] == BROKEN and drawn[0] >= 0 and drawn[4] >= 0


def test_a_row_where_no_token_may_come_is_reported(logits_BV: jax.Array) -> None:
    drawn = draw(logits_BV, settings(5, forbidden_tokens=[[], list(range(V)), [0], [], []]), 0)
    assert drawn[1] == STUCK and (np.delete(drawn, 1) >= 0).all()


def golden_cases() -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "filters.json").read_text())


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: ", ".join(case["settings"]))
def test_settings_and_their_order_equal_transformers(case: dict[str, Any]) -> None:
    tokens, logits_BV = make_filters.inputs()
    past = history(tokens=tokens.tolist(), prompt=make_filters.LENGTH - make_filters.NEW)
    sampling = settings(make_filters.ROWS, make_filters.V, eos=make_filters.EOS, **case["settings"])
    got = filtered_log_probs(jnp.asarray(logits_BV), sampling, past, make_filters.NEW)
    expected = np.array([[-np.inf if x is None else x for x in row] for row in case["log_probs"]])
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.torch
def test_the_golden_file_is_what_transformers_says() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for case, expected in zip(golden_cases(), make_filters.answers(), strict=True):
        np.testing.assert_allclose(np.array(case["log_probs"], np.float64), np.array(expected, np.float64), atol=1e-5)


def test_presence_and_frequency_count_the_new_text_only() -> None:
    """logits - frequency * count - presence * (count > 0), as in OpenAI's documentation of the two."""
    logits_BV = jnp.asarray(np.random.default_rng(2).standard_normal((2, 11)), jnp.float32)
    past = history(tokens=[[4, 4, 5, 4, 6, 6, 6], [1, 2, 2]], prompt=2)
    got = filtered_log_probs(logits_BV, settings(2, 11, presence_penalty=[0.7, 0.0], frequency_penalty=[0.3, -0.4]), past)
    counts = np.array([[0, 0, 0, 0, 1, 1, 3, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    expected = logits_BV - np.array([[0.3], [-0.4]]) * counts - np.array([[0.7], [0.0]]) * (counts > 0)
    np.testing.assert_allclose(got, jax.nn.log_softmax(expected), rtol=1e-5)


def test_no_repeat_against_a_search_of_the_text() -> None:
    rows = np.random.default_rng(5).integers(0, 3, (30, 37)).tolist()
    lengths = [1 + i % 37 for i in range(30)]
    texts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    n = [1 + i % 6 for i in range(30)]
    got = filtered_log_probs(jnp.zeros((30, 7)), settings(30, 7, no_repeat_ngram_size=n), history(tokens=texts))
    for row, size, log_probs in zip(texts, n, np.asarray(got), strict=True):
        seen = {tuple(row[i : i + size]) for i in range(len(row) - size + 1)}
        banned = [tuple([*row[len(row) - size + 1 :], token]) in seen for token in range(7)]
        assert np.isneginf(log_probs).tolist() == banned


def test_forced_tokens_come_at_their_place(logits_BV: jax.Array) -> None:
    sampling = settings(5, forced_tokens=[{}, {2: 9}, {0: 4, 2: 600}, {-1: 7}, {-48: 8}], new_tokens=50)
    for step, forced in ((2, [None, 9, 600, None, 8]), (0, [None, None, 4, None, None]), (49, [None, None, None, 7, None]), (50, [None] * 5)):
        log_probs = np.asarray(filtered_log_probs(logits_BV, sampling, step=step))
        for row, token in zip(log_probs, forced, strict=True):
            assert (np.isfinite(row).sum() == V) if token is None else (np.flatnonzero(np.isfinite(row)).tolist() == [token] and row[token] == 0)


def test_settings_at_rest_change_nothing(logits_BV: jax.Array) -> None:
    """p = 1, k = 0 and k >= V are exact no-ops, alone and beside a row that filters."""
    plain = jax.nn.log_softmax(logits_BV - logits_BV.max(-1, keepdims=True))
    for values in (dict(), dict(top_p=1.0, min_p=0.0, typical_p=1.0, top_k=V), dict(top_k=10**20)):
        np.testing.assert_array_equal(filtered_log_probs(logits_BV, settings(5, **values)), plain)
    beside = settings(
        5, top_p=[1.0, 0.5, 1.0, 1.0, 1.0], top_k=[0, 3, 0, 0, 0], typical_p=[1.0, 0.4, 1.0, 1.0, 1.0], repetition_penalty=[1.0, 2.0, 1.0, 1.0, 1.0]
    )
    np.testing.assert_array_equal(np.delete(filtered_log_probs(logits_BV, beside), 1, 0), np.delete(plain, 1, 0))


def test_top_p_keeps_at_least_one() -> None:
    """With .6 .3 .1: p = .5 and p = .6 keep one, p = .61 two (an off-by-one keeps none, or one more)."""
    logits_BV = jnp.log(jnp.array([[0.3, 0.6, 0.1]] * 5))
    kept = jnp.isfinite(keep_top_p(logits_BV, jnp.array([1e-9, 0.5, 0.6 - 1e-6, 0.61, 0.95])))
    assert kept.tolist() == [[False, True, False]] * 3 + [[True, True, False], [True, True, True]]
