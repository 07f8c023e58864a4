"""Trackers beside metrics.jsonl: TensorBoard (extra `tensorboard`) and Weights & Biases (extra `wandb`). They get the same values under the same names."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Protocol

from gpt2jax.config import Config, to_tree
from gpt2jax.errors import InputError
from gpt2jax.training.folder import write_text

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Tracker(Protocol):
    def log(self, values: dict[str, Any]) -> None:
        """A line of metrics.jsonl; what is None was not measured."""

    def close(self) -> None:
        """Send and write what is left."""


def check_tracker(name: str) -> None:
    """InputError, naming the extra, unless the package of `run.track` is there."""
    if name != "none":
        try:
            importlib.import_module(_PACKAGES[name])
        except ImportError:
            raise InputError(f"run.track={name} needs the package {_PACKAGES[name]}: pip install 'gpt2jax[{name}]'") from None


def open_tracker(config: Config, run_dir: Path, step: int) -> Tracker | None:
    """The tracker that run.track names, of a run at `step`."""
    kinds: dict[str, Any] = {"none": lambda *_: None, "tensorboard": _TensorBoard, "wandb": _WandB}
    tracker: Tracker | None = kinds[config.run.track](config, run_dir, step)
    return tracker


class _TensorBoard:
    """Event files in RUN/tensorboard. What an earlier start wrote of steps behind this one is hidden."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        tensorboard: Any = importlib.import_module("tensorboardX")
        self._writer = tensorboard.SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """One W&B run for one run folder: its id stands in RUN/wandb_id, and a run that goes on continues it. The project is $WANDB_PROJECT, else gpt2jax.

    The step is a metric of its own, by which the curves are drawn: W&B's counter would refuse steps that are done again behind a checkpoint.
    """

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        wandb: Any = importlib.import_module("wandb")
        path = run_dir / "wandb_id"
        known = path.read_text(encoding="utf-8").strip() if path.is_file() else None
        project = os.environ.get("WANDB_PROJECT", "gpt2jax")
        self._run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir), id=known, resume="allow", config=to_tree(config))
        if known is None:
            write_text(path, f"{self._run.id}\n")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any]) -> None:
        self._run.log({name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        self._run.finish()
