"""What trackers get: the values of metrics.jsonl, on the curve that an earlier start began."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gpt2jax.config import load_config
from gpt2jax.errors import InputError
from gpt2jax.training.loop import train
from gpt2jax.training.metrics import read_metrics


class FakeWandB(types.ModuleType):
    """Keeps what it is asked, and logs by run id as the service does."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.asked: list[dict[str, Any]] = []
        self.logged: dict[str, list[dict[str, Any]]] = {}
        self.finished = 0

    def init(self, **options: Any) -> Any:
        self.asked.append(options)
        name = options["id"] or f"new{len(self.asked)}"
        log = self.logged.setdefault(name, [])
        finish = lambda: setattr(self, "finished", self.finished + 1)  # noqa: E731
        return types.SimpleNamespace(id=name, log=log.append, finish=finish, define_metric=lambda *_, **__: None)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def run(options: list[str], *more: str) -> int:
    return train(load_config(None, [*options, *more]))


def measured(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if value is not None} for line in read_metrics(path / "metrics.jsonl")]


def test_a_run_that_goes_on_is_one_run_of_wandb(tiny_options: list[str], tmp_path: Path, wandb: FakeWandB) -> None:
    options = [*tiny_options, "--run.track=wandb", "--eval.every=0", "--checkpoint.every=0"]
    assert run(options, "--train.steps=2", "--optimizer.decay_steps=4") == 0
    assert run(options, "--train.steps=4", "--optimizer.decay_steps=4", "--run.resume=auto") == 0
    assert (tmp_path / "run" / "wandb_id").read_text() == "new1\n"
    assert [asked["id"] for asked in wandb.asked] == [None, "new1"] and wandb.finished == 2
    assert wandb.logged == {"new1": measured(tmp_path / "run")}
    assert [line["step"] for line in wandb.logged["new1"]] == [1, 2, 3, 4]
    assert wandb.asked[0]["config"]["train"]["steps"] == 2 and wandb.asked[0]["dir"] == str(tmp_path / "run")


def test_without_the_package_the_extra_is_named_before_anything_is_written(tiny_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in (("wandb", "wandb"), ("tensorboard", "tensorboardX")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InputError, match=rf"run.track={name} needs the package {package}: pip install 'gpt2jax\[{name}\]'"):
            run(tiny_options, f"--run.track={name}")
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_the_values_once(tiny_options: list[str], tmp_path: Path) -> None:
    """Steps behind the checkpoint, which are done again, are purged: here steps 3 and 4 of the first start."""
    pytest.importorskip("tensorboardX")
    read = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = [*tiny_options, "--run.track=tensorboard", "--eval.every=0", "--checkpoint.every=2", "--train.steps=4"]
    assert run(options) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    assert run(options, "--run.resume=auto") == 0
    events = read.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = measured(tmp_path / "run")
    assert set(events.Tags()["scalars"]) == {key for line in lines for key in line} - {"step"}
    loss = {event.step: event.value for event in events.Scalars("loss")}
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert loss == pytest.approx({line["step"]: line["loss"] for line in lines})
