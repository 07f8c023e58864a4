"""metrics.jsonl after a kill, and the picture of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpt2jax.errors import InputError
from gpt2jax.training.metrics import MetricsFile, read_metrics
from gpt2jax.training.plot import plot_runs


def _write(path: Path, steps: range) -> None:
    file = MetricsFile(path, steps.start - 1)
    for step in steps:
        file.write(
            step=step, loss=5 / step, val_loss=4 / step if step % 2 == 0 else None, lr=0.1, grad_norm=float("nan") if step == 3 else 1.0, tokens_per_s=9.0
        )
    file.close()


def test_going_on_drops_the_lines_after_the_checkpoint_and_the_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    _write(path, range(5, 10))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 10))
    assert [line["step"] for line in read_metrics(path)] == list(range(1, 10))


def test_plot_draws_one_or_many_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _write(tmp_path / name / "metrics.jsonl", range(1, 8))
    plot_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "out" / "both.png")
    assert (tmp_path / "out" / "both.png").read_bytes().startswith(b"\x89PNG")


def test_plot_draws_what_only_some_runs_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each, with the points that are there; an older run lacks the keys."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _write(tmp_path / "a" / "metrics.jsonl", range(1, 8))
    lines = [dict(line, mfu=None, lambada_acc=line["step"] / 10 if line["step"] % 3 == 0 else None) for line in read_metrics(tmp_path / "a" / "metrics.jsonl")]
    (tmp_path / "b" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    plot_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "out.png")
    axes = pyplot.gcf().axes
    assert [axis.get_ylabel() for axis in axes] == ["loss (nats a token)", "learning rate", "gradient norm", "tokens/s", "LAMBADA acc"]
    older, newer = axes[-1].get_lines()
    assert not len(older.get_xdata()) and list(newer.get_xdata()) == [3, 6] and list(newer.get_ydata()) == [0.3, 0.6]
    monkeypatch.undo()
    pyplot.close("all")


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no metrics.jsonl"):
        plot_runs([tmp_path], tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()
