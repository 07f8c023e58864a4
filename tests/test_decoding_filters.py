"""Temperature, top-k and the draw. Letters: B rows, V vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.decoding import filters
from gpt2jax.decoding.filters import Sampling

draw, filtered_log_probs, keep_top_k = jax.jit(filters.draw), jax.jit(filters.filtered_log_probs), jax.jit(filters.keep_top_k)
V = 601  # three blocks of the draw, the last one not full; more than SORTED


def settings(rows: int, temperature: float | list[float] = 1.0, top_k: int | list[int] = 0, seed: int | list[int] = 0, allowed: int = V) -> Sampling:
    full = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))  # noqa: E731
    return Sampling(full(temperature, jnp.float32), full(top_k, jnp.int32), full(np.array(seed, np.uint32), jnp.uint32), jnp.int32(allowed))


@pytest.fixture
def logits_BV() -> jax.Array:
    return 4 * jax.random.normal(jax.random.key(1), (5, V)) - 30  # all negative, as GPT-2's often are


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-38])
def test_temperature_zero_and_tiny_are_argmax(logits_BV: jax.Array, temperature: float) -> None:
    np.testing.assert_array_equal(draw(logits_BV, settings(5, temperature), jnp.int32(3)), logits_BV.argmax(-1))


def test_rows_of_a_batch_may_differ_in_settings(logits_BV: jax.Array) -> None:
    mixed = settings(5, [0.0, 1.0, 0.7, 0.0, 2.0], [0, 4, 0, 3, 300], [5, 6, 7, 8, 9])
    drawn = draw(logits_BV, mixed, jnp.int32(2))
    for row in range(5):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1] if x.ndim else x, mixed)
        assert drawn[row] == draw(logits_BV[row : row + 1], alone, jnp.int32(2))[0]


def test_the_stream_is_a_function_of_seed_and_step() -> None:
    flat_BV = jnp.zeros((4, V))
    drawn = np.stack([draw(flat_BV, settings(4, seed=[7, 8, 7, 4294967295]), jnp.int32(step)) for step in range(20)])
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
    log_probs = np.asarray(filtered_log_probs(logits_BV, settings(5, 0.6, 7, allowed=500)))
    assert (np.isneginf(log_probs).sum(-1) == V - 7).all()
    assert np.isneginf(log_probs[:, 500:]).all()
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.8, 0), (1.3, 9)])
def test_draws_follow_the_probabilities(temperature: float, top_k: int) -> None:
    """1e5 draws, each count within 4 sigma of theory; rare tokens are counted together."""
    logits_V = jnp.log(1 / (1 + jnp.arange(V)[::-1]) ** 1.2).at[250:260].add(4.0)  # likely ones in every block
    rows, steps = 2500, 40
    one = settings(rows, temperature, top_k, np.arange(rows).tolist())
    counts = np.zeros(V)
    sample = jax.jit(lambda step: draw(jnp.broadcast_to(logits_V, (rows, V)), one, step))
    for step in range(steps):
        counts += np.bincount(np.asarray(sample(step)), minlength=V)
    weights = np.exp(np.asarray(logits_V, np.float64) / temperature)
    weights[weights < np.sort(weights)[::-1][(top_k or V) - 1]] = 0
    expected = weights / weights.sum() * 1e5
    np.testing.assert_allclose(np.exp(filtered_log_probs(logits_V[None], settings(1, temperature, top_k))[0]), expected / 1e5, atol=1e-7)
    assert counts.sum() == 1e5 and counts[expected == 0].sum() == 0
    common = expected > 50
    observed, theory = np.append(counts[common], counts[~common].sum()), np.append(expected[common], expected[~common].sum())
    assert (abs(observed - theory) <= 4 * np.sqrt(theory * (1 - theory / 1e5)) + 1e-9).all()
    chi_square = (((observed - theory) ** 2) / np.maximum(theory, 1e-9)).sum()
    assert chi_square < len(theory) + 5 * np.sqrt(2 * len(theory))


def test_logits_that_are_not_finite_are_reported(logits_BV: jax.Array) -> None:
    broken_BV = logits_BV.at[1, 17].set(jnp.nan).at[3, 400].set(jnp.inf).at[4, 2].set(-jnp.inf)
    drawn = draw(broken_BV, settings(5), jnp.int32(0))
    assert drawn[1] == drawn[3] == -1 and drawn[0] >= 0 and drawn[4] >= 0
