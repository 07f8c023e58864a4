"""The form of the weights that decodes fastest is the same function as the plain one. Letters: R rows, I inputs, O outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import prompt, tiny

from gpt2jax.decoding import weights
from gpt2jax.model.linear import Linear


@pytest.mark.parametrize("rows", [1, 2, 5, 32, 33])
def test_the_turned_product_is_the_product(rows: int) -> None:
    x_RI, w_OI = jax.random.normal(jax.random.key(0), (rows, 7)), jax.random.normal(jax.random.key(1), (11, 7))
    np.testing.assert_allclose(jax.jit(weights.turned_product)(x_RI, w_OI), np.asarray(x_RI) @ np.asarray(w_OI).T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("inputs", "outputs"), [((6,), (10,)), ((6,), (2, 3, 5)), ((3, 4), (7,))])
def test_a_turned_linear_is_the_linear(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    axes = (None,) * 3
    linear = Linear(jax.random.key(2), inputs, outputs, input_axes=axes[: len(inputs)], output_axes=axes[: len(outputs)], std=1.0, dtype=jnp.dtype("float32"))
    linear.b[...] = jax.random.normal(jax.random.key(3), outputs)
    x = jax.random.normal(jax.random.key(4), (2, 9, *inputs))
    got = jax.jit(weights.TurnedLinear(linear).__call__)(x)
    assert got.shape == (2, 9, *outputs)
    np.testing.assert_allclose(got, linear(x), rtol=1e-5, atol=1e-5)


def test_every_linear_map_of_every_block_is_turned_and_the_model_is_left_alone() -> None:
    model = tiny()
    before = jax.tree.leaves(model)
    turned = weights.prepare(model, turned=True)
    for block in turned.blocks:
        parts = (block.mixer.query, block.mixer.key_value, block.mixer.out, block.mlp.up, block.mlp.down)
        assert [type(part) for part in parts] == [weights.TurnedLinear] * 5
    assert all(a is b for a, b in zip(before, jax.tree.leaves(model), strict=True))
    tokens_BT = jnp.asarray([prompt(21), prompt(21, seed=1)])
    np.testing.assert_allclose(turned.padded_logits(turned.hidden(tokens_BT))[..., :257], model(tokens_BT), rtol=1e-4, atol=1e-4)


def test_logits_are_the_models_own() -> None:
    model, hidden_BD = tiny(), jax.random.normal(jax.random.key(5), (3, 12))
    got = jax.jit(weights.logits)(model, hidden_BD)
    np.testing.assert_allclose(got, model.padded_logits(hidden_BD), rtol=1e-5, atol=1e-5)
    assert np.isneginf(got[:, 257:]).all()


def test_the_fast_path_really_runs() -> None:
    """On a CPU, with two rows or more, no product of the loop has the order that makes XLA pack the weights first."""
    assert weights.turns_weights(2) and not weights.turns_weights(1)
    model = weights.prepare(tiny(), turned=True)
    step = jax.jit(lambda block, x: block.mlp(x)).lower(model.blocks[0], jnp.zeros((5, 1, 12))).as_text()
    products = [line for line in step.splitlines() if "dot_general" in line]
    assert len(products) == 2 and all("(tensor<20x12xf32>, tensor<12x5xf32>)" in line or "(tensor<12x20xf32>, tensor<20x5xf32>)" in line for line in products)
    assert step.count("LayoutConstraint") == 4


def test_bfloat16_keeps_the_plain_form() -> None:
    assert type(weights.prepare(tiny(compute_dtype="bfloat16"), turned=True).blocks[0].mlp.up) is Linear
