"""The loss: against a plain NumPy formula; ignored targets and padded ids count for nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.config import ModelConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.training.objective import mean_loss, token_losses

CONFIG = ModelConfig(vocab_size=11, vocab_multiple=8, n_positions=9, n_layer=2, n_head=2, n_embd=6)


def _model(config: ModelConfig = CONFIG) -> GPT2:
    return GPT2(config, jax.random.key(3))


def _batch(rows: int = 3, length: int = 7) -> tuple[jax.Array, jax.Array]:
    ids = jax.random.randint(jax.random.key(5), (rows, length + 1), 0, CONFIG.vocab_size)
    return ids[:, :-1], ids[:, 1:]


def test_equals_the_formula_in_float64() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)) * 4
    targets = np.array([[0, 4, 1], [3, 2, 0]])
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, targets[..., None], -1)[..., 0])
    losses, counts = token_losses(jnp.asarray(logits, jnp.float32), jnp.asarray(targets))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert counts.all()


@pytest.mark.parametrize("ignored", [-1, -100])
def test_ignored_targets_give_no_loss_and_no_gradient(ignored: int) -> None:
    inputs, targets = _batch()
    masked = targets.at[1, 2:].set(ignored)
    model = _model()
    losses, counts = token_losses(model.padded_logits(model.hidden(inputs)), masked)
    assert (losses[1, 2:] == 0).all() and not counts[1, 2:].any()
    kept = np.asarray(token_losses(model.padded_logits(model.hidden(inputs)), targets)[0])[np.asarray(counts)]
    loss, number = mean_loss(model, inputs, masked)
    assert number == kept.size == 3 * 7 - 5
    np.testing.assert_allclose(loss, kept.mean(), rtol=1e-6)
    logits = jax.random.normal(jax.random.key(1), (3, 7, 16))
    gradient = jax.grad(lambda logits: token_losses(logits, masked)[0].sum())(logits)
    assert (gradient[1, 2:] == 0).all() and (jnp.abs(gradient[1, :2]).sum(-1) > 0).all()


def test_a_batch_of_ignored_targets_is_zero_and_not_nan() -> None:
    inputs, targets = _batch()
    (loss, number), gradients = jax.value_and_grad(lambda m: mean_loss(m, inputs, jnp.full_like(targets, -1)), has_aux=True)(_model())
    assert loss == 0 and number == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def test_padding_of_the_vocabulary_changes_neither_loss_nor_gradient() -> None:
    inputs, targets = _batch()
    padded = _model()
    unpadded = _model(ModelConfig(**{**CONFIG.__dict__, "vocab_multiple": 1}))
    assert padded.token_table.shape == (16, 6) and unpadded.token_table.shape == (11, 6)
    results = [jax.value_and_grad(lambda m: mean_loss(m, inputs, targets)[0])(model) for model in (padded, unpadded)]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    gradient_padded, gradient = results[0][1].token_table[...], results[1][1].token_table[...]
    np.testing.assert_allclose(gradient_padded[:11], gradient, atol=1e-6)
    assert (gradient_padded[11:] == 0).all()
