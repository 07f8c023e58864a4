"""Checkpoints with Orbax, in the folder that `gpt2jax.training.folder` describes.

A checkpoint is written under a temporary name and renamed when whole, so an interrupted save leaves none. Data order and dropout follow from the step and the
seed in config.yaml, so parameters, optimizer state and step are the whole state.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from gpt2jax.config import CheckpointConfig, Config, load_config, to_tree
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters
from gpt2jax.tokenizer import Tokenizer, load_tokenizer
from gpt2jax.training.folder import CHECKPOINTS, CONFIG, TOKENIZER, finished_steps, require_unused, split_step, write_text
from gpt2jax.training.step import TrainState


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


def load_model(path: str | Path) -> tuple[GPT2, Tokenizer | None]:
    """The model and tokenizer of a run or converted folder (its newest checkpoint), or of one step's folder inside checkpoints/."""
    run_dir, step = split_step(Path(path))
    config = load_config(run_dir / CONFIG)
    steps = finished_steps(run_dir)
    if not steps:
        raise InputError(f"{run_dir} has no finished checkpoint yet; let the run reach checkpoint.every={config.checkpoint.every} steps")
    if step is not None and step not in steps:
        raise InputError(f"{run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    # the schedule of the machine that trained it may not exist here
    skeleton = abstract_model(dataclasses.replace(config.model, attention_backend="auto"))
    saved_at = _folder(run_dir) / str(steps[-1] if step is None else step) / "parameters"
    try:
        with ocp.StandardCheckpointer() as reader:
            with_parameters(skeleton, ocp.PyTreeCheckpointHandler().metadata(epath.Path(saved_at)).tree)  # names what does not fit; Orbax itself may cut or pad
            parameters = reader.restore(saved_at, named_parameters(skeleton))
    except InputError:
        raise
    except Exception as error:  # Orbax and TensorStore raise errors of many kinds for a file that is cut, missing or of another format
        raise InputError(f"cannot read the checkpoint {saved_at.parent}: {' '.join(str(error).split())[:200]}; it is damaged: use another step's") from error
    folder = run_dir / TOKENIZER
    return with_parameters(skeleton, parameters), load_tokenizer(str(folder)) if folder.is_dir() else None


def save_model(out: str | Path, model: GPT2, tokenizer: Tokenizer | None) -> None:
    """Write a folder that `load_model` reads: all of it or nothing. InputError if `out` is in use, or if the weights were made smaller for decoding."""
    out = Path(out)
    if small := sorted({str(leaf.dtype) for leaf in jax.tree.leaves(model) if leaf.dtype != "float32"}):
        raise InputError(f"the model's weights are {small[0]}, made smaller for decoding; save the float32 model that they were made from")
    require_unused(out, "choose another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        draft.chmod(0o777 & ~_umask())
        write_text(draft / CONFIG, yaml.safe_dump({"model": to_tree(Config(model=model.config))["model"]}, sort_keys=False))
        if tokenizer is not None:
            tokenizer.save(draft / TOKENIZER)
        with ocp.CheckpointManager(_folder(draft)) as manager:
            manager.save(0, args=ocp.args.Composite(parameters=ocp.args.StandardSave(named_parameters(model))))
            manager.wait_until_finished()
        os.replace(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _folder(run_dir: Path) -> Any:
    return (run_dir / CHECKPOINTS).absolute()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
