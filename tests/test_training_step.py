"""The step: it learns, donates, draws fresh dropout, and is a function of state and batch alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gpt2jax.config import CheckpointConfig, Config, ModelConfig, OptimizerConfig, TrainConfig, load_config
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters
from gpt2jax.training.checkpoint import Checkpoints
from gpt2jax.training.objective import mean_loss
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import TrainState, check_accumulation, init_state, make_train_step

CONFIG = ModelConfig(vocab_size=13, n_positions=9, n_layer=2, n_head=2, n_embd=6)


def _make(config: ModelConfig = CONFIG, seed: int = 0, rate: float = 0.01, optimizer_config: OptimizerConfig | None = None, **options: Any):
    optimizer_config = optimizer_config or OptimizerConfig(learning_rate=rate, warmup_steps=2)
    optimizer = make_optimizer(optimizer_config, 40, abstract_model(config))
    step = make_train_step(config, optimizer, make_schedule(optimizer_config, 40), rate, seed, **options)
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


def _ragged(rows: int = 6, length: int = 7) -> tuple[jax.Array, jax.Array]:
    """Rows of which 7, 1, 0, 5, 2 and 6 targets count."""
    ids = jax.random.randint(jax.random.key(6), (rows, length + 1), 0, CONFIG.vocab_size)
    kept = jnp.arange(length) < jnp.array([7, 1, 0, 5, 2, 6])[:rows, None]
    return ids[:, :-1], jnp.where(kept, ids[:, 1:], -1)


@pytest.mark.parametrize("options", [dict(accumulation=2), dict(accumulation=6, loss_chunk=4, z_loss=0.1)], ids=str)
def test_micro_batches_step_as_one_batch_does(options: dict[str, Any]) -> None:
    """Two steps, so that the second's learning rate shows whether the schedule counted steps or micro-batches."""
    plain = {name: value for name, value in options.items() if name == "z_loss"}
    sgd = OptimizerConfig(learning_rate=0.01, warmup_steps=4, eps=1e-3)  # a larger eps: next to nothing divided by itself is noise
    (one, step), (many, micro) = (_make(optimizer_config=sgd, **each) for each in (plain, options))
    for _ in range(2):
        one, want = step(one, *_ragged())
        many, got = micro(many, *_ragged())
        for name in ("loss", "grad_norm", "lr", "targets"):
            np.testing.assert_allclose(got[name], want[name], rtol=1e-6, err_msg=name)
    assert got["targets"] == 21 and int(many.step) == 2
    np.testing.assert_allclose(got["lr"], 0.005)
    for name, value in one.parameters.items():
        np.testing.assert_allclose(many.parameters[name], value, atol=1e-6, err_msg=name)


def test_micro_batches_of_ignored_targets_alone_are_no_nan() -> None:
    state, step = _make(accumulation=3)
    inputs, targets = _ragged()
    state, metrics = step(state, inputs, jnp.full_like(targets, -100))
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert all(jnp.isfinite(leaf).all() for leaf in state.parameters.values())


def test_each_micro_batch_draws_its_own_dropout() -> None:
    config = dataclasses.replace(CONFIG, embd_pdrop=0.5)
    inputs, targets = _batch()
    state, step = _make(config, accumulation=2)
    model = GPT2(config, jax.random.key(0))
    key = jax.random.fold_in(jax.random.key(0), 0)
    losses = [float(mean_loss(model, inputs[:1], targets[:1], jax.random.fold_in(key, i))[0]) for i in range(2)]
    one = float(mean_loss(model, inputs[:1], targets[:1], key)[0])
    assert abs(losses[0] - losses[1]) > 1e-3 and abs(one - np.mean(losses)) > 1e-3
    np.testing.assert_allclose(step(state, inputs[jnp.array([0, 0])], targets[jnp.array([0, 0])])[1]["loss"], np.mean(losses), rtol=1e-5)


def test_micro_batches_that_do_not_split_the_batch_are_refused() -> None:
    with pytest.raises(InputError, match="train.batch_size=8 does not split into train.accumulation=3 micro-batches; make it a multiple of 3$"):
        load_config(None, ["--train.accumulation=3"])
    mesh = jax.sharding.AbstractMesh((2, 2, 1, 2, 1), ("data", "fsdp", "expert", "sequence", "tensor"))
    check_accumulation(Config(train=TrainConfig(batch_size=8, accumulation=2)), mesh)
    with pytest.raises(InputError, match="train.batch_size=8 cannot be shared evenly by 4 micro-batches .*; make it a multiple of 16$"):
        check_accumulation(Config(train=TrainConfig(batch_size=8, accumulation=4)), mesh)


def test_nothing_of_the_state_is_copied() -> None:
    """Each byte of the state that comes in is one of the state that goes out, the average's too."""
    for config in (OptimizerConfig(), OptimizerConfig(ema_decay=0.9), OptimizerConfig(name="adafactor")):
        state, step = _make(optimizer_config=config, accumulation=3)
        compiled = step.lower(state, *_batch()).compile()  # type: ignore[attr-defined]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert compiled.memory_analysis().alias_size_in_bytes == size


def test_gradients_are_taken_at_the_weights_that_are_trained_and_not_at_their_average() -> None:
    config = OptimizerConfig(learning_rate=0.03, warmup_steps=0)
    (alone, step), (average, averaged_step) = (_make(optimizer_config=each) for each in (config, dataclasses.replace(config, ema_decay=0.9)))
    for _ in range(4):
        alone, want = step(alone, *_batch())
        average, got = averaged_step(average, *_batch())
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)
    for name, leaf in alone.parameters.items():
        np.testing.assert_allclose(average.optimizer.trained[name], leaf, atol=1e-6, err_msg=name)
    assert jnp.abs(average.parameters["token_table"] - alone.parameters["token_table"]).max() > 1e-3


def test_a_checkpoint_holds_the_average_as_its_parameters_and_goes_on_from_both(tmp_path: Path) -> None:
    state, step = _make(optimizer_config=OptimizerConfig(ema_decay=0.9, learning_rate=0.03, warmup_steps=0))
    state, _ = step(state, *_batch())
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(state)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    restored = checkpoints.restore(_make(optimizer_config=OptimizerConfig(ema_decay=0.9), seed=1)[0])
    checkpoints.close()
    assert restored is not None
    after, before = (step(each, *_batch())[0] for each in (restored, state))
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.array_equal(after.parameters["token_table"], after.optimizer.trained["token_table"])


def test_offload_without_memory_to_offload_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(platform="toaster", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(InputError, match="^train.remat=offload needs pinned_host memory, and this toaster has device only; use train.remat=dots$"):
        make_train_step(CONFIG, optax.identity(), lambda s: 1.0, 1.0, 0, "offload")


def _from_nanogpt(weights: Any) -> dict[str, jax.Array]:
    """nanoGPT's state_dict by our names: 2 layers stacked, 3 heads of 4, its linear weights are [out, in], query, key and value are one."""
    stack = lambda name: np.stack([weights[f"transformer.h.{i}.{name}"] for i in range(2)])  # noqa: E731
    qkv_w, qkv_b = stack("attn.c_attn.weight").reshape(2, 3, 3, 4, 12), stack("attn.c_attn.bias").reshape(2, 3, 3, 4)
    named = {
        "token_table": weights["transformer.wte.weight"],
        "position.table": weights["transformer.wpe.weight"],
        "blocks.mixer.query.w": qkv_w[:, 0].transpose(0, 3, 1, 2),
        "blocks.mixer.query.b": qkv_b[:, 0],
        "blocks.mixer.key_value.w": qkv_w[:, 1:].transpose(0, 4, 1, 2, 3),
        "blocks.mixer.key_value.b": qkv_b[:, 1:],
        "blocks.mixer.out.w": stack("attn.c_proj.weight").transpose(0, 2, 1).reshape(2, 3, 4, 12),
        "blocks.mixer.out.b": stack("attn.c_proj.bias"),
        "norm.scale": weights["transformer.ln_f.weight"],
        "norm.bias": weights["transformer.ln_f.bias"],
    }
    for ours, theirs in (("mixer_norm", "ln_1"), ("mlp_norm", "ln_2")):
        named |= {f"blocks.{ours}.scale": stack(f"{theirs}.weight"), f"blocks.{ours}.bias": stack(f"{theirs}.bias")}
    for ours, theirs in (("up", "c_fc"), ("down", "c_proj")):
        named |= {f"blocks.mlp.{ours}.w": stack(f"mlp.{theirs}.weight").transpose(0, 2, 1), f"blocks.mlp.{ours}.b": stack(f"mlp.{theirs}.bias")}
    return {name: jnp.asarray(leaf) for name, leaf in named.items()}


def test_fifty_steps_have_nanogpts_loss_curve() -> None:
    """AdamW with its decay groups, clipping at 1, warm-up and cosine; see golden/make_nanogpt.py. Its warm-up is ours by W / (W + 1)."""
    golden = np.load(Path(__file__).parent / "golden" / "nanogpt.npz")
    config = ModelConfig(
        vocab_size=29, vocab_multiple=1, n_positions=10, n_layer=2, n_head=3, n_embd=12, activation_function="gelu", attention_backend="xla"
    )  # fmt: skip
    options = OptimizerConfig(learning_rate=1e-2, warmup_steps=7, decay_steps=40, final_fraction=0.1, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0)
    its_warmup = lambda step: jnp.where(step < 7, 7 / 8, 1.0)  # noqa: E731
    optimizer = optax.chain(make_optimizer(options, 50, abstract_model(config)), optax.scale_by_schedule(its_warmup))
    schedule = make_schedule(options, 50)
    step = make_train_step(config, optimizer, lambda count: schedule(count) * its_warmup(count), 1e-2, 0)
    parameters = _from_nanogpt(golden)
    state = TrainState(jnp.int32(0), parameters, optimizer.init(parameters))
    lines = []
    for batch in golden["tokens"].astype(np.int32):
        state, metrics = step(state, batch[:, :-1], batch[:, 1:])
        lines.append([float(metrics[name]) for name in ("loss", "grad_norm", "lr")])
    for got, name, tolerance in zip(np.transpose(lines), ("losses", "norms", "rates"), (1e-4, 1e-3, 1e-8), strict=True):
        np.testing.assert_allclose(got, golden[name], rtol=0, atol=tolerance, err_msg=name)


#: Runs on 8 devices: matrices of 128 and more, which adafactor factors.
SPREAD = """
import sys, jax, numpy as np
from gpt2jax.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from gpt2jax.model.parameters import abstract_model
from gpt2jax.parallel.mesh import place_rows, training_mesh
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import init_state, make_train_step, state_shardings

model = ModelConfig(vocab_size=250, vocab_multiple=64, n_positions=8, n_layer=2, n_head=4, n_embd=128, n_inner=192, resid_pdrop=0.1)
tokens = np.random.default_rng(0).integers(0, 250, (5, 16, 9)).astype(np.int32)
tokens[:, :, 5:] = np.where(np.arange(16)[:, None] % 3, tokens[:, :, 5:], -1)

def run(name, **sizes):
    options = OptimizerConfig(name=name, learning_rate=0.003, warmup_steps=2, ema_decay=0.5, eps=1e-4)
    config = Config(model=model, mesh=MeshConfig(**sizes), train=TrainConfig(batch_size=16), optimizer=options)
    axes = ("data", "fsdp", "expert", "sequence", "tensor")
    mesh = training_mesh(config) if sizes else jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1), axes)
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(options, 5, abstract_model(model))
        shardings = state_shardings(model, optimizer, mesh)
        state = init_state(model, optimizer, 0, shardings)
        step = make_train_step(model, optimizer, make_schedule(options, 5), 0.003, 0, "none", shardings, accumulation=2, loss_chunk=4, z_loss=1e-3)
        lines = []
        for i in range(5):
            batch = place_rows(lambda rows: (abs(tokens[i, rows, :-1]), tokens[i, rows, 1:]), 16, 8, mesh)
            state, metrics = step(state, *batch)
            lines.append([float(metrics[key]) for key in ("loss", "grad_norm", "targets")])
        assert step._cache_size() == 1
        size = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        assert step.lower(state, *batch).compile().memory_analysis().alias_size_in_bytes == size, "a part of the state is copied"
    return lines, state

for name in sys.argv[1:]:
    lines, state = run(name)
    spread_lines, spread = run(name, data=2, fsdp=2, tensor=2)
    np.testing.assert_allclose(spread_lines, lines, rtol=1e-5, err_msg=name)
    up = spread.parameters["blocks.mlp.up.w"]
    assert up.addressable_shards[0].data.size * 4 == up.size
    alike = [leaf for leaf in jax.tree.leaves(spread.optimizer) if leaf.shape == up.shape]
    assert len(alike) >= (1 if name == "adafactor" else 2) and all(leaf.sharding == up.sharding for leaf in alike), name
    off = np.concatenate([np.abs(np.asarray(spread.parameters[leaf]) - np.asarray(value)).ravel() for leaf, value in state.parameters.items()])
    # where a gradient is rounding alone (of a key's bias always), its sign (lion) or its quotient by its own size (adafactor) may be any
    allowed = 0.005 if name in ("lion", "adafactor") else 0
    assert (off > 2e-5).mean() <= allowed, (name, (off > 2e-5).mean(), off.max())
"""


@pytest.mark.slow
def test_each_optimizer_trains_spread_as_on_one_device() -> None:
    """With micro-batches, blocks of tokens, dropout, ignored targets and an average of the weights."""
    command = [sys.executable, "-c", SPREAD, "adamw", "muon", "lion", "adafactor", "sgd"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
