"""A whole run: what it writes, how it ends, and that N + M steps equal N, kill -9, M bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt2jax.cli import main
from gpt2jax.config import load_config
from gpt2jax.data import TokenData
from gpt2jax.errors import InputError
from gpt2jax.training import loop
from gpt2jax.training.checkpoint import Checkpoints, load_model
from gpt2jax.training.loop import RunFailed, train
from gpt2jax.training.metrics import read_metrics
from gpt2jax.training.optimizer import make_optimizer
from gpt2jax.training.step import init_state

ROOT = Path(__file__).parent.parent
KEYS = ["step", "tokens", "loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "val_bits_per_byte", "mfu", "causal_mfu", "memory_bytes", "skipped"]


def _run(options: list[str], *more: str) -> int:
    return train(load_config(None, [*options, *more]))


def _state(run_dir: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, by path."""
    import jax

    from gpt2jax.model.parameters import abstract_model

    config = load_config(run_dir / "config.yaml")
    optimizer = make_optimizer(config.optimizer, config.train.steps, abstract_model(config.model))
    state = Checkpoints(run_dir, config.checkpoint).restore(init_state(config.model, optimizer, config.train.seed))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def _assert_same_run(a: Path, b: Path) -> None:
    state_a, state_b = _state(a), _state(b)
    assert state_a.keys() == state_b.keys()
    for name, value in state_a.items():
        np.testing.assert_array_equal(value, state_b[name], err_msg=name)
    measured = [[{k: v for k, v in line.items() if k != "tokens_per_s"} for line in read_metrics(d / "metrics.jsonl")] for d in (a, b)]
    assert measured[0] == measured[1]


def _run_and_die(options: list[str], patch: str) -> int:
    """A run in a process of its own, with `patch` executed first."""
    code = f"import os, signal, sys\n{patch}\nfrom gpt2jax.cli import main\nsys.exit(main(['train', os.devnull, *sys.argv[1:]]))"
    return subprocess.run([sys.executable, "-c", code, *options], cwd=ROOT, capture_output=True).returncode


@pytest.fixture
def dropout_options(tiny_options: list[str]) -> list[str]:
    return [*tiny_options, "--model.resid_pdrop=0.2", "--model.attn_pdrop=0.1", "--model.embd_pdrop=0.1"]


def test_a_run_writes_metrics_config_and_a_model_that_loads(tiny_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tiny_options, "--optimizer.learning_rate=0.01") == 0
    run_dir = tmp_path / "run"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(list(line) == KEYS for line in lines)
    assert [line["tokens"] for line in lines] == [5 * 24 * step for step in range(1, 13)]
    assert [line["step"] for line in lines if line["val_loss"] is not None] == [6, 12]
    assert lines[-1]["val_loss"] < lines[5]["val_loss"] < np.log(257)
    np.testing.assert_allclose(lines[-1]["val_bits_per_byte"] * np.log(2), lines[-1]["val_loss"], rtol=0.05)  # a byte a token, but for the ends of texts
    saved = load_config(run_dir / "config.yaml")
    assert saved.model.eos_token_id == 256 and saved.train.steps == 12
    model, tokenizer = load_model(run_dir)
    assert tokenizer is not None and model.config == saved.model
    printed = capsys.readouterr().out
    assert "n_embd: 12" in printed and "parameters" in printed and str(run_dir) in printed


def test_val_loss_is_the_mean_over_all_targets(tiny_options: list[str], tmp_path: Path, prepared: Path) -> None:
    import jax.numpy as jnp

    from gpt2jax.data import open_data

    assert _run(tiny_options, "--train.steps=2", "--eval.sequences=1000000") == 0
    model, _ = load_model(tmp_path / "run")
    data = open_data(prepared, split="val", sequence_length=24, batch_size=1, seed=0)
    total, number = 0.0, 0
    for inputs, targets in data.eval_batches(1_000_000):
        real = int((targets >= 0).sum())
        logits = np.asarray(model(jnp.asarray(inputs)), np.float64)[0, :real]
        total += float((np.log(np.exp(logits).sum(-1)) - logits[np.arange(real), targets[0, :real]]).sum())
        number += real
    assert number == data.tokens - 1  # the ragged end included
    np.testing.assert_allclose(read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["val_loss"], total / number, rtol=1e-5)


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(
            "from gpt2jax.training.metrics import MetricsFile\nold = MetricsFile.write\n"
            "def write(self, **v):\n    old(self, **v)\n    v['step'] == 7 and os.kill(os.getpid(), signal.SIGKILL)\nMetricsFile.write = write",
            id="between-checkpoints",
        ),
        pytest.param(
            "from gpt2jax.training.checkpoint import Checkpoints\nold = Checkpoints.save\n"
            "def save(self, state, *a):\n    old(self, state, *a)\n    int(state.step) == 8 and os.kill(os.getpid(), signal.SIGKILL)\nCheckpoints.save = save",
            id="in-the-middle-of-a-save",
        ),
    ],
)
def test_kill_then_resume_equals_the_uninterrupted_run_bit_for_bit(dropout_options: list[str], tmp_path: Path, patch: str) -> None:
    killed, straight = [*dropout_options, f"--run.dir={tmp_path / 'killed'}"], [*dropout_options, f"--run.dir={tmp_path / 'straight'}"]
    assert _run_and_die(killed, patch) == -signal.SIGKILL
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "los')  # a torn line, as a kill in the middle of a write leaves it
    assert _run(killed, "--run.resume=auto") == 0
    assert _run(straight) == 0
    _assert_same_run(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_validation_saves_and_the_run_goes_on(
    dropout_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    options = [*dropout_options, "--checkpoint.every=0"]
    real = TokenData.eval_batches

    def interrupted(self: TokenData, sequences: int):
        for i, batch in enumerate(real(self, sequences)):
            if i == 1:
                os.kill(os.getpid(), number)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(TokenData, "eval_batches", interrupted)
        assert _run(options) == 128 + number
    assert int(_state(tmp_path / "run")[".step"]) == 6
    assert _run(options, "--run.resume=auto") == 0
    assert _run(options, "--eval.every=0", f"--run.dir={tmp_path / 'straight'}") == 0
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["loss"] == read_metrics(tmp_path / "straight" / "metrics.jsonl")[-1]["loss"]


def test_resume_without_a_run_starts_one(tiny_options: list[str], tmp_path: Path) -> None:
    assert _run(tiny_options, "--run.resume=auto", "--train.steps=2") == 0
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_used_folder_is_refused_and_left_alone(tiny_options: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    for more in ([], ["--run.resume=auto"]):
        with pytest.raises(InputError, match="already in use"):
            _run(tiny_options, *more)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_resuming_with_other_settings_or_data_is_refused(tiny_options: list[str], tmp_path: Path) -> None:
    assert _run(tiny_options, "--train.steps=2") == 0
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
    with pytest.raises(InputError, match=r"train.seed was 0, is 1; .*optimizer.learning_rate was 0.0006, is 0.1"):
        _run(tiny_options, "--run.resume=auto", "--train.seed=1", "--optimizer.learning_rate=0.1")
    (tmp_path / "other.txt").write_text("another text altogether\n" * 99)
    with pytest.raises(InputError, match="data has changed"):
        _run(tiny_options, "--run.resume=auto", f"--data.source={tmp_path / 'other.txt'}")
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model.vocab_size=256"], "model.vocab_size=256 is smaller than the 257 ids"),
        (["--data.source=nowhere"], "nowhere"),
        (["--data.tokenizer=nowhere"], "nowhere"),
        (["--train.sequence_length=25"], "sequence_length=25"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tiny_options: list[str], tmp_path: Path, more: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        _run(tiny_options, *more)
    assert not (tmp_path / "run").exists()


#: Forks a run, as often as it is told, from a process that has imported everything: a start then costs little. A thread of the run sends a signal to its own
#: process at a random moment between laying out and the end. One JSON line in (options, signal or 0, share of the time that a run takes), one exit status out.
_FORKING = """
import json, os, signal, sys, threading, time
import orbax.checkpoint, rich.progress, gpt2jax.decoding.generate, gpt2jax.convert.tensors
from gpt2jax.cli import main
from gpt2jax.training import loop
real, took = loop._run, 0.0
for line in sys.stdin:
    options, number, share = json.loads(line)
    come, go = os.pipe()
    if (child := os.fork()) == 0:
        def run(*arguments):
            began = time.monotonic()
            if number:
                threading.Thread(target=lambda: (time.sleep(share * took), os.kill(os.getpid(), number)), daemon=True).start()
            status = real(*arguments)
            os.write(go, str(time.monotonic() - began).encode())
            return status
        loop._run = run
        sys.stdout = open(os.devnull, "w")
        sys.argv = ["gpt2jax", "train", os.devnull, *options]
        try:
            status = main()
        except BaseException:
            import traceback
            traceback.print_exc()
            status = 99
        threading._shutdown()
        os._exit(status)
    _, ended = os.waitpid(child, 0)
    os.close(go)
    took = float(os.read(come, 99) or took) if not number else took
    print(os.waitstatus_to_exitcode(ended), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "default"), [(signal.SIGKILL, 3), (signal.SIGTERM, 2)])
def test_signals_at_random_moments_lose_nothing(dropout_options: list[str], tmp_path: Path, number: signal.Signals, default: int) -> None:
    """Killed or stopped as often as GPT2JAX_SIGKILL or GPT2JAX_SIGTERM says, and resumed each time: in the end all is as in the run that nothing disturbed."""
    wanted, chance = int(os.environ.get(f"GPT2JAX_{number.name}", default)), random.Random(0)
    options = [*dropout_options, "--train.steps=30", "--checkpoint.every=2", "--run.sample_prompt=a", "--run.sample_tokens=3", "--optimizer.ema_decay=0.9"]
    process = subprocess.Popen([sys.executable, "-c", _FORKING], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None

    def run(folder: str, number: int, share: float) -> int:
        process.stdin.write(json.dumps([[*options, "--run.resume=auto", f"--run.dir={tmp_path / folder}"], number, share]) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    assert [run("compiles", 0, 0), run("straight", 0, 0)] == [0, 0]
    struck, finished = 0, 0
    while struck < wanted:
        status = run(f"struck-{finished}", number, chance.random())
        assert status in (0, -number if number == signal.SIGKILL else 128 + number)
        struck += status != 0
        finished += status == 0
    assert run(f"struck-{finished}", 0, 0) == 0
    process.stdin.close()
    assert process.wait() == 0
    for i in range(finished + 1):
        _assert_same_run(tmp_path / f"struck-{i}", tmp_path / "straight")
    print(f"{struck} times {number.name}; {finished + 1} runs reached their end")


@pytest.mark.parametrize("log_every", [1, 5])
def test_what_is_not_finite_is_never_applied_and_its_step_layer_and_rows_are_named(
    tiny_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int
) -> None:
    """A weight of block 1 that is spoilt before step 3, looked at some steps later."""
    real, seen = loop.make_train_step, {}

    def spoilt(*arguments: object, **options: object):
        step = real(*arguments, **options)  # type: ignore[arg-type]

        def run(state, inputs, targets):
            if int(state.step) == 2:
                bad = state.parameters["blocks.mlp.up.w"].at[1].set(np.nan)
                state = dataclasses.replace(state, parameters={**state.parameters, "blocks.mlp.up.w": bad})
                seen["before"] = {name: np.asarray(leaf) for name, leaf in state.parameters.items()}
            state, metrics = step(state, inputs, targets)
            seen["after"] = state.parameters
            return state, metrics

        return run

    monkeypatch.setattr(loop, "make_train_step", spoilt)
    with pytest.raises(
        RunFailed, match=r"at step 3 loss=nan, grad_norm=nan: before the step blocks.mlp.up.w of block 1 is not finite; .*block 1's mlp; .*5 of .*5 rows"
    ):
        _run(tiny_options, f"--train.log_every={log_every}", "--checkpoint.every=50")
    for name, leaf in seen["before"].items():
        np.testing.assert_array_equal(leaf, seen["after"][name], err_msg=name)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2] * (log_every == 1)


def test_a_run_that_fails_keeps_the_checkpoint_that_is_being_written(tiny_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    real = Checkpoints.close
    monkeypatch.setattr(Checkpoints, "close", lambda self: closed.append(real(self)))
    with pytest.raises(RunFailed, match="at step 2 loss=nan"):
        _run(tiny_options, "--optimizer.learning_rate=1e30", "--checkpoint.every=1", "--train.log_every=50", "--eval.every=0")
    assert closed and [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]


def test_a_spike_is_skipped_or_ends_the_run_which_goes_on_without_it(
    tiny_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 7 is to foretell a byte that no text holds. Stopped there and gone on with, a run is the one that skipped it."""
    real = TokenData.batch

    def batch(self: TokenData, step: int, rows: slice | None = None):
        inputs, targets = real(self, step, rows)
        return inputs, np.full_like(targets, 255) if step == 6 else targets

    monkeypatch.setattr(TokenData, "batch", batch)
    options = [*tiny_options, "--guard.warmup=4", "--guard.threshold=8", "--optimizer.decay_steps=12"]

    def run(folder: str, *more: str) -> tuple[int, str]:
        return main(["train", os.devnull, *options, f"--run.dir={tmp_path / folder}", *more]), capsys.readouterr().err

    status, said = run("skips", "--guard.action=skip")
    spike = r"loss=\d.*, grad_norm=\d.*, \d+\.\d standard deviations above the mean \(guard.threshold=8\)"
    assert status == 0 and len(re.findall(f"^step 7 skipped by the guard: {spike}$", said, re.M)) == said.count("skipped by") == 1
    lines = read_metrics(tmp_path / "skips" / "metrics.jsonl")
    assert [line["skipped"] for line in lines] == [0] * 6 + [1] * 6 and lines[6]["grad_norm"] > 1.5 * lines[5]["grad_norm"]
    status, said = run("stops", "--guard.action=stop")
    assert status == 1 and re.search(f"^gpt2jax: the run failed: at step 7 {spike}; the step was not applied; go on with --run.resume=auto", said, re.M)
    assert [line["step"] for line in read_metrics(tmp_path / "stops" / "metrics.jsonl")] == [*range(1, 7)]
    assert run("stops", "--guard.action=skip", "--run.resume=auto", "--train.steps=8")[0] == 0
    assert run("stops", "--guard.action=skip", "--run.resume=auto")[0] == 0, "from a checkpoint behind it"
    seen = [[{k: v for k, v in line.items() if k in ("step", "loss", "grad_norm", "skipped")} for line in read_metrics(tmp_path / d / "metrics.jsonl")]
            for d in ("skips", "stops")]  # fmt: skip
    assert seen[0] == seen[1]


def test_documents_may_be_kept_apart(tiny_options: list[str], tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": f"{i * i}"}) + "\n" for i in range(200)))
    losses = []
    for apart in ("false", "true"):
        options = [f"--data.separate_documents={apart}", f"--data.source={tmp_path / 'short.jsonl'}", "--data.val_fraction=0.2", "--train.steps=2"]
        assert _run(tiny_options, *options, f"--run.dir={tmp_path / apart}") == 0
        losses.append([(line["loss"], line["val_loss"]) for line in read_metrics(tmp_path / apart / "metrics.jsonl")])
    assert losses[0][0][0] != losses[1][0][0] and losses[0][-1][1] != losses[1][-1][1]


def test_another_runs_checkpoints_are_not_gone_on_with(tiny_options: list[str], tmp_path: Path) -> None:
    shared = f"--checkpoint.dir={tmp_path / 'shared'}"
    assert _run(tiny_options, shared, "--train.steps=2", f"--run.dir={tmp_path / 'first'}") == 0
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    (tmp_path / "second" / "data.json").write_text((tmp_path / "first" / "data.json").read_text().replace('"run": "', '"run": "x'))
    with pytest.raises(InputError, match=r"checkpoint .*shared.2 is another run's; give .*second a checkpoint.dir of its own"):
        _run(tiny_options, shared, "--train.steps=3", f"--run.dir={tmp_path / 'second'}", "--run.resume=auto")
    assert [path.name for path in (tmp_path / "shared").iterdir() if path.name[0] != "."] == ["2"]
    (tmp_path / "first").rename(tmp_path / "renamed")
    assert _run(tiny_options, shared, "--train.steps=3", f"--run.dir={tmp_path / 'renamed'}", "--run.resume=auto") == 0


def test_a_val_loss_that_is_not_finite_is_null(tiny_options: list[str], tmp_path: Path) -> None:
    _run(tiny_options, "--train.steps=1", "--optimizer.learning_rate=1e30")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(text)["loss"] > 0 and "NaN" not in text and '"val_loss": null' in text
