"""bfloat16 products on a CPU: each rounded once, gradients too, in forms that are fast; and what waits for the backward pass."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.config import ModelConfig, OptimizerConfig
from gpt2jax.kernels import product
from gpt2jax.kernels.platform import lowering_for
from gpt2jax.kernels.product import affine, on_one_cpu, pack, recomputed, sum_of_outer_products, unpack
from gpt2jax.model import linear
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters
from gpt2jax.training.objective import summed_loss
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import init_state, make_train_step

ROWS, INPUTS, OUTPUTS = 10, 7, 5


def _drawn(*shapes: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> list[jax.Array]:
    return [jax.random.normal(jax.random.fold_in(jax.random.key(0), i), shape).astype(dtype) for i, shape in enumerate(shapes)]


def _exact(*arrays: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in arrays]


@pytest.mark.parametrize("bias", [True, False])
def test_affine_rounds_once_and_its_gradients_are_float32(bias: bool) -> None:
    x_NI, dy_NO = _drawn((ROWS, INPUTS), (ROWS, OUTPUTS), dtype=jnp.bfloat16)
    w_IO, b_O = _drawn((INPUTS, OUTPUTS), (OUTPUTS,))
    y_NO, backward = jax.vjp(affine, x_NI, w_IO, b_O if bias else None)
    dx_NI, dw_IO, db_O = backward(dy_NO)
    assert (y_NO.dtype, dx_NI.dtype, dw_IO.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    x, w, dy = _exact(x_NI, w_IO.astype(jnp.bfloat16), dy_NO)
    half_ulp = 2.0**-8
    np.testing.assert_allclose(*_exact(y_NO), x @ w + (np.asarray(b_O) if bias else 0), rtol=half_ulp, atol=1e-6)
    np.testing.assert_allclose(*_exact(dx_NI), dy @ w.T, rtol=half_ulp, atol=1e-6)
    np.testing.assert_allclose(dw_IO, x.T @ dy, rtol=1e-5, atol=1e-6)
    if bias:
        np.testing.assert_allclose(db_O, dy.sum(0), rtol=1e-5, atol=1e-6)
    else:
        assert db_O is None


@pytest.mark.parametrize(("inputs", "outputs"), [(INPUTS, OUTPUTS), (OUTPUTS, INPUTS)])
def test_a_sum_of_outer_products(inputs: int, outputs: int) -> None:
    x_NI, y_NO = _drawn((ROWS, inputs), (ROWS, outputs), dtype=jnp.bfloat16)
    x, y = _exact(x_NI, y_NO)
    np.testing.assert_allclose(sum_of_outer_products(x_NI, y_NO), x.T @ y, rtol=1e-5, atol=1e-6)


def test_what_is_recomputed_equals_what_is_kept_and_only_the_arguments_are() -> None:
    [x] = _drawn((ROWS, INPUTS))
    scale = jnp.arange(1.0, INPUTS + 1)
    run = lambda scale, x: jnp.tanh(scale * jnp.sin(x)) * jnp.exp(x)  # noqa: E731
    y, backward = jax.vjp(recomputed(run), scale, x)
    plain, plain_backward = jax.vjp(run, scale, x)
    np.testing.assert_array_equal(y, plain)
    for ours, theirs in zip(backward(plain), plain_backward(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    kept = lambda f: sum(leaf.nbytes for leaf in jax.tree.leaves(f))  # noqa: E731
    assert kept(backward) == x.nbytes + scale.nbytes < kept(plain_backward)


def test_bits_come_back_and_only_one_cpu_packs() -> None:
    [x] = _drawn((ROWS, INPUTS), dtype=jnp.bfloat16)
    assert pack(x).dtype == jnp.uint16
    np.testing.assert_array_equal(unpack(pack(x)), x)
    assert pack(x.astype(jnp.float32)).dtype == jnp.float32
    with lowering_for("tpu"):
        assert pack(x).dtype == jnp.bfloat16 and not on_one_cpu()


def _model() -> ModelConfig:
    return ModelConfig(
        vocab_size=61, vocab_multiple=1, n_positions=24, n_layer=3, n_head=2, n_embd=16, n_inner=40, compute_dtype="bfloat16", attention_backend="flash"
    )


def _gradients(config: ModelConfig, dtype: str) -> dict[str, jax.Array]:
    import dataclasses

    parameters = named_parameters(GPT2(config, jax.random.key(1)))
    skeleton = abstract_model(dataclasses.replace(config, compute_dtype=dtype))
    tokens = np.random.default_rng(0).integers(0, 61, (5, 25))
    loss = lambda parameters: summed_loss(with_parameters(skeleton, parameters), tokens[:, :-1], tokens[:, 1:], chunk=32)[0] / 120  # noqa: E731
    return jax.jit(jax.grad(loss))(parameters)


def test_a_models_gradient_is_as_near_to_float32_as_the_plain_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(gradients: dict[str, jax.Array]) -> float:
        return float(np.sqrt(sum(((gradients[name] - exact[name]) ** 2).sum() for name in exact) / sum((leaf**2).sum() for leaf in exact.values())))

    exact = _gradients(_model(), "float32")
    ours = error(_gradients(_model(), "bfloat16"))
    for module in (product, linear):
        monkeypatch.setattr(module, "on_one_cpu", lambda: False)
    monkeypatch.setattr("gpt2jax.training.objective.on_one_cpu", lambda: False)
    plain = error(_gradients(_model(), "bfloat16"))
    assert 0 < ours < 1.1 * plain < 0.02


def test_the_step_keeps_no_wide_stacks_and_multiplies_nothing_slowly() -> None:
    """XLA widens stacked bfloat16 to float32, and multiplies in float32 what it has no fast form for: neither is in the compiled step."""
    config = _model()
    options = OptimizerConfig()
    optimizer = make_optimizer(options, 10, abstract_model(config))
    step = make_train_step(config, optimizer, make_schedule(options, 10), 1e-3, 0, loss_chunk=32)
    state = init_state(config, optimizer, 0)
    batch = jax.ShapeDtypeStruct((5, 24), jnp.int32)
    text = step.lower(state, batch, batch).compile().as_text()
    assert re.search(r"u16\[3,120,16\]", text) or re.search(r"u16\[3,5,24,16\]", text), "activations wait as bits"
    wide = re.findall(r"(?:f32|bf16)\[3,(?:120|5,24),(?:16|40)\]", text)
    assert not wide, wide
    products = [line for line in text.splitlines() if " dot(" in line]
    assert len(products) > 10
    for line in products:
        result = re.search(r"= (\w+)\[", line)
        batch = re.search(r"lhs_batch_dims=\{([\d,]*)\}", line)
        first_row = len(batch[1].split(",")) if batch else 0
        assert result and result[1] == "f32", line
        assert f"lhs_contracting_dims={{{first_row + 1}}}" in line, line
