"""Several processes on one machine train as one does, agree before they start, and end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt2jax.config import HostsConfig
from gpt2jax.errors import InputError
from gpt2jax.parallel import hosts
from gpt2jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent


def _start(options: list[str], count: int, *, devices: int = 1, timeout: int = 120, own: dict[int, list[str]] | None = None) -> list[subprocess.Popen[str]]:
    """`count` processes of one run; `own` are options of single ones."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "train.py",
        os.devnull,
        *options,
        f"--hosts.coordinator=127.0.0.1:{port}",
        f"--hosts.count={count}",
        f"--hosts.timeout={timeout}",
    ]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    return [
        subprocess.Popen([*command, f"--hosts.index={i}", *(own or {}).get(i, [])], cwd=ROOT, text=True, stdout=-1, stderr=-1, env=environment)  # pipes
        for i in range(count)
    ]


def _ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each, without Gloo's own lines."""
    ends = [(process, *process.communicate(timeout=300)) for process in processes]
    return [(process.returncode, "".join(line for line in out.splitlines(True) if "[Gloo]" not in line), err) for process, out, err in ends]


def _losses(run_dir: Path) -> list[list[float]]:
    return [[line[key] for key in ("loss", "grad_norm", "val_loss") if line[key] is not None] for line in read_metrics(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize(("count", "mesh"), [(2, "--mesh.fsdp=2"), pytest.param(4, "--mesh.tensor=3", marks=pytest.mark.slow)])
def test_several_processes_train_as_one(tiny_options: list[str], tmp_path: Path, count: int, mesh: str) -> None:
    """Two of 2 devices each with spread matrices; four of 3, whose heads are spread inside each. Only the first speaks, and each reads its own rows."""
    options = [*tiny_options, "--train.batch_size=16", "--model.vocab_size=258", "--model.vocab_multiple=6"]
    [alone] = _ends(_start([*options, f"--run.dir={tmp_path / 'one'}"], 1))
    assert alone[0] == 0, alone[2]
    devices = 2 if count == 2 else 3
    ends = _ends(_start([*options, mesh, f"--run.dir={tmp_path / 'many'}"], count, devices=devices))
    assert [status for status, _, _ in ends] == [0] * count, ends
    assert f"processes: {count}; mesh: " in ends[0][1] and f"reads {16 // count} of a batch's 16 rows (0-{16 // count - 1})" in ends[0][1]
    assert all(out == "" and "step" not in err for _, out, err in ends[1:]), "process 0 alone writes"
    for one, many in zip(_losses(tmp_path / "one"), _losses(tmp_path / "many"), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5)
    hashes = {line for out in (alone[1], ends[0][1]) for line in out.split("; ") if "sha256" in line}
    assert len({line.split("sha256 ")[1][:12] for line in hashes}) == 1, "the same global batch"


def test_hosts_that_disagree_are_named_and_nothing_is_written(tiny_options: list[str], tmp_path: Path) -> None:
    ends = _ends(_start([*tiny_options, "--train.batch_size=4"], 2, own={1: ["--train.seed=5"]}))
    for status, _, err in ends:
        assert status == 2
        assert "gpt2jax: error: the hosts disagree on the config: process 1 has another than process 0" in err
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_on_one_host_ends_all(tiny_options: list[str], tmp_path: Path) -> None:
    ends = _ends(_start([*tiny_options, "--train.batch_size=4"], 2, own={1: ["--data.source=nowhere/at/all"]}))
    assert [status for status, _, _ in ends] == [2, 2]
    assert "another host could not start" in ends[0][2] and "nowhere/at/all" in ends[1][2]
    assert not (tmp_path / "run").exists()


def test_a_missing_host_is_waited_for_and_named(tiny_options: list[str]) -> None:
    """Process 1 of 2 alone: nobody answers at the coordinator's address."""
    [_, alone] = _start(tiny_options, 2, timeout=3, own={0: ["--train.stepz=1"]})
    [(status, _, err)] = _ends([alone])
    assert status != 0 and ("did not come together at 127.0.0.1" in err or "DEADLINE_EXCEEDED" in err), err


def _wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"step {step}/"):
            return
    pytest.fail("the run ended before")


@pytest.mark.slow
def test_sigterm_at_one_host_stops_all_at_one_step(tiny_options: list[str], tmp_path: Path) -> None:
    options = [*tiny_options, "--train.batch_size=4", "--train.steps=100000", "--eval.every=0", "--checkpoint.every=0"]
    processes = _start(options, 2)
    _wait_for_step(processes[0], 3)
    processes[1].send_signal(signal.SIGTERM)
    ends = _ends(processes)
    assert [status for status, _, _ in ends] == [143, 143], ends
    assert "checkpoint saved" in ends[0][2]
    [saved] = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()]
    steps = saved + 2
    ends = _ends(_start([*options, "--run.resume=auto", f"--train.steps={steps}", "--optimizer.decay_steps=100000"], 2))
    assert ends[0][0] != 0 or f"going on from step {saved}" in ends[0][1]


@pytest.mark.slow
def test_a_host_that_dies_ends_the_run_with_a_message(tiny_options: list[str]) -> None:
    processes = _start([*tiny_options, "--train.batch_size=4", "--train.steps=100000", "--eval.every=0"], 2, timeout=20)
    _wait_for_step(processes[0], 3)
    processes[1].kill()
    [(status, _, err), _] = _ends(processes)
    assert status != 0
    assert "another host is gone" in err and "--run.resume=auto" in err, err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(count=2, index=0), "hosts.coordinator must be given too"),
        (dict(coordinator="a:1"), "hosts.count and hosts.index must be given too"),
        (dict(coordinator="a:1", count=2, index=2), "hosts.index=2 is not one of hosts.count=2"),
    ],
    ids=str,
)
def test_half_an_address_is_refused(given: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        hosts.join(HostsConfig(**given))  # type: ignore[arg-type]


def test_clusters_are_known_by_their_environment() -> None:
    for environment in ({"SLURM_STEP_NUM_TASKS": "4"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"TPU_WORKER_HOSTNAMES": "a,b"}, {"JAX_NUM_PROCESSES": "2"}):
        assert hosts._in_a_cluster(environment)
    for environment in ({}, {"SLURM_NTASKS": "4"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"TPU_WORKER_HOSTNAMES": "localhost"}, {"OMPI_COMM_WORLD_SIZE": ""}):
        assert not hosts._in_a_cluster(environment)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tiny_options: list[str], tmp_path: Path) -> None:
    """Two processes of 2 devices, one of 1, two again; a checkpoint that is spoilt meanwhile is passed over by both."""
    run_dir = tmp_path / "run"
    options = [
        *tiny_options,
        "--train.batch_size=16",
        "--model.vocab_size=258",
        "--model.vocab_multiple=6",
        "--checkpoint.keep=9",
        "--optimizer.decay_steps=12",
    ]
    for count, devices, steps, mesh in ((2, 2, 4, "--mesh.fsdp=2"), (1, 1, 8, "--mesh.fsdp=1"), (2, 2, 12, "--mesh.fsdp=2")):
        if steps == 12:  # step 8 is spoilt: both must go back to step 4
            (run_dir / "checkpoints" / "8" / "optimizer" / "_METADATA").write_text("garbage")
        ends = _ends(_start([*options, mesh, "--run.resume=auto", f"--train.steps={steps}"], count, devices=devices))
        assert [status for status, _, _ in ends] == [0] * count, ends
        assert steps == 4 or "going on from step 4" in ends[0][1]
        assert steps < 12 or "passed over the checkpoint" in ends[0][2]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["12", "4", "8", "broken-8"]
    [alone] = _ends(_start([*options, f"--run.dir={tmp_path / 'one'}"], 1))
    assert alone[0] == 0
    for one, many in zip(_losses(tmp_path / "one"), _losses(run_dir), strict=True):
        np.testing.assert_allclose(many[:2], one[:2], rtol=1e-5)
