"""Smaller weights, and the form that decodes fastest, which is the same function as the plain one. Letters: R rows, I inputs, O outputs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import prompt, tiny
from flax import nnx

from gpt2jax.decoding import weights
from gpt2jax.errors import InputError
from gpt2jax.model.cache import KV, DecodeState
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.linear import Linear, QuantizedLinear, QuantizedTable
from gpt2jax.model.parameters import named_parameters


def linear_of(inputs: tuple[int, ...], outputs: tuple[int, ...], dtype: str = "float32") -> Linear:
    axes = (None,) * 3
    linear = Linear(jax.random.key(2), inputs, outputs, input_axes=axes[: len(inputs)], output_axes=axes[: len(outputs)], std=1.0, dtype=jnp.dtype(dtype))
    linear.b[...] = jax.random.normal(jax.random.key(3), outputs)
    return linear


SHAPES = pytest.mark.parametrize(("inputs", "outputs"), [((6,), (10,)), ((6,), (2, 3, 5)), ((3, 4), (7,))])


@pytest.mark.parametrize("rows", [1, 2, 5, 32, 33])
def test_the_turned_product_is_the_product(rows: int) -> None:
    x_RI, w_OI = jax.random.normal(jax.random.key(0), (rows, 7)), jax.random.normal(jax.random.key(1), (11, 7))
    np.testing.assert_allclose(jax.jit(weights.turned_product)(x_RI, w_OI), np.asarray(x_RI) @ np.asarray(w_OI).T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
def test_the_int8_product_is_the_product_with_the_matrix_written_out(rows: int) -> None:
    """Rows of very different sizes, and one of zeros; the error is that of 16-bit activations at most, and the weights are exact."""
    x_RI = jax.random.normal(jax.random.key(0), (rows, 37)) * 10.0 ** jnp.arange(-3, rows - 3)[:, None].clip(-30, 5)
    x_RI = x_RI.at[-1].set(0.0) if rows > 1 else x_RI
    w_OI = jax.random.randint(jax.random.key(1), (11, 37), -127, 128, jnp.int8)
    got, want = jax.jit(weights.int8_product)(x_RI, w_OI), np.asarray(x_RI, np.float64) @ np.asarray(w_OI, np.float64).T
    bound = np.abs(x_RI).max(1, keepdims=True) / 64_000 * np.abs(np.asarray(w_OI, int)).sum(1)
    assert (np.abs(got - want) <= bound + 1e-6 * np.abs(want).max(1, keepdims=True)).all()


@pytest.mark.parametrize(("rows", "inputs"), [(1, 128), (3, 160), (8, 768), (2, 3072)])
def test_sums_of_int8_products_are_the_product(rows: int, inputs: int) -> None:
    """Also where every product is the largest there is: no sum overflows."""
    x_RI = jax.random.normal(jax.random.key(0), (rows, inputs)) * 10.0 ** jnp.arange(-3, rows - 3)[:, None]
    x_RI = jnp.where(jnp.arange(rows)[:, None] == rows - 1, 3.0, x_RI)
    w_OI = jax.random.randint(jax.random.key(1), (11, inputs), -127, 128, jnp.int8).at[4].set(127)
    assert weights._parts(x_RI, w_OI) >= 4 and inputs % (32 * weights._parts(x_RI, w_OI)) == 0
    got, want = jax.jit(weights.int8_product)(x_RI, w_OI), np.asarray(x_RI, np.float64) @ np.asarray(w_OI, np.float64).T
    bound = np.abs(x_RI).max(1, keepdims=True) / 64_000 * np.abs(np.asarray(w_OI, int)).sum(1)
    assert (np.abs(got - want) <= bound + 1e-6 * np.abs(want).max(1, keepdims=True)).all()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_do_not_vanish_in_rounding(broken: float) -> None:
    x_RI = jnp.ones((2, 128)).at[0, 77].set(broken)
    y_RO = np.asarray(weights.int8_product(x_RI, jnp.ones((11, 128), jnp.int8)))
    assert not np.isfinite(y_RO[0]).any() and (np.abs(y_RO[1] - 128) < 1e-2).all()


@pytest.mark.parametrize(("rows", "inputs"), [(1, 128), (3, 768), (5, 768), (33, 128), (1, 37)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bfloat16_product_is_the_product(rows: int, inputs: int, dtype: str) -> None:
    """Of activations in either dtype: float32 ones are not rounded to bfloat16, whose error would be some 1e-3."""
    x_RI, w_OI = jax.random.normal(jax.random.key(0), (rows, inputs), dtype), jax.random.normal(jax.random.key(1), (11, inputs), jnp.bfloat16)
    got, want = jax.jit(weights.bfloat16_product)(x_RI, w_OI), np.asarray(x_RI, np.float64) @ np.asarray(w_OI, np.float64).T
    assert (weights._parts(x_RI, w_OI) > 0) == (rows <= 4 and inputs >= 128) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("product", "dtype", "calls"), [(weights.int8_product, "int8", 2), (weights.bfloat16_product, "bfloat16", 1)])
def test_sums_read_the_weights_as_they_lie(product: Callable[..., jax.Array], dtype: str, calls: int) -> None:
    """XLA keeps the calls, and writes nothing of the weights' size: its only whole-matrix operand is the parameter itself."""
    text = jax.jit(product).lower(jnp.ones((1, 768)), jnp.ones((23, 768), dtype)).compile().as_text()
    kept = [line for line in text.splitlines() if " call(" in line and 'inlineable="false"' in line]
    assert len(kept) == calls, text
    outside = [line for line in text.splitlines() if line.startswith("  ") and " fusion(" in line]
    assert outside and not any(re.search(r"= \w+\[23,(768|2,12,32)\]", line) for line in outside), text


@SHAPES
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_turned_linear_is_the_linear(kind: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    plain = linear_of(inputs, outputs, "bfloat16" if kind == "bfloat16" else "float32")
    linear = QuantizedLinear(plain) if kind == "int8" else plain
    x = jax.random.normal(jax.random.key(4), (2, 9, *inputs))
    got, want = jax.jit(weights.TurnedLinear(linear).__call__)(x), linear(x)
    assert (got.shape, got.dtype) == (want.shape, want.dtype) == ((2, 9, *outputs), plain.dtype)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 5e-4}[kind]
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=tolerance, atol=tolerance)


@SHAPES
def test_a_quantised_linear_rounds_each_output_to_its_own_scale(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    linear = linear_of(inputs, outputs)
    linear.w[...] = (linear.w[...] * 10.0 ** jnp.arange(np.prod(outputs)).reshape(outputs)).at[..., -1].set(0.0)
    small, over = QuantizedLinear(linear), tuple(range(len(inputs)))
    w, scale = np.asarray(linear.w[...]), np.asarray(small.scale[...])
    assert small.w[...].dtype == jnp.int8 and scale.shape == outputs and small.w.axes == linear.w.axes
    assert (np.abs(np.asarray(small.w[...], np.float32) * scale - w) <= 0.5001 * scale).all()
    assert (np.abs(np.asarray(small.w[...], int)).max(over)[w.any(over)] == 127).all(), "the largest weight of each output has the largest integer"
    x = jax.random.normal(jax.random.key(4), (9, *inputs))
    want = np.tensordot(np.asarray(x, np.float64), np.asarray(small.w[...], np.float64) * scale, len(inputs)) + np.asarray(small.b[...])
    np.testing.assert_allclose(small(x), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_every_linear_map_of_every_block_is_turned_and_the_model_is_left_alone() -> None:
    model = tiny()
    before = jax.tree.leaves(model)
    turned = weights.prepare(model, turned=True)
    for block in turned.blocks:
        parts = (block.mixer.query, block.mixer.key_value, block.mixer.out, block.mlp.up, block.mlp.down)
        assert [type(part) for part in parts] == [weights.TurnedLinear] * 5
    assert all(a is b for a, b in zip(before, jax.tree.leaves(model), strict=True)) and not hasattr(model, "turned_head")
    tokens_BT = jnp.asarray([prompt(21), prompt(21, seed=1)])
    np.testing.assert_allclose(turned(tokens_BT), model(tokens_BT), rtol=1e-4, atol=1e-4)


def make(kind: str) -> GPT2:
    """float32, bfloat16 (of weights), int8, or a model that computes in bfloat16."""
    return tiny(compute_dtype="bfloat16") if kind == "compute" else weights.quantize(tiny(), kind)


KINDS = pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "compute"])


@KINDS
@pytest.mark.parametrize("turned", [True, False])
def test_logits_are_the_models_own(kind: str, turned: bool) -> None:
    model = make(kind)
    hidden_BD = jax.random.normal(jax.random.key(5), (3, 12)).astype(model.config.compute_dtype)
    got = jax.jit(weights.logits)(weights.prepare(model, turned=turned), hidden_BD)
    np.testing.assert_allclose(got[:, :257], model.padded_logits(hidden_BD)[:, :257], rtol=1e-5, atol={"int8": 3e-4, "bfloat16": 1e-4}.get(kind, 1e-5))
    assert got.dtype == jnp.float32 and np.isneginf(got[:, 257:]).all()


@KINDS
def test_decoding_follows_the_ordinary_forward(kind: str) -> None:
    """Prefill and steps of the prepared model, against `model(tokens)` of the stacked one."""
    model, tokens_BT = make(kind), jnp.asarray([prompt(24), prompt(24, seed=1)])
    want, ready = model(tokens_BT), weights.prepare(model, turned=True)
    length_B = jnp.array([21, 21])
    hidden_BD, state = jax.jit(lambda model: model.prefill(tokens_BT[:, :21], length_B, slots=32, recent=4))(ready)
    got = [weights.logits(ready, hidden_BD)]
    step = jax.jit(lambda model, tokens_BT, state: model.step(tokens_BT, state))
    for t in range(21, 24):
        hidden_BTD, state = step(ready, tokens_BT[:, t : t + 1], state)
        got.append(weights.logits(ready, hidden_BTD[:, 0]))
    error = jnp.abs(jnp.stack(got, 1)[..., :257] - want[:, 20:]).max() / jnp.abs(want).max()
    assert error < {"float32": 1e-5, "bfloat16": 1e-5, "int8": 2e-3, "compute": 0.2}[kind]


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "int8"])
def test_a_quantised_model_is_an_ordinary_model_of_rounded_weights(weights_dtype: str) -> None:
    model, tokens_BT = tiny(), jnp.asarray([prompt(24), prompt(24, seed=1)])
    small = weights.quantize(model, weights_dtype)
    dtypes = {name: leaf.dtype.name for name, leaf in named_parameters(small).items() if not name.endswith((".b", ".scale", ".bias"))}
    assert dtypes.pop("position.table") == "float32" and set(dtypes.values()) == {weights_dtype} and len(dtypes) == 6
    assert all(leaf.dtype == jnp.float32 for name, leaf in named_parameters(small).items() if name.endswith((".b", ".scale", ".bias")))
    np.testing.assert_allclose(small(tokens_BT), small.unstack()(tokens_BT), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(weights.quantize(model.unstack(), weights_dtype)(tokens_BT), small.unstack()(tokens_BT))
    table = small.token_table[...].astype(jnp.float32)
    assert jnp.abs(table - model.token_table[...]).max() < jnp.abs(table).max() / 200
    assert small.padded_logits(jnp.ones((3, 12))).shape == (3, 320)
    difference = jnp.abs(small(tokens_BT) - model(tokens_BT)).max()
    assert 0 < difference, "something was rounded"


def test_the_padding_rows_of_an_int8_table_stay_zero() -> None:
    table = weights.quantize(tiny(), "int8").token_table
    assert isinstance(table, QuantizedTable) and not table[...][257:].any() and jnp.isfinite(table[...]).all()


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(InputError, match="weights_dtype='int4' is unknown; choose one of float32, bfloat16, int8"):
        weights.quantize(tiny(), "int4")
    with pytest.raises(InputError, match="int8 already"):
        weights.quantize(weights.quantize(tiny(), "int8"), "float32")


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_the_fast_path_really_runs(kind: str) -> None:
    """On a CPU no product of the loop has the order that makes XLA pack the weights first, and none writes an int8 matrix out."""
    assert weights.turns_weights() and weights.turns_weights()
    model = weights.prepare(weights.quantize(tiny(), kind), turned=True)
    assert model.turned_head.w_OI[...].dtype == kind
    step = jax.jit(lambda block, x: block.mlp(x)).lower(model.blocks[0], jnp.zeros((5, 1, 12))).as_text()
    products = [line for line in step.splitlines() if "dot_general" in line]
    assert len(products) == 2
    if kind == "int8":
        assert all("xi8>, tensor<" in line and line.count("xi8>") == 2 for line in products)
    else:
        assert all("(tensor<20x12xf32>, tensor<12x5xf32>)" in line or "(tensor<12x20xf32>, tensor<20x5xf32>)" in line for line in products)
        assert step.count("LayoutConstraint") == 4


def test_processors_with_bfloat16_products_keep_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are bfloat16 already, whatever the model computes in, and all weights of a model that computes in bfloat16."""
    x_RI, w_OI = jax.random.normal(jax.random.key(0), (1, 7)), jax.random.normal(jax.random.key(1), (11, 7))
    kept = {"float32": w_OI.astype(jnp.bfloat16), "bfloat16": w_OI}
    for flags, dtype in ((frozenset({"avx512_bf16"}), jnp.bfloat16), (frozenset(), jnp.float32)):
        monkeypatch.setattr(weights, "cpu_flags", lambda flags=flags: flags)
        for compute_dtype, w in kept.items():
            turned = weights.Turned(w, None, jnp.dtype(compute_dtype))
            assert turned.w_OI[...].dtype == dtype
            np.testing.assert_allclose(turned(x_RI), x_RI @ w_OI.T, rtol=2e-2, atol=5e-2)
    assert weights.Turned(w_OI, None, jnp.dtype("float32")).w_OI[...].dtype == jnp.float32


CACHE_ERRORS = {"float32": 1e-6, "bfloat16": 2e-2, "int8": 3e-2}  # this model's weights are large: a trained one has a tenth of these


@pytest.mark.parametrize("cache_dtype", weights.CACHE_DTYPES)
def test_a_cache_of_another_dtype(cache_dtype: str) -> None:
    """Prefill, a step, a commit, growth and another step: the state keeps its structure, and logits stay near those of the cache in the compute dtype."""
    (want, _), (got, state) = after_each_step(None), after_each_step(cache_dtype)
    assert {leaf.dtype.name for leaf in (state.frozen[0].k, state.frozen[1].v)} == {cache_dtype} and state.live[0].k.dtype == jnp.float32
    if cache_dtype == "int8":
        assert state.frozen[0].k_scale.shape == (2, 3, 64) and state.frozen[0].k_scale.dtype == jnp.float32
    np.testing.assert_array_equal(got[0], want[0], "the prompt itself is attended in the compute dtype")
    errors = np.abs(got - want).max((1, 2))[1:] / np.abs(want).max()
    assert (errors < CACHE_ERRORS[cache_dtype]).all() and (errors == 0).all() == (cache_dtype == "float32")


@functools.cache
def after_each_step(cache_dtype: str | None) -> tuple[np.ndarray, DecodeState]:
    tokens_BT, length_B = jnp.asarray([prompt(23), prompt(23, seed=1)]), jnp.array([21, 19])
    model = weights.prepare(tiny(), turned=False, cache_dtype=cache_dtype)
    hidden_BD, state = jax.jit(lambda model: model.prefill(tokens_BT[:, :21], length_B, slots=32, recent=3))(model)
    out = [model.padded_logits(hidden_BD)]
    step = jax.jit(lambda model, tokens_BT, state: model.step(tokens_BT, state))
    for t in (21, 22):
        hidden_BTD, new = step(model, tokens_BT[:, t : t + 1], state)
        assert jax.tree.map(shape_and_dtype, new) == jax.tree.map(shape_and_dtype, state)
        out.append(model.padded_logits(hidden_BTD[:, 0]))
        state = model.grow(model.commit(new), 64)
    return np.stack(out)[..., :257], state


def shape_and_dtype(leaf: jax.Array) -> tuple[tuple[int, ...], str]:
    return leaf.shape, leaf.dtype.name


def test_keys_and_values_in_int8_have_a_scale_for_each_slot_of_each_head() -> None:
    k, v = (jax.random.normal(jax.random.key(i), (2, 3, 5, 4)) * 10.0 ** jnp.arange(30).reshape(2, 3, 5, 1) for i in range(2))
    kept = KV(k, v.at[1, 2, 4].set(0.0)).kept_in("int8")
    for x, scale, old in ((kept.k, kept.k_scale, k), (kept.v, kept.v_scale, v.at[1, 2, 4].set(0.0))):
        assert x.dtype == jnp.int8 and scale.shape == (2, 3, 5)
        assert (np.abs(x * scale[..., None] - old) <= np.abs(old).max(-1, keepdims=True) / 253).all()


def test_cache_dtypes_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(InputError, match="cache_dtype='int4' is unknown; choose one of float32, bfloat16, int8"):
        weights.prepare(tiny(), turned=False, cache_dtype="int4")

    class Recurrent(nnx.Module):
        pass

    model = tiny().unstack()
    for block in model.blocks:
        block.mixer = Recurrent()
    with pytest.raises(InputError, match="cache_dtype='int8': the state of Recurrent has one dtype only"):
        weights.prepare(model, turned=False, cache_dtype="int8")
