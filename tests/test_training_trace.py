"""`run.trace`: which steps the profiler sees, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from gpt2jax.config import load_config
from gpt2jax.errors import InputError
from gpt2jax.training import loop
from gpt2jax.training.trace import Trace


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the profiler, and the steps between."""
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(f"start {Path(folder).name}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def steps(text: str | None, begun: int, end: int, calls: list[str]) -> list[str]:
    with Trace(text, Path("run"), begun) as trace:
        for step in range(begun + 1, end + 1):
            trace.before(step)
            calls.append(str(step))
            trace.after(step, None)
    return calls


@pytest.mark.parametrize(
    ("text", "begun", "end", "expected"),
    [
        ("2-3", 0, 5, "1 [start trace] 2 3 [stop] 4 5"),
        ("1-1", 0, 2, "[start trace] 1 [stop] 2"),
        ("2-4", 2, 5, "[start trace] 3 4 [stop] 5"),  # going on within the range
        ("2-3", 3, 5, "4 5"),  # behind it
        ("2-9", 0, 3, "1 [start trace] 2 3 [stop]"),  # stopped by a signal within it
        (None, 0, 2, "1 2"),
    ],
)
def test_the_profiler_runs_from_the_first_to_the_last_step(calls: list[str], text: Any, begun: int, end: int, expected: str) -> None:
    found = " ".join(f"[{call}]" if not call.isdigit() else call for call in steps(text, begun, end, calls))
    assert found == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [("5", "must be a first and a last step"), ("3-2", "as in 10-12"), ("0-2", "steps count from 1"), ("a-b", "run.trace=a-b"), ("5-13", "train.steps=12")],
)
def test_bad_ranges_are_named(tiny_options: list[str], text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_config(None, [*tiny_options, f"--run.trace={text}"])


def test_a_run_writes_a_profile(tiny_options: list[str], tmp_path: Path) -> None:
    assert loop.train(load_config(None, [*tiny_options, "--train.steps=3", "--run.trace=2-2", "--run.sample_every=2"])) == 0
    assert list((tmp_path / "run" / "trace").rglob("*.xplane.pb"))


def test_samples_come_inside_the_run(tiny_options: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(loop, "sample_text", lambda config, model, tokenizer: seen.append(np.asarray(model.token_table[...])) or f"sample {len(seen)}")
    assert loop.train(load_config(None, [*tiny_options, "--train.steps=5", "--run.sample_every=2", "--optimizer.learning_rate=0.01"])) == 0
    printed = capfd.readouterr()
    assert "sample 1" in printed.err and "sample 2" in printed.err and "sample 3" in printed.out
    assert np.abs(seen[1] - seen[0]).max() > 1e-4 < np.abs(seen[2] - seen[1]).max()
