"""The mixture of experts: against transformers, the losses of its router, the bias that evens loads, capacity, and experts spread over devices.

Letters as in golden/make_moe.py; L layers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.folders import GOLDEN
from golden.make_moe import CASES, Arrays, D, E, F, K, answer, inputs

from gpt2jax.config import ModelConfig, OptimizerConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.moe import BIAS, MoE, Routing, load_metrics, rebalanced, routing_loss
from gpt2jax.model.parameters import abstract_model
from gpt2jax.training.objective import summed_loss, summed_loss_and_loads
from gpt2jax.training.optimizer import OPTIMIZERS, make_optimizer, make_schedule
from gpt2jax.training.step import init_state, make_train_step

ROOT = Path(__file__).parent.parent
TINY: dict[str, Any] = dict(vocab_size=31, vocab_multiple=8, n_positions=8, n_layer=2, n_head=2, n_embd=8, n_inner=6, mlp="moe", moe_experts=4, moe_top_k=2)


def config_of(name: str, **changes: Any) -> ModelConfig:
    sizes = dict(n_layer=1, n_head=2, n_embd=D, n_inner=F, vocab_size=11, mlp="moe", moe_experts=E, moe_top_k=K)
    return ModelConfig(**{**sizes, **CASES[name].ours, **changes})


def module_of(name: str, arrays: Arrays, **changes: Any) -> MoE:
    """Our module with transformers' weights, which are [out, in], an expert's gate before its up."""
    module = MoE(config_of(name, **changes), jax.random.key(0))

    def fill(parameter: Any, value: np.ndarray[Any, Any]) -> None:
        assert parameter.shape == value.shape
        parameter[...] = jnp.asarray(value)

    fill(module.router.w, arrays["gate.weight"].T)
    fill(module.gate_up.w, arrays["experts.gate_up_proj"].reshape(E, 2, F, D).transpose(0, 3, 1, 2))
    fill(module.down.w, arrays["experts.down_proj"].transpose(0, 2, 1))
    if module.router.bias is not None:
        fill(module.router.bias, arrays["gate.e_score_correction_bias"])
    if module.shared is not None:
        fill(module.shared.gate_up.w, np.stack([arrays[f"shared_experts.{part}_proj.weight"].T for part in ("gate", "up")], 1))
        fill(module.shared.down.w, arrays["shared_experts.down_proj.weight"].T)
    return module


def stored(name: str) -> Arrays:
    with np.load(GOLDEN / "moe.npz") as file:
        return {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}


def error(name: str, arrays: Arrays, y: np.ndarray[Any, Any], **changes: Any) -> float:
    found = module_of(name, arrays, **changes)(jnp.asarray(arrays["x"]))[0]
    assert found.shape == y.shape and found.dtype == np.float32
    return float(np.abs(found - y).max() / np.abs(y).max())


@pytest.mark.parametrize("name", CASES)
def test_the_block_equals_transformers(name: str) -> None:
    arrays = stored(name)
    assert error(name, arrays, arrays["y"]) <= 1e-5
    assert error(name, arrays, arrays["y"], moe_capacity=float(E)) <= 1e-5, "nothing is over a capacity of all tokens"


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_the_block_equals_transformers_live(name: str) -> None:
    pytest.importorskip("transformers")
    arrays = inputs(name, seed=5)
    assert error(name, arrays, answer(name, arrays)["y"]) <= 1e-5


WRONG = [
    ("mixtral", dict(moe_norm_topk_prob=False)), ("olmoe", dict(moe_norm_topk_prob=True)), ("mixtral", dict(moe_router="sigmoid")),
    ("deepseek", dict(moe_routed_scaling_factor=2.4)), ("deepseek", dict(moe_bias_rate=None)), ("deepseek groups", dict(moe_groups=1, moe_topk_groups=1)),
    ("deepseek groups", dict(moe_topk_groups=3)), ("mixtral", dict(moe_top_k=2)), ("mixtral", dict(moe_capacity=0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=str)
def test_a_wrong_setting_is_seen(name: str, wrong: dict[str, Any]) -> None:
    assert error(name, stored(name), stored(name)["y"], **wrong) > 1e-3


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "olmoe"])
def test_the_balance_loss_is_that_of_transformers_over_k_and_leaves_padding_out(name: str) -> None:
    """transformers' is K where loads are even; this one 1."""
    arrays, config = stored(name), config_of(name, moe_balance_loss=1.0)
    module, x = module_of(name, arrays), jnp.asarray(arrays["x"])
    N = x.shape[0] * x.shape[1]
    got = routing_loss(config, jax.tree.map(lambda leaf: leaf[None], module(x)[1]))
    np.testing.assert_allclose(got / N * K, arrays["aux"], rtol=1e-5)
    padded = jnp.pad(x, ((0, 1), (0, 3), (0, 0)), constant_values=9.0)
    real = jnp.pad(jnp.ones(x.shape[:2], bool), ((0, 1), (0, 3)))
    for masks in ((real, None), (None, real)):
        for a, b in zip(module(padded, *masks)[1], module(x)[1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_losses_of_even_and_known_routing() -> None:
    config = ModelConfig(**{**TINY, "moe_balance_loss": 0.5, "moe_z_loss": 0.25})
    even = Routing(jnp.full((2, 4), 5.0), jnp.full((2, 4), 2.5), jnp.array([20.0, 40.0]))
    np.testing.assert_allclose(routing_loss(config, even), 10 * 0.5 + 0.25 * 30, rtol=1e-6)  # 10 tokens
    np.testing.assert_allclose([*load_metrics(jnp.array([[8.0, 0, 0, 0], [2, 2, 2, 2]])).values()], [4, 0, 0])
    np.testing.assert_array_equal(rebalanced(jnp.zeros((1, 4)), jnp.array([[4.0, 0, 2, 2]]), 0.1), np.float32([[-0.1, 0.1, 0, 0]]))


def test_experts_beyond_their_capacity_drop_the_last_tokens() -> None:
    """All tokens are alike and go to the same experts: the first C get an answer, the rest 0, and padding takes no place."""
    module, full = (MoE(ModelConfig(**{**TINY, "moe_capacity": c}), jax.random.key(0)) for c in (1.0, 4.0))
    x, valid = jnp.ones((2, 4, 8)), jnp.array([[False, True, True, True], [True] * 4])
    want = full(x)[0][0, 0]
    y = module(x, valid)[0]  # C = 8 x 2 / 4
    for i, row in enumerate(y.reshape(-1, 8)):
        np.testing.assert_allclose(row, want if i in (1, 2, 3, 4) else 0 * want, rtol=1e-5, atol=1e-9)


def _batch() -> tuple[jax.Array, jax.Array]:
    tokens = np.random.default_rng(1).integers(0, 31, (4, 9)).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[0, 3:] = -1  # micro-batches of unlike weight
    return jnp.asarray(tokens[:, :-1]), jnp.asarray(targets)


def _step(config: ModelConfig, optimizer: OptimizerConfig, number: int, steps: int = 1) -> tuple[Any, Any]:
    made = make_optimizer(optimizer, 9, abstract_model(config))
    step = make_train_step(config, made, make_schedule(optimizer, 9), 0.1, 0, accumulation=number)
    state, measured = init_state(config, made, 0), {}
    for _ in range(steps):
        state, measured = step(state, *_batch())
    return state, measured


def test_a_step_weighs_micro_batches_by_their_targets() -> None:
    """The gradient norm of a step in two micro-batches is that of the sum of their totals over all targets; loads are those of both."""
    config = ModelConfig(**TINY, moe_bias_rate=0.01, moe_z_loss=0.1)
    model, (inputs_BT, targets_BT) = GPT2(config, jax.random.key(0)), _batch()
    parts = [(inputs_BT[i::2], targets_BT[i::2]) for i in range(2)]
    gradient = jax.jit(jax.grad(lambda model: sum(summed_loss(model, *part)[0] for part in parts) / (targets_BT >= 0).sum()))(model)
    want = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
    state, measured = _step(config, OptimizerConfig(), 2)
    np.testing.assert_allclose(measured["grad_norm"], want, rtol=1e-5)
    total, loss, loads = summed_loss_and_loads(model, inputs_BT, targets_BT)
    assert total > loss and loads is not None
    np.testing.assert_array_equal(loads.sum(-1), [2 * int((targets_BT >= 0).sum())] * 2)
    np.testing.assert_array_equal(state.parameters[BIAS], rebalanced(jnp.zeros((2, 4)), loads, 0.01))
    np.testing.assert_allclose(measured["moe_load_max"], load_metrics(loads)["moe_load_max"], rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_moves_or_decays_the_bias(name: str) -> None:
    """Three steps: a bias moves by its rate alone, in the average of the weights too."""
    config = ModelConfig(**TINY, moe_bias_rate=2**-10)
    state, _ = _step(config, OptimizerConfig(name=name, weight_decay=0.5, ema_decay=0.9 if name == "adamw" else None), 1, steps=3)
    moves = np.asarray(state.parameters[BIAS]) * 2**10
    np.testing.assert_array_equal(moves, np.round(moves))
    assert np.abs(moves).max() >= 1
    if name == "adamw":
        np.testing.assert_array_equal(state.optimizer.trained[BIAS], state.parameters[BIAS])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(mlp="gelu", moe_experts=4), "moe_experts=4 has no meaning with model.mlp=gelu"),
        (dict(moe_top_k=9), "moe_top_k=9 is more than the model.moe_experts=8"),
        (dict(moe_groups=3), "moe_groups=3 does not divide model.moe_experts=8; the nearest that does is 2"),
        (dict(moe_groups=4, moe_topk_groups=5), "moe_topk_groups=5 must be from 1.* to model.moe_groups=4"),
        (dict(moe_groups=8, moe_topk_groups=1), "moe_topk_groups=1 must be from 2"),
        (dict(mlp_bias=True), "experts have no biases"),
        (dict(activation_function="relu"), "activation_function=relu does not go with model.mlp=moe"),
    ],
    ids=str,
)
def test_choices_that_do_not_go_together_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**{"mlp": "moe", **changes})


#: Runs on 8 devices: loss, gradients and loads of one model, whole and with its experts, their columns, and rows spread.
SPREAD = """
import jax, jax.numpy as jnp, numpy as np
from gpt2jax.config import ModelConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_named, named_parameters
from gpt2jax.parallel.mesh import parameter_shardings
from gpt2jax.training.objective import summed_loss_and_loads

tokens = np.random.default_rng(0).integers(0, 31, (8, 9)).astype(np.int32)
targets = np.where(tokens[:, 1:] == 3, -1, tokens[:, 1:])

def run(model):
    def loss(model):
        total, _, loads = summed_loss_and_loads(model, jnp.asarray(tokens[:, :-1]), jnp.asarray(targets))
        return total / 64, loads
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(model)

for capacity in (None, 1.0):
    model = GPT2(ModelConfig(vocab_size=31, vocab_multiple=8, n_positions=8, n_layer=2, n_head=2, n_embd=8, n_inner=6, mlp="moe", moe_experts=4, moe_top_k=3,
                             moe_shared=1, moe_z_loss=0.1, moe_capacity=capacity, initializer_range=0.5), jax.random.key(0))
    (loss, loads), gradient = run(model)
    for sizes in (dict(expert=4, tensor=2), dict(data=2, expert=2, sequence=2), dict(fsdp=2, expert=4)):
        names = ("data", "fsdp", "expert", "sequence", "tensor")
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape([sizes.get(name, 1) for name in names]), names)
        with jax.set_mesh(mesh):
            places = parameter_shardings(model, mesh)
            spread = map_named(lambda name, leaf: jax.device_put(leaf, places[name]), model)
            w = spread.blocks.mlp.gate_up.w
            assert w.addressable_shards[0].data.shape[1] == 4 // sizes["expert"]
            (spread_loss, spread_loads), spread_gradient = run(spread)
        np.testing.assert_allclose(spread_loss, loss, rtol=1e-5)
        np.testing.assert_array_equal(spread_loads, loads)
        for (name, want), got in zip(named_parameters(gradient).items(), named_parameters(spread_gradient).values()):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(abs(want).max()), err_msg=f"{sizes} {capacity} {name}")
"""


@pytest.mark.slow
def test_experts_on_eight_devices_are_those_of_one() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    result = subprocess.run([sys.executable, "-c", SPREAD], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


def test_a_run_is_logged_saved_and_decoded(tiny_options: list[str], tmp_path: Path) -> None:
    """Loads are in every line of metrics, the bias is in the checkpoint, the loss falls, and int8 experts decode as they compute."""
    from gpt2jax.config import load_config
    from gpt2jax.decoding.generate import generate
    from gpt2jax.decoding.weights import quantize
    from gpt2jax.loading import load
    from gpt2jax.training.loop import train
    from gpt2jax.training.metrics import read_metrics

    options = [*tiny_options, "--model.mlp=moe", "--model.moe_experts=3", "--model.moe_bias_rate=0.001", "--optimizer.learning_rate=0.01", "--train.remat=dots"]
    assert train(load_config(None, options)) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05
    for line in lines:
        assert 0 <= line["moe_load_min"] <= 1 <= line["moe_load_max"] <= 3 / 2 and 0 < line["moe_load_entropy"] <= 1
    model, _ = load(tmp_path / "run")
    assert np.abs(model.blocks.mlp.router.bias[...]).max() > 5e-4
    small = quantize(model, "int8")
    assert small.blocks.mlp.gate_up.w.dtype == np.int8 and small.blocks.mlp.router.w.dtype == np.float32
    for decoded in (model, small):
        [result] = generate(decoded, [[5, 9, 14]], max_new_tokens=6, temperature=0, eos_token_id=None)
        logits_BTV = decoded(jnp.asarray([[5, 9, 14, *result.tokens]]))
        for i, token in enumerate(result.tokens):
            assert float(logits_BTV[0, 2 + i, token]) >= float(logits_BTV[0, 2 + i].max()) - 1e-5
