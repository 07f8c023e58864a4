"""Checkpoints with Orbax, in the folder that `gpt2jax.training.folder` describes.

A checkpoint is written under a temporary name and renamed when whole, so an interrupted save leaves none. Data order and dropout follow from the step and the
seed in config.yaml, so parameters, optimizer state and step are the whole state.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from gpt2jax.config import CheckpointConfig, Config, ModelConfig, load_config, to_tree
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.lora import abstract_adapted, adapter_variables, merged
from gpt2jax.model.parameters import abstract_model, check_parameters, named_parameters, with_parameters
from gpt2jax.tokenizer import Tokenizer, load_tokenizer
from gpt2jax.training.folder import BASE, CHECKPOINTS, CONFIG, TOKENIZER, finished_steps, require_unused, split_step, write_text
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
        return TrainState(jax.numpy.int32(step), restored["parameters"], restored["optimizer"], like.frozen)

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def load_model(path: str | Path, shardings: Mapping[str, Sharding] | None = None) -> tuple[GPT2, Tokenizer | None]:
    """The model and tokenizer of a run or converted folder (its newest checkpoint), or of one step's folder inside checkpoints/. A run's adapters (lora) are
    merged into the weights. shardings: where each parameter is to lie, by name; None means the default device."""
    run_dir, step = split_step(Path(path))
    config = load_config(run_dir / CONFIG)
    steps = finished_steps(run_dir)
    if not steps:
        raise InputError(f"{run_dir} has no finished checkpoint yet; let the run reach checkpoint.every={config.checkpoint.every} steps")
    if step is not None and step not in steps:
        raise InputError(f"{run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    # the schedule of the machine that trained it may not exist here
    model_config = dataclasses.replace(config.model, attention_backend="auto")
    saved_at = run_dir / CHECKPOINTS / str(steps[-1] if step is None else step) / "parameters"
    if config.lora.rank is None:
        parameters = read_parameters(saved_at, model_config, shardings)
    else:
        adapters = _read(saved_at, adapter_variables(abstract_adapted(model_config, config.lora)), shardings)
        parameters = merged({**read_parameters(run_dir / BASE, model_config, shardings), **adapters}, config.lora)
    folder = run_dir / TOKENIZER
    return with_parameters(abstract_model(model_config), parameters), load_tokenizer(str(folder)) if folder.is_dir() else None


def read_parameters(folder: Path, config: ModelConfig, shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
    """The parameters by name that a checkpoint's folder of a plain model holds. InputError if they do not fit config or cannot be read."""
    return _read(folder, abstract_model(config), shardings)


def write_parameters(folder: Path, parameters: dict[str, jax.Array]) -> None:
    """Write what `read_parameters` reads: all of it or nothing."""
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder.absolute(), parameters)


def _read(folder: Path, like: Any, shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
    here = SingleDeviceSharding(jax.local_devices()[0])  # said, since Orbax would ask for the devices that it was saved from
    place = lambda name: here if shardings is None else shardings.get(name, _whole(shardings))  # noqa: E731
    wanted = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(name)) for name, leaf in named_parameters(like).items()}
    folder = folder.absolute()
    try:
        with ocp.StandardCheckpointer() as reader:
            check_parameters(wanted, ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder)).tree)  # Orbax itself may cut or pad
            return reader.restore(folder, wanted)
    except InputError:
        raise
    except Exception as error:  # Orbax and TensorStore raise errors of many kinds for a file that is cut, missing or of another format
        checkpoint = folder if folder.name == BASE else folder.parent
        raise InputError(f"cannot read the checkpoint {checkpoint}: {' '.join(str(error).split())[:200]}; it is damaged: use another step's") from error


def _whole(shardings: Mapping[str, Sharding]) -> Sharding:
    """Whole on each device of the mesh that these are of: where adapters go, which are merged into what lies there."""
    first = next(iter(shardings.values()))
    return NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first


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
