"""The loss: against a plain NumPy formula; ignored targets and padded ids count for nothing; blocks of tokens give what the whole gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.config import ModelConfig
from gpt2jax.model.gpt2 import GPT2, table_logits
from gpt2jax.training.objective import _chunked, mean_loss, summed_loss, token_losses

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


@pytest.mark.parametrize("chunk", [None, 4])
def test_documents_kept_apart_have_the_losses_they_have_alone(chunk: int | None) -> None:
    model, end = _model(), 0
    row = jnp.array([[3, 7, end, 5, 2, end, 8, 1, end]])  # the rest of one document, two whole ones, and the start of a fourth
    inputs, targets = row[:, :-1], row[:, 1:]
    pieces = [(0, 2), (2, 5), (5, 8)]
    alone = [summed_loss(model, inputs[:, a:b], targets[:, a:b])[1] for a, b in pieces]
    loss, gradients = jax.value_and_grad(lambda model: summed_loss(model, inputs, targets, chunk=chunk, separator=end)[0])(model)
    np.testing.assert_allclose(loss, sum(alone), rtol=1e-6)
    whole = jax.grad(lambda model: sum(summed_loss(model, inputs[:, a:b], targets[:, a:b])[0] for a, b in pieces))(model)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert abs(loss - summed_loss(model, inputs, targets, chunk=chunk)[0]) > 1e-3


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


def _z_by_hand(model: GPT2, inputs: jax.Array, targets: jax.Array) -> np.ndarray:
    logits = np.asarray(model(inputs), np.float64)
    return (np.log(np.exp(logits).sum(-1)) ** 2)[np.asarray(targets) >= 0].sum()


@pytest.mark.parametrize("chunk", [None, 4])
def test_z_loss_is_added_to_what_is_minimised_and_not_to_the_loss(chunk: int | None) -> None:
    inputs, targets = _batch()
    model, targets = jax.tree.map(lambda leaf: leaf * 9, _model()), targets.at[0, 2].set(-1)
    plain, _ = summed_loss(model, inputs, targets)
    total, loss = summed_loss(model, inputs, targets, chunk=chunk, z_loss=0.3)
    np.testing.assert_allclose(loss, plain, rtol=1e-6)
    np.testing.assert_allclose(total, plain + 0.3 * _z_by_hand(model, inputs, targets), rtol=1e-5)
    assert float(total) > float(plain) + 1


#: Rows x tokens = 3 x 7: one token a block, parts of a row (even and not), a row, two rows and one left over, all but one token.
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 15, 20])
def test_blocks_of_tokens_give_the_loss_and_the_gradients_of_the_whole(chunk: int) -> None:
    x, table = 5 * jax.random.normal(jax.random.key(0), (3, 7, 6)), jax.random.normal(jax.random.key(1), (16, 6))
    targets = _batch()[1].at[1, 2:].set(-100).at[2, 0].set(-1)

    def whole(x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = table_logits(x, table, 11)
        losses, counts = token_losses(logits, targets)
        return (losses.sum() + 0.3 * jnp.where(counts, jax.nn.logsumexp(logits, -1) ** 2, 0).sum()) / 7, losses.sum()

    def blocks(x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, loss = _chunked(x, table, targets, 11, "float32", chunk, 0.3)
        return total / 7, loss

    want, got = (jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(x, table) for f in (whole, blocks))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(jnp.abs(b).max()))
    assert (got[1][0][1, 2:] == 0).all() and (got[1][0][2, 0] == 0).all() and (got[1][1][11:] == 0).all()
    np.testing.assert_allclose(jax.jit(blocks)(x, table), got[0], rtol=1e-6)  # without a gradient


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_trains_in_blocks_as_in_one(tied: bool) -> None:
    inputs, targets = _batch()
    model = _model(ModelConfig(**{**CONFIG.__dict__, "tie_word_embeddings": tied}))
    gradient = lambda chunk: jax.jit(jax.value_and_grad(lambda m: mean_loss(m, inputs, targets, chunk=chunk)[0]))(model)  # noqa: E731
    for got, want in zip(jax.tree.leaves(gradient(4)), jax.tree.leaves(gradient(None)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_an_ignored_target_has_no_gradient_in_blocks() -> None:
    inputs, targets = _batch()
    model = _model()
    (loss, number), gradients = jax.value_and_grad(lambda m: mean_loss(m, inputs, jnp.full_like(targets, -1), chunk=4), has_aux=True)(model)
    assert loss == 0 and number == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def test_bfloat16_in_blocks_is_as_near_as_bfloat16_is() -> None:
    inputs, targets = _batch()
    half = GPT2(ModelConfig(**{**CONFIG.__dict__, "compute_dtype": "bfloat16"}), jax.random.key(3))
    want, got = (jax.grad(lambda m, c=chunk: mean_loss(m, inputs, targets, chunk=c)[0])(half) for chunk in (None, 4))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=0.02 * float(jnp.abs(b).max()))


@pytest.mark.usefixtures("optimised")
def test_all_logits_are_never_there_in_blocks() -> None:
    config = ModelConfig(vocab_size=1013, n_positions=64, n_layer=1, n_head=1, n_embd=2)
    tokens = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    model = jax.eval_shape(lambda: GPT2(config, jax.random.key(0)))

    def temporaries(chunk: int | None, tokens: jax.ShapeDtypeStruct) -> int:
        gradient = jax.jit(jax.grad(lambda m, i, t: mean_loss(m, i, t, chunk=chunk)[0]))
        return int(gradient.lower(model, tokens, tokens).compile().memory_analysis().temp_size_in_bytes)

    logits = 16 * 64 * 1024 * 4
    assert temporaries(None, tokens) > logits
    assert temporaries(32, tokens) < logits / 3


#: Runs on 8 devices. 5 x 12 tokens do not split evenly over rows of data, and lie whole there.
SPREAD = """
import jax, numpy as np
from gpt2jax.config import Config, MeshConfig, ModelConfig
from gpt2jax.model.gpt2 import GPT2, table_logits
from gpt2jax.parallel.mesh import parameter_shardings, training_mesh
from gpt2jax.model.parameters import map_named
from gpt2jax.training.objective import summed_loss

config = ModelConfig(vocab_size=61, vocab_multiple=8, n_positions=12, n_layer=1, n_head=4, n_embd=16, tie_word_embeddings=False)
model = GPT2(config, jax.random.key(1))

def run(model, tokens, chunk):
    def mean(model):
        total, loss = summed_loss(model, tokens[0], tokens[1], chunk=chunk, z_loss=0.1)
        return total / tokens.size, loss
    return jax.jit(jax.value_and_grad(mean, has_aux=True))(model)

every = [dict(data=2, tensor=4), dict(data=1, fsdp=2, sequence=2, tensor=2), dict(data=2, fsdp=2, expert=2), dict(data=1, sequence=4, fsdp=2)]
for rows, chunk, meshes in ((8, 2, every), (8, 5, every[1:2]), (5, 5, every[:1])):
    tokens = np.random.default_rng(rows).integers(-9, 61, (2, rows, 12)).astype(np.int32)
    tokens[0] = abs(tokens[0])
    want = run(model, tokens, None)
    for sizes in meshes:
        mesh = training_mesh(Config(model=config, mesh=MeshConfig(**sizes)))
        with jax.set_mesh(mesh):
            places = parameter_shardings(model, mesh)
            spread = map_named(lambda name, leaf: jax.device_put(leaf, places[name]), model)
            got = run(spread, tokens, chunk)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=f"{sizes} {rows} {chunk}")
"""


@pytest.mark.slow
def test_blocks_on_every_mesh_equal_the_whole_on_one_device() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    result = subprocess.run([sys.executable, "-c", SPREAD], cwd=Path(__file__).parent.parent, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
