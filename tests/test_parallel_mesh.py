"""1 device and 8 train alike and decode alike; what does not fit the devices is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from decoding_helpers import tiny

from gpt2jax.errors import InputError
from gpt2jax.parallel.mesh import shard
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
    assert result.stderr.splitlines() == ["gpt2jax: error: train.batch_size=5 cannot be shared evenly by 8 devices; make it a multiple of 8"]
    assert not (tmp_path / "run").exists()


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
