"""Data parallel: 1 device and 8 train alike; a batch that cannot be shared is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

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
