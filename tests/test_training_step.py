"""The step: it learns, donates, draws fresh dropout, and is a function of state and batch alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.config import ModelConfig, OptimizerConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import TrainState, init_state, make_train_step

CONFIG = ModelConfig(vocab_size=13, n_positions=9, n_layer=2, n_head=2, n_embd=6)


def _make(config: ModelConfig = CONFIG, seed: int = 0, rate: float = 0.01):
    optimizer_config = OptimizerConfig(learning_rate=rate, warmup_steps=2)
    optimizer = make_optimizer(optimizer_config, 40, abstract_model(config))
    step = make_train_step(config, optimizer, make_schedule(optimizer_config, 40), rate, seed)
    return init_state(config, optimizer, seed), step


def _batch(length: int = 7) -> tuple[jax.Array, jax.Array]:
    ids = jax.random.randint(jax.random.key(5), (3, length + 1), 0, CONFIG.vocab_size)
    return ids[:, :-1], ids[:, 1:]


def test_forty_steps_on_one_batch_learn_it() -> None:
    state, step = _make(rate=0.03)
    losses = []
    for _ in range(40):
        state, metrics = step(state, *_batch())
        losses.append(float(metrics["loss"]))
    assert abs(losses[0] - np.log(13)) < 0.1
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.step) == 40
    assert step._cache_size() == 1


def test_the_old_state_is_donated() -> None:
    state, step = _make()
    old = state.parameters["token_table"]
    step(state, *_batch())
    assert old.is_deleted()


def test_initial_values_are_the_models_own_and_depend_on_the_seed() -> None:
    state, _ = _make(seed=4)
    expected = named_parameters(GPT2(CONFIG, jax.random.key(4)))
    assert expected.keys() == state.parameters.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(state.parameters[name], value, rtol=1e-6, atol=0)  # eager and compiled arithmetic may differ in the last bit
    assert not np.array_equal(state.parameters["token_table"], _make(seed=5)[0].parameters["token_table"])


def test_all_state_is_float32_but_the_counters() -> None:
    state, _ = _make(ModelConfig(**{**CONFIG.__dict__, "compute_dtype": "bfloat16"}))
    kinds = {str(jax.tree_util.keystr(path)): leaf.dtype for path, leaf in jax.tree.leaves_with_path(state)}
    assert {kind for name, kind in kinds.items() if leaf_is_counter(name)} == {jnp.dtype(jnp.int32)}
    assert {kind for name, kind in kinds.items() if not leaf_is_counter(name)} == {jnp.dtype(jnp.float32)}


def leaf_is_counter(name: str) -> bool:
    return name.endswith("step") or name.endswith("count")


def test_ignored_targets_are_left_out_of_the_update() -> None:
    inputs, targets = _batch()
    state, step = _make()
    after_masked, metrics = step(state, inputs, targets.at[:, 4:].set(-1))
    assert metrics["targets"] == 12
    state, step = _make()
    after_short, _ = step(state, inputs[:, :4], targets[:, :4])
    for name, value in after_short.parameters.items():
        if name != "position.table":
            np.testing.assert_allclose(after_masked.parameters[name], value, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("rate", ["embd_pdrop", "attn_pdrop", "resid_pdrop"])
def test_dropout_differs_from_step_to_step_and_repeats_with_the_seed(rate: str) -> None:
    config = ModelConfig(**{**CONFIG.__dict__, rate: 0.4})
    state, step = _make(config)
    frozen = jax.tree.map(jnp.copy, state)

    def loss_at(count: int) -> float:
        again = jax.tree.map(jnp.copy, frozen)
        return float(step(TrainState(jnp.int32(count), again.parameters, again.optimizer), *_batch())[1]["loss"])

    assert loss_at(0) != loss_at(1)
    assert loss_at(1) == loss_at(1)
    other = make_train_step(config, make_optimizer(OptimizerConfig(), 40, abstract_model(config)), lambda s: 1.0, 1.0, seed=9)
    again = jax.tree.map(jnp.copy, frozen)
    assert float(other(again, *_batch())[1]["loss"]) != loss_at(0)
