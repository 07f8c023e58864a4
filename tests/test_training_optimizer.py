"""Schedules, decayed leaves, each optimizer against its formula, Muon's matrices, the average of weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gpt2jax.config import ModelConfig, OptimizerConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters
from gpt2jax.training.optimizer import Averaged, decay_mask, gradient_point, make_optimizer, make_schedule, muon_matrices

CONFIG = ModelConfig(vocab_size=11, n_positions=9, n_layer=3, n_head=2, n_embd=6)


def test_schedule_warms_up_then_follows_a_cosine() -> None:
    schedule = make_schedule(OptimizerConfig(warmup_steps=4, final_fraction=0.1), steps=24)
    np.testing.assert_allclose([schedule(s) for s in range(5)], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(schedule(14), 0.55, rtol=1e-6)  # half of the way down
    np.testing.assert_allclose([schedule(24), schedule(99)], [0.1, 0.1], rtol=1e-6)


def test_schedule_can_end_before_or_after_the_run() -> None:
    long = make_schedule(OptimizerConfig(warmup_steps=4, decay_steps=24), steps=1000)
    short = make_schedule(OptimizerConfig(warmup_steps=4), steps=24)
    assert [float(long(s)) for s in range(30)] == [float(short(s)) for s in range(30)]
    assert float(make_schedule(OptimizerConfig(warmup_steps=100), steps=10)(9)) <= 1.0


def test_the_other_schedules_after_the_warm_up() -> None:
    options: dict[str, Any] = dict(warmup_steps=4, final_fraction=0.2, decay_fraction=0.25)
    shares = {name: [float(make_schedule(OptimizerConfig(schedule=name, **options), 24)(s)) for s in range(31)] for name in ("constant", "linear", "wsd")}
    for values in shares.values():
        np.testing.assert_allclose(values[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(shares["constant"][4:], 1.0)
    np.testing.assert_allclose(shares["linear"][4:], [max(1 - 0.8 * i / 20, 0.2) for i in range(27)], rtol=1e-5)
    # a quarter of 24 steps decays: from step 18 to step 24
    np.testing.assert_allclose(shares["wsd"][4:], [min(1.0, max(1 - 0.8 * (s - 18) / 6, 0.2)) for s in range(4, 31)], rtol=1e-5)


def test_decay_pulls_on_exactly_the_matrices() -> None:
    decayed = {name for name, pulled in decay_mask(abstract_model(CONFIG)).items() if pulled}
    assert decayed == {
        "token_table", "position.table", "blocks.mixer.query.w", "blocks.mixer.key_value.w", "blocks.mixer.out.w", "blocks.mlp.up.w", "blocks.mlp.down.w",
    }  # fmt: skip


def test_one_adamw_step_equals_the_formula() -> None:
    config = OptimizerConfig(learning_rate=0.01, warmup_steps=0, weight_decay=0.2, clip_norm=0.5, beta1=0.9, beta2=0.95, eps=1e-8)
    parameters = named_parameters(GPT2(CONFIG, jax.random.key(0)))
    gradients = {name: jax.random.normal(jax.random.key(i), p.shape) for i, (name, p) in enumerate(parameters.items())}
    optimizer = make_optimizer(config, 10, abstract_model(CONFIG))
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in gradients.values()))
    for name, decay in decay_mask(abstract_model(CONFIG)).items():
        g = np.asarray(gradients[name]) * (0.5 / norm)
        expected = -0.01 * (g / (np.abs(g) + 1e-8) + (0.2 * np.asarray(parameters[name]) if decay else 0.0))
        np.testing.assert_allclose(updates[name], expected, rtol=2e-4, atol=1e-7, err_msg=name)


def _two_updates(config: OptimizerConfig) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], Any]:
    """(parameters, gradients and updates of two steps at the same parameters, the state behind them), float64 but for the state."""
    parameters = named_parameters(GPT2(CONFIG, jax.random.key(0)))
    draw = lambda step: {name: jax.random.normal(jax.random.key(i + 99 * step), p.shape) for i, (name, p) in enumerate(parameters.items())}  # noqa: E731
    gradients, updates = [draw(0), draw(1)], []
    optimizer = make_optimizer(config, 10, abstract_model(CONFIG))
    state = optimizer.init(parameters)
    for each in gradients:
        moves, state = optimizer.update(each, state, parameters)
        updates.append(moves)
    double = lambda tree: {name: np.asarray(leaf, np.float64) for name, leaf in tree.items()}  # noqa: E731
    return double(parameters), list(map(double, gradients)), list(map(double, updates)), state


PLAIN: dict[str, Any] = dict(learning_rate=0.01, warmup_steps=0, schedule="constant", weight_decay=0.2, clip_norm=None)


def test_two_lion_steps_equal_the_formula() -> None:
    parameters, gradients, updates, _ = _two_updates(OptimizerConfig(name="lion", beta1=0.9, beta2=0.99, **PLAIN))
    for name, decay in decay_mask(abstract_model(CONFIG)).items():
        first, second = (each[name] for each in gradients)
        pull = 0.2 * parameters[name] * decay
        np.testing.assert_allclose(updates[0][name], -0.01 * (np.sign(first) + pull), rtol=1e-5, atol=1e-8, err_msg=name)
        np.testing.assert_allclose(updates[1][name], -0.01 * (np.sign(0.9 * 0.01 * first + 0.1 * second) + pull), rtol=1e-5, atol=1e-8, err_msg=name)


def test_two_sgd_steps_equal_the_formula() -> None:
    parameters, gradients, updates, _ = _two_updates(OptimizerConfig(name="sgd", beta1=0.8, **PLAIN))
    for name, decay in decay_mask(abstract_model(CONFIG)).items():
        first, second = (each[name] for each in gradients)
        for got, momentum in zip(updates, (first, 0.8 * first + second), strict=True):
            np.testing.assert_allclose(got[name], -0.01 * (momentum + 0.2 * parameters[name] * decay), rtol=1e-5, atol=1e-8, err_msg=name)


def test_two_adafactor_steps_of_unfactored_weights_equal_the_formula() -> None:
    parameters, gradients, updates, _ = _two_updates(OptimizerConfig(name="adafactor", **PLAIN))
    for name, decay in decay_mask(abstract_model(CONFIG)).items():
        first, second = (each[name] for each in gradients)
        keep = 1 - 2**-0.8  # the decay of second moments is 1 - t^-0.8 at step t = 1, 2, ...
        for got, gradient, moment in ((updates[0], first, first**2), (updates[1], second, keep * first**2 + (1 - keep) * second**2)):
            move = gradient / np.sqrt(moment)
            move /= max(1.0, np.sqrt((move**2).mean()))
            np.testing.assert_allclose(got[name], -0.01 * (move + 0.2 * parameters[name] * decay), rtol=1e-4, atol=1e-7, err_msg=name)


def test_adafactor_keeps_rows_and_columns_of_each_large_matrix() -> None:
    """GPT-2's query, key and value weights have an axis of heads of 64, and biases none that is worth it."""
    skeleton = abstract_model(ModelConfig.preset("gpt2"))
    parameters = named_parameters(skeleton)
    state = jax.eval_shape(make_optimizer(OptimizerConfig(name="adafactor"), 10, skeleton).init, parameters)
    numbers = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    small = sum(leaf.size for name, leaf in parameters.items() if not decay_mask(skeleton)[name])
    assert small < numbers(state) < small + 300_000 < 0.004 * numbers(parameters)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "adafactor", "sgd"])
def test_each_optimizer_decays_matrices_alone(name: str) -> None:
    """Without a gradient there is nothing but the decay."""
    skeleton = abstract_model(CONFIG)
    parameters = jax.tree.map(jnp.ones_like, named_parameters(GPT2(CONFIG, jax.random.key(0))))
    optimizer = make_optimizer(OptimizerConfig(name=name, matrix_learning_rate=0.01, **PLAIN), 10, skeleton)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, parameters), optimizer.init(parameters), parameters)
    decayed = {leaf: dims is not None for leaf, dims in muon_matrices(skeleton).items()} if name == "muon" else decay_mask(skeleton)
    for leaf, decay in decayed.items():
        np.testing.assert_allclose(updates[leaf], -0.002 * decay, rtol=1e-5, err_msg=leaf)


def test_the_average_follows_the_weights_that_are_trained() -> None:
    """Against AdamW alone, whose weights after each step are averaged by hand: a tenth of what was is kept, two elevenths, a fifth."""
    parameters = named_parameters(GPT2(CONFIG, jax.random.key(0)))
    skeleton = abstract_model(CONFIG)
    alone, average = (make_optimizer(OptimizerConfig(ema_decay=decay, **PLAIN), 10, skeleton) for decay in (None, 0.2))
    state, averaged_state, trained, kept = alone.init(parameters), average.init(parameters), parameters, parameters
    want = {name: np.asarray(leaf, np.float64) for name, leaf in parameters.items()}
    assert all(leaf is not averaged_state.trained[name] for name, leaf in parameters.items()), "both are donated"
    for step in range(4):
        gradients = jax.tree.map(lambda p, step=step: jnp.sin(p * 99 + step), trained)
        updates, state = alone.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
        updates, averaged_state = average.update(gradients, averaged_state, kept)
        kept = optax.apply_updates(kept, updates)
        keep = min(0.2, (1 + step) / (10 + step))
        want = {name: keep * before + (1 - keep) * np.asarray(trained[name]) for name, before in want.items()}
    assert isinstance(averaged_state, Averaged)
    for name, leaf in trained.items():
        np.testing.assert_allclose(gradient_point(kept, averaged_state)[name], leaf, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(kept[name], want[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert gradient_point(parameters, state) is parameters


def test_muon_takes_each_layers_matrices_and_makes_them_orthogonal() -> None:
    skeleton = abstract_model(CONFIG)
    matrices = {name: dims for name, dims in muon_matrices(skeleton).items() if dims is not None}
    assert {name: tuple(dims) for name, dims in matrices.items()} == {
        "blocks.mixer.query.w": ((1,), (2, 3)),
        "blocks.mixer.key_value.w": ((1,), (3, 4)),
        "blocks.mixer.out.w": ((1, 2), (3,)),
        "blocks.mlp.up.w": ((1,), (2,)),
        "blocks.mlp.down.w": ((1,), (2,)),
    }
    parameters = named_parameters(GPT2(CONFIG, jax.random.key(0)))
    gradients = {name: jax.random.normal(jax.random.key(i), p.shape) for i, (name, p) in enumerate(parameters.items())}
    optimizer = make_optimizer(OptimizerConfig(name="muon", weight_decay=0.0, warmup_steps=0, matrix_learning_rate=1.0, clip_norm=None), 10, skeleton)
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    for layer in range(3):
        keys_6x6 = np.asarray(updates["blocks.mixer.key_value.w"])[layer, :, 0].reshape(6, 6)
        singular = np.linalg.svd(keys_6x6, compute_uv=False)
        assert 0.5 < singular.min() and singular.max() < 1.5  # Newton-Schulz with Muon's coefficients ends within about [0.7, 1.2]
    assert optax.tree.norm(updates["norm.scale"]) < 0.01  # AdamW at its own rate of 6e-4
