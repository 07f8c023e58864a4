"""1 device and 8 train alike and decode alike; what does not fit the devices is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding_helpers import tiny

from gpt2jax.config import Config, MeshConfig, ModelConfig, load_config
from gpt2jax.errors import InputError
from gpt2jax.parallel.mesh import check_divisible, mesh_sizes, shard
from gpt2jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent


def _train(options: list[str], devices: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", os.devnull, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)})


def test_one_device_and_eight_train_alike(tiny_options: list[str], tmp_path: Path) -> None:
    losses = []
    for devices in (1, 8):
        run_dir = tmp_path / str(devices)
        result = _train([*tiny_options, "--train.batch_size=16", f"--run.dir={run_dir}"], devices)
        assert result.returncode == 0, result.stderr
        assert f"devices: {devices} x" in result.stdout
        losses.append([[line[key] for key in ("loss", "grad_norm")] for line in read_metrics(run_dir / "metrics.jsonl")])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_batch_that_cannot_be_shared_is_refused(tiny_options: list[str], tmp_path: Path) -> None:
    result = _train(tiny_options, 8)
    assert result.returncode == 2
    words = "train.batch_size=5 cannot be shared evenly by mesh data x fsdp x expert=8; make it a multiple of 8, or choose another mesh"
    assert result.stderr.splitlines() == [f"gpt2jax: error: {words}"]
    assert not (tmp_path / "run").exists()


#: Runs on 8 devices: 20 steps on each mesh, from the same seed and batches, against 1 device.
MESHES = """
import sys, jax, numpy as np
from gpt2jax.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from gpt2jax.model.parameters import abstract_model
from gpt2jax.parallel.mesh import place_rows, training_mesh
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import init_state, make_train_step, state_shardings

model = ModelConfig(vocab_size=61, vocab_multiple=8, n_positions=16, n_layer=2, n_head=4, n_embd=24, n_inner=40, kv_heads=2, position="rope", embd_pdrop=0.1)
tokens = np.random.default_rng(0).integers(0, 61, (20, 8, 17)).astype(np.int32)

def run(optimizer_config, **sizes):
    config = Config(model=model, mesh=MeshConfig(**sizes), train=TrainConfig(batch_size=8), optimizer=optimizer_config)
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1), ("data", "fsdp", "expert", "sequence", "tensor"))
    mesh = training_mesh(config) if sizes else one
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(config.optimizer, 20, abstract_model(model))
        shardings = state_shardings(model, optimizer, mesh)
        state = init_state(model, optimizer, 0, shardings)
        before = {name: np.asarray(leaf) for name, leaf in state.parameters.items()}
        step = make_train_step(model, optimizer, make_schedule(config.optimizer, 20), 0.01, 0, "none", shardings)
        lines = []
        for i in range(20):
            state, metrics = step(state, *place_rows(lambda rows: (tokens[i, rows, :-1], tokens[i, rows, 1:]), 8, 16, mesh))
            lines.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        assert step._cache_size() == 1, "the state lies after a step where it lay before"
    return before, lines, state

for optimizer in (OptimizerConfig(learning_rate=0.01, warmup_steps=3), OptimizerConfig(name="muon", learning_rate=0.01, warmup_steps=3)):
    before, lines, state = run(optimizer)
    meshes = [dict(data=8), dict(fsdp=8), dict(data=2, tensor=4), dict(fsdp=2, tensor=2), dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, sequence=2, tensor=2)]
    meshes = [{"data": 8 // int(np.prod(list(m.values()))), **m} for m in (meshes if optimizer.name == "adamw" else meshes[4:5])]
    for sizes in meshes:
        same_before, same_lines, same_state = run(optimizer, **sizes)
        for name, leaf in before.items():
            np.testing.assert_array_equal(same_before[name], leaf, err_msg=f"{sizes} {name}")
        np.testing.assert_allclose(same_lines, lines, rtol=1e-5, err_msg=str(sizes))
        for name, leaf in state.parameters.items():
            np.testing.assert_allclose(same_state.parameters[name], leaf, rtol=1e-4, atol=1e-5, err_msg=f"{sizes} {name}")
        up = same_state.parameters["blocks.mlp.up.w"]
        assert up.addressable_shards[0].data.size * sizes.get("fsdp", 1) * sizes.get("tensor", 1) == up.size, sizes
        moments = [leaf for leaf in jax.tree.leaves(same_state.optimizer) if leaf.shape == up.shape]
        assert moments and all(leaf.sharding == up.sharding for leaf in moments), sizes
"""


@pytest.mark.slow
def test_every_mesh_trains_as_one_device_does() -> None:
    """Initial values to the bit; loss, gradient norm and parameters over 20 steps; matrices and their moments are spread."""
    result = subprocess.run([sys.executable, "-c", MESHES], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"})
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("sizes", "model", "words"),
    [
        (dict(data=3), {}, "data=3 does not make 8 devices"),
        (dict(data=1, tensor=5), {}, "data=1 x tensor=5|tensor=5 does not make 8 devices"),
        (dict(tensor=4), dict(n_head=25, n_embd=100), "model.n_head=25 cannot be shared evenly by mesh tensor=4"),
        (dict(tensor=2), dict(vocab_size=257, vocab_multiple=1), "padded vocabulary=257 .* give a new run a larger model.vocab_multiple"),
        (dict(fsdp=8), dict(n_embd=12, n_head=3), "model.n_embd=12 cannot be shared evenly by mesh fsdp=8"),
        (dict(sequence=8), dict(n_positions=12), "train.sequence_length=12"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_is_named_before_anything_compiles(sizes: dict[str, int], model: dict[str, Any], words: str) -> None:
    config = Config(mesh=MeshConfig(**sizes), model=ModelConfig(**model))
    with pytest.raises(InputError, match=words):
        check_divisible(config, mesh_sizes(config.mesh, 8))


def test_one_axis_fills_and_sizes_are_checked() -> None:
    assert mesh_sizes(MeshConfig(), 8) == dict(data=8, fsdp=1, expert=1, sequence=1, tensor=1)
    assert mesh_sizes(MeshConfig(data=2, fsdp=-1, tensor=2), 8) == dict(data=2, fsdp=2, expert=1, sequence=1, tensor=2)
    for options, words in ((["--mesh.fsdp=-1"], "both -1"), (["--mesh.tensor=0"], "tensor=0 must be 1 or more"), (["--mesh.tensor=-2"], "mesh.tensor=-2")):
        with pytest.raises(InputError, match=words):
            load_config(None, options)


#: Runs on 8 devices. 4 heads and 20 MLP columns are spread over tensor = 4, 3 heads and 257 tokens are not; 4 rows are spread over data = 2, 3 rows are not.
DECODE = """
import jax
from decoding_helpers import prompt, tiny
from gpt2jax.decoding.generate import generate
from gpt2jax.decoding.loop import Decoder
from gpt2jax.decoding.prepared import prepared
from gpt2jax.parallel.mesh import shard

prompts = [prompt(1), prompt(7), prompt(30), prompt(12)]
for model, rows, heads in ((tiny(n_head=4, n_embd=24), prompts, 1), (tiny(), prompts[:3], 3)):
    spread = shard(model, data=2, tensor=4)
    assert spread.blocks.mlp.up.w.addressable_shards[0].data.shape == (2, model.config.n_embd, 5)
    decoder = Decoder(prepared(spread))
    decoder.prefill(rows)
    key = decoder.state.frozen[0].k
    assert key.addressable_shards[0].data.shape[:2] == (2 if len(rows) == 4 else 3, heads), key.sharding
    settings = dict(temperature=[0.0, 1.0, 0.8, 2.0][: len(rows)], seed=list(range(len(rows))), top_p=0.9, repetition_penalty=1.2)
    one, many = (generate(m, rows, max_new_tokens=40, eos_token_id=None, **settings) for m in (model, spread))
    assert one == many
"""


def test_one_device_and_eight_decode_alike() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    result = subprocess.run([sys.executable, "-c", DECODE], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    for sizes, words in ((dict(data=64, tensor=2), "data=64 x tensor=2 needs 128 devices"), (dict(tensor=0), "tensor=0 has no devices")):
        with pytest.raises(InputError, match=words):
            shard(tiny(), **sizes)
