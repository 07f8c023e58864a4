"""Schedule, decayed leaves, AdamW against its formula, and Muon's matrices."""

from __future__ import annotations

import jax
import numpy as np
import optax

from gpt2jax.config import ModelConfig, OptimizerConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters
from gpt2jax.training.optimizer import decay_mask, make_optimizer, make_schedule, muon_matrices

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
