"""The guard: what is a spike, what a spike leaves as it was, and how a run ends by one. And what a diagnosis names."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.config import Config, GuardConfig, ModelConfig, OptimizerConfig, TrainConfig
from gpt2jax.model.parameters import abstract_model
from gpt2jax.training.diagnosis import diagnose
from gpt2jax.training.guard import Guard, judge
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import TrainState, init_state, make_train_step

MODEL = ModelConfig(vocab_size=61, n_positions=9, n_layer=3, n_head=2, n_embd=12)
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_steps=1, clip_norm=None)
SKELETON = abstract_model(MODEL)


def _batch(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    ids_BT = np.random.default_rng(seed).integers(0, 61, (4, 10)).astype(np.int32)
    return jnp.asarray(ids_BT[:, :-1]), jnp.asarray(ids_BT[:, 1:])


def _make(guard: GuardConfig, **more: Any) -> tuple[TrainState, Any]:
    optimizer = make_optimizer(OPTIMIZER, 50, SKELETON)
    state = init_state(MODEL, optimizer, 0)
    state = dataclasses.replace(state, guard=Guard.start() if guard.action != "none" else None)
    return state, make_train_step(MODEL, optimizer, make_schedule(OPTIMIZER, 50), 0.01, 0, guard=guard, **more)


def _spoilt(state: TrainState, name: str, value: float) -> TrainState:
    return dataclasses.replace(state, parameters={**state.parameters, name: state.parameters[name].at[1].multiply(value)})


def _copy(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)


def _assert_same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_statistics_and_verdicts_are_those_of_numpy() -> None:
    config, values = GuardConfig(action="skip", threshold=4.0, warmup=5, decay=0.8, patience=2), np.random.default_rng(0).normal(3.0, 0.2, (40, 2))
    values[20], values[21, 1], values[30, 0] = 9.0, np.nan, 7.0
    guard, mean, variance, applied, skipped = Guard.start(), np.zeros(2), np.zeros(2), 0, 0
    for loss, norm in values:
        verdict, guard = judge(guard, config, jnp.float32(loss), jnp.float32(norm))
        z = ((np.array([loss, norm]) - mean) / np.maximum(np.sqrt(variance), 0.01 * abs(mean))).max() if applied >= 5 else 0.0
        z = z if np.isfinite([loss, norm]).all() else np.inf
        np.testing.assert_allclose(verdict.z, z, rtol=1e-3, atol=1e-4)
        assert bool(verdict.applies) == (z <= 4)
        if z <= 4:
            share = max(1 / (applied + 1), 0.2)
            off = np.array([loss, norm]) - mean
            mean, variance, applied = mean + share * off, (1 - share) * (variance + share * off**2), applied + 1
        else:
            skipped += 1
    assert (int(guard.applied), int(guard.skipped)) == (applied, skipped) == (37, 3)
    np.testing.assert_allclose(guard.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(guard.variance, variance, rtol=1e-4)


@pytest.mark.parametrize("value", [30.0, np.nan])
def test_a_spike_that_is_skipped_leaves_all_but_the_step_as_it_was_and_the_run_goes_on(value: float) -> None:
    state, step = _make(GuardConfig(action="skip", warmup=3, threshold=5.0))
    for i in range(6):
        state, metrics = step(state, *_batch(i))
        assert bool(metrics["applied"])
    bad = _spoilt(state, "token_table", 1.0)
    bad = dataclasses.replace(bad, parameters={**bad.parameters, "norm.scale": bad.parameters["norm.scale"] * value})
    before = _copy(bad)
    after, metrics = step(bad, *_batch(6))
    assert not bool(metrics["applied"]) and float(metrics["z"]) > 5
    _assert_same((after.parameters, after.optimizer), (before.parameters, before.optimizer))
    assert (int(after.step), int(after.guard.skipped), int(after.guard.in_a_row)) == (7, 1, 1)
    mended = dataclasses.replace(after, parameters={**after.parameters, "norm.scale": jnp.ones(12)})
    mended, metrics = step(mended, *_batch(7))
    assert bool(metrics["applied"]) and (int(mended.step), int(mended.guard.in_a_row)) == (8, 0)


@pytest.mark.parametrize(("config", "steps"), [(GuardConfig(), 1), (GuardConfig(action="stop"), 1), (GuardConfig(action="skip", patience=3), 3)])
def test_a_run_that_has_ended_on_the_device_stays_as_it_is(config: GuardConfig, steps: int) -> None:
    state, step = _make(config)
    state, _ = step(state, *_batch())
    good = jnp.copy(state.parameters["norm.scale"])
    state = dataclasses.replace(state, parameters={**state.parameters, "norm.scale": good * np.nan})
    for _ in range(steps):
        assert int(state.step) >= 0
        state, _ = step(state, *_batch())
    assert int(state.step) == -(1 + steps), "negative: the number of the step that ended it"
    state = dataclasses.replace(state, parameters={**state.parameters, "norm.scale": good})
    before = _copy(state)
    for _ in range(2):
        state, metrics = step(state, *_batch())
        assert not bool(metrics["applied"])
    _assert_same(state, before)


def test_the_guard_holds_no_second_copy_of_the_state() -> None:
    sizes = []
    for guard in (GuardConfig(), GuardConfig(action="skip")):
        state, step = _make(guard)
        memory = step.lower(state, *_batch()).compile().memory_analysis()
        assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        sizes.append(memory.temp_size_in_bytes)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(state.parameters))
    assert sizes[1] - sizes[0] < largest


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("blocks.mlp.up.w", np.nan, "before the step blocks.mlp.up.w of block 1 is not finite; the first output that is not finite is that of block 1's mlp"),
        ("blocks.mixer.out.w", np.inf, "blocks.mixer.out.w of block 1 is not finite; the first output that is not finite is that of block 1's mixer"),
        ("blocks.mlp_norm.scale", 3e38, "the first output that is not finite is that of block 1's mlp"),
        ("norm.scale", np.nan, "before the step norm.scale is not finite; the first output that is not finite is that of the final norm"),
        ("token_table", 1.0, "without dropout all is finite$"),
    ],
)
def test_a_diagnosis_names_the_first_layer(name: str, value: float, words: str, accumulation: int) -> None:
    state = init_state(MODEL, make_optimizer(OPTIMIZER, 50, SKELETON), 0)
    leaf = state.parameters[name]
    state = dataclasses.replace(state, parameters={**state.parameters, name: leaf.at[1].set(leaf[1] * value)})
    config = Config(model=MODEL, train=TrainConfig(batch_size=4, accumulation=accumulation))
    assert re.search(words, diagnose(config, SKELETON, state, *_batch()))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_diagnosis_names_the_rows_that_an_input_spoils(accumulation: int) -> None:
    """A token whose row of the table overflows, in rows 1 and 3 of four."""
    state = init_state(MODEL, make_optimizer(OPTIMIZER, 50, SKELETON), 0)
    table = state.parameters["token_table"].at[60].set(3e38)
    state = dataclasses.replace(state, parameters={**state.parameters, "token_table": table, "norm.scale": jnp.full(12, 1e3)})
    inputs_BT, targets_BT = (jnp.minimum(ids, 59) for ids in _batch())
    config = Config(model=MODEL, train=TrainConfig(batch_size=4, accumulation=accumulation, loss_chunk=6))
    inputs_BT = inputs_BT.at[1, 4].set(60).at[3, 8].set(60)
    words = diagnose(config, SKELETON, dataclasses.replace(state, parameters={**state.parameters, "norm.scale": jnp.zeros(12)}), inputs_BT, targets_BT)
    assert "the loss is not finite in 2 of the batch's 4 rows (1, 3)" in words, words
