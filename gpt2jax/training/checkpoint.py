"""Checkpoints with Orbax, and the folder around them.

A run folder, and a folder written by `gpt2jax convert`, hold

    config.yaml              the resolved configuration
    tokenizer/               what `gpt2jax.tokenizer.load_tokenizer` reads back
    checkpoints/STEP/        Orbax: `parameters` (float32 by name); in a run also `optimizer`
    data.json, metrics.jsonl (a run only) the data's fingerprint; one JSON object a line

A checkpoint is written under a temporary name and renamed when whole, so an interrupted save leaves none. Data order and dropout follow from the step and the
seed in config.yaml, so that these are the whole state.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml
from orbax.checkpoint import checkpoint_managers as policies

from gpt2jax.config import CheckpointConfig, Config, config_from_tree, load_config, to_yaml
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters
from gpt2jax.tokenizer import Tokenizer, load_tokenizer
from gpt2jax.training.step import TrainState

CHECKPOINTS, CONFIG, TOKENIZER = "checkpoints", "config.yaml", "tokenizer"


class Checkpoints:
    """The checkpoints of one run, saved asynchronously: the newest `keep`, and the one of the lowest val_loss."""

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        keep: list[policies.PreservationPolicy] = [policies.LatestN(config.keep)]
        if config.keep_best:
            keep.append(policies.BestN(get_metric_fn=lambda metrics: -metrics["val_loss"], n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(keep), cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(_folder(run_dir), options=options)

    def save(self, state: TrainState, val_loss: float | None = None) -> None:
        """Start saving; returns once the state is copied, so that the next step may reuse its memory."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(parameters=ocp.args.StandardSave(state.parameters), optimizer=ocp.args.StandardSave(state.optimizer))
        self._manager.save(step, args=items, metrics=None if val_loss is None else {"val_loss": val_loss})

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest whole checkpoint as a state like this one (shapes, dtypes, shardings); None if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(parameters=ocp.args.StandardRestore(target.parameters), optimizer=ocp.args.StandardRestore(target.optimizer))
        restored = self._manager.restore(step, args=items)
        return TrainState(jax.numpy.int32(step), restored["parameters"], restored["optimizer"])

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a run folder, a converted folder, or one step's folder inside its checkpoints/."""
    run_dir, _ = _split(Path(path))
    return (run_dir / CONFIG).is_file() and (run_dir / CHECKPOINTS).is_dir()


def load_model(path: str | Path) -> tuple[GPT2, Tokenizer | None]:
    """The model and tokenizer of a run or converted folder (its newest checkpoint), or of one step's folder inside checkpoints/."""
    run_dir, step = _split(Path(path))
    config = load_config(run_dir / CONFIG)
    steps = sorted(int(entry.name) for entry in (run_dir / CHECKPOINTS).iterdir() if entry.name.isdigit())
    if not steps:
        raise InputError(f"{run_dir} has no finished checkpoint yet; let the run reach checkpoint.every={config.checkpoint.every} steps")
    if step is not None and step not in steps:
        raise InputError(f"{run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    skeleton = abstract_model(config.model)
    saved_at = _folder(run_dir) / str(steps[-1] if step is None else step) / "parameters"
    with ocp.StandardCheckpointer() as reader:
        with_parameters(skeleton, reader.metadata(saved_at).item_metadata.tree)  # names what does not fit; Orbax itself may cut or pad
        parameters = reader.restore(saved_at, named_parameters(skeleton))
    folder = run_dir / TOKENIZER
    return with_parameters(skeleton, parameters), load_tokenizer(str(folder)) if folder.is_dir() else None


def save_model(out: str | Path, model: GPT2, tokenizer: Tokenizer | None) -> None:
    """Write a folder that `load_model` reads: all of it or nothing. InputError if `out` exists and is not an empty folder."""
    out = Path(out)
    require_unused(out, "choose another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        draft.chmod(0o777 & ~_umask())
        write_text(draft / CONFIG, yaml.safe_dump({"model": yaml.safe_load(to_yaml(Config(model=model.config)))["model"]}, sort_keys=False))
        if tokenizer is not None:
            tokenizer.save(draft / TOKENIZER)
        with ocp.CheckpointManager(_folder(draft)) as manager:
            manager.save(0, args=ocp.args.Composite(parameters=ocp.args.StandardSave(named_parameters(model))))
            manager.wait_until_finished()
        os.replace(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def require_unused(folder: Path, way_out: str) -> None:
    """InputError unless `folder` is absent or an empty folder."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder; {way_out}")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"folder {folder} is already in use; {way_out}")


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def saved_config(run_dir: Path) -> Config | None:
    """The configuration that a run folder was started with; None if it has none yet."""
    path = run_dir / CONFIG
    return config_from_tree(yaml.safe_load(path.read_text(encoding="utf-8")), str(path)) if path.is_file() else None


def _split(path: Path) -> tuple[Path, int | None]:
    inside = path.name.isdigit() and path.absolute().parent.name == CHECKPOINTS
    return (path.absolute().parent.parent, int(path.name)) if inside else (path, None)


def _folder(run_dir: Path) -> Any:
    return (run_dir / CHECKPOINTS).absolute()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
