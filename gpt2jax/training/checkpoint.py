"""Checkpoints with Orbax, in the folder that `gpt2jax.training.folder` describes.

A checkpoint is written under a temporary name and renamed when whole, so an interrupted save leaves none. Data order and dropout follow from the step and the
seed in config.yaml, so parameters, optimizer state, the guard's statistics and the step are the whole state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from gpt2jax.config import CheckpointConfig, Config, ModelConfig, load_config, to_tree
from gpt2jax.errors import InputError, RunFailed
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.lora import abstract_adapted, adapter_variables, merged
from gpt2jax.model.parameters import abstract_model, check_parameters, named_parameters, with_parameters
from gpt2jax.parallel import hosts
from gpt2jax.tokenizer import Tokenizer, load_tokenizer
from gpt2jax.training.folder import BASE, CONFIG, TOKENIZER, checkpoint_folder, finished_steps, require_unused, run_id, split_step, write_text
from gpt2jax.training.guard import Guard
from gpt2jax.training.step import TrainState

_EPOCH = 1_700_000_000  # seconds; times relative to it are agreed on as int32


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What is known of a checkpoint beside its arrays, and decides whether it is kept. As Orbax's PolicyCheckpointInfo."""

    step: int
    time: datetime.datetime
    metrics: dict[str, float] | None


class _Keep(policies.PreservationPolicy):
    """The newest so many, the best, and one in so many minutes, of facts that outlive the process."""

    def __init__(self, config: CheckpointConfig, facts: dict[int, _Facts]) -> None:
        rules: list[policies.PreservationPolicy] = [policies.LatestN(config.keep)]
        if config.keep_best:
            rules.append(policies.BestN(get_metric_fn=lambda metrics: -metrics["val_loss"], n=1, keep_checkpoints_without_metrics=False))
        if config.keep_every_minutes is not None:
            rules.append(policies.EveryNSeconds(max(round(config.keep_every_minutes * 60), 1)))
        self._rules, self._facts = policies.AnyPreservationPolicy(rules), facts

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        return self._rules.should_preserve([self._facts[checkpoint.step] for checkpoint in checkpoints], context=context)


class Checkpoints:
    """The checkpoints of one run, saved asynchronously and kept as `config` says. Every process of a run calls each method at the same step.

    clock: seconds since 1970; process 0's counts. unlogged: after `restore`, what `save` was given under that name.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, clock: Callable[[], float] = time.time) -> None:
        """InputError for a checkpoint.dir that can't be used. Nothing is written before the first `save`."""
        self._run_dir, self._folder, self._config, self._clock = run_dir, checkpoint_folder(run_dir, config.dir), config, clock
        self._facts: dict[int, _Facts] = {}
        self._saved_at, self._saving = self._now(), False
        self.unlogged: dict[str, float] | None = None

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        for step in finished_steps(self._folder):
            self._facts.setdefault(step, self._read_facts(step)[0])
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Keep(self._config, self._facts),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            lightweight_initialize=True,  # Orbax's own notes on each checkpoint are not read: they may be damaged
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def overdue(self) -> bool:
        """Whether checkpoint.every_minutes have gone by since the last save, or since the start."""
        return self._config.every_minutes is not None and self._now() - self._saved_at >= self._config.every_minutes * 60

    def save(self, state: TrainState, val_loss: float | None = None, unlogged: dict[str, float] | None = None) -> None:
        """Start saving; returns once the state is copied, so that the next step may reuse its memory. A step that is there already is not saved again.

        unlogged: numbers to be given back by `restore`. RunFailed if this save or the one before it can't be written.
        """
        step = int(state.step)
        with self._failures():
            if step in self._manager.all_steps():
                return
            self._saved_at = self._now()
            self._facts[step] = _facts(step, self._saved_at, val_loss)
            facts = ocp.args.JsonSave({"time": self._saved_at, "val_loss": val_loss, "unlogged": unlogged, "run": run_id(self._run_dir)})
            arrays = {name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()}
            self._manager.save(step, args=ocp.args.Composite(facts=facts, **arrays), force=True)
            self._saving = True

    def check(self) -> None:
        """RunFailed if a save that is no longer under way has failed. Costs nothing: it waits for none."""
        if self._saving and not self._manager.is_saving_in_progress():
            self._finish()

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest whole checkpoint as a state like this one (shapes, dtypes, shardings; arrays may be abstract); None if there is no checkpoint.

        One that is not whole is passed over with a warning, and set aside under another name once an older one is restored: its step will be saved anew.
        InputError, and nothing is touched, if there are checkpoints and none is whole. Several processes read each its own part, and go on with the newest
        checkpoint that all of them could read.
        """
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        steps = finished_steps(self._folder) if hosts.is_first() else []
        passed: list[int] = []
        while (step := hosts.any_of(steps.pop() if steps else -1)) >= 0:
            if self._owner(step) not in (None, run_id(self._run_dir)):
                raise InputError(f"the checkpoint {self._folder / str(step)} is another run's; give {self._run_dir} a checkpoint.dir of its own")
            state, why = self._read(step, target)
            if not hosts.any_of(int(state is None)):
                self._set_aside(passed)
                return state
            state = None  # its memory is wanted for the next
            warnings.warn(f"passed over the checkpoint {self._folder / str(step)}: {why or 'another host could not read it'}", stacklevel=2)
            passed.append(step)
        if passed:
            raise InputError(
                f"no checkpoint in {self._folder} is whole (steps {', '.join(map(str, passed))}); put a copy in its place, or begin anew in another --run.dir"
            )
        return None

    def close(self) -> None:
        """Wait until everything is on disk. RunFailed if it can't be written."""
        if "_manager" in vars(self):
            self._finish()
            self._manager.close()

    def _finish(self) -> None:
        self._saving = False
        with self._failures():
            self._manager.wait_until_finished()

    def _now(self) -> int:
        return hosts.any_of(int(self._clock()) - _EPOCH if hosts.is_first() else -_EPOCH) + _EPOCH

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError:  # another process is gone, or this one's devices
            raise
        except Exception as error:  # Orbax and TensorStore raise errors of many kinds for a disk that is full or gone
            raise RunFailed(
                f"cannot save a checkpoint in {self._folder}: {_reason(error)}; the ones before it are whole: make room, and go on with --run.resume=auto"
            ) from error

    def _read(self, step: int, target: TrainState) -> tuple[TrainState | None, str]:
        """The state of one checkpoint, or None and why it can't be read. No process waits for another in here, so each may fail alone."""
        at = self._folder / str(step)
        try:
            facts, self.unlogged = self._read_facts(step)
            items = {name: tree for name, tree in _items(target).items() if name != "guard" or (at / name).exists()}
            read = {name: _read_arrays(at / name, tree) for name, tree in items.items()}
        except Exception as error:  # of many kinds, see above
            return None, _reason(error)
        self._facts[step] = facts
        if target.guard is not None and "guard" not in read:  # the run had none until now
            read["guard"] = jax.device_put(Guard.start(), target.step.sharding)
        return dataclasses.replace(target, step=jax.device_put(jax.numpy.int32(step), target.step.sharding), **read), ""

    def _read_facts(self, step: int) -> tuple[_Facts, dict[str, float] | None]:
        """A checkpoint's facts, and what it says was left to log. One whose facts can't be read has its folder's time and no val_loss."""
        at = self._folder / str(step)
        try:
            read = ocp.JsonCheckpointHandler().restore(at / "facts")
            return _facts(step, float(read["time"]), read["val_loss"]), read["unlogged"]
        except Exception:
            return _facts(step, at.stat().mtime, None), None

    def _owner(self, step: int) -> str | None:
        """The run that saved a checkpoint; None if it doesn't say."""
        try:
            return ocp.JsonCheckpointHandler().restore(self._folder / str(step) / "facts").get("run")
        except Exception:
            return None

    def _set_aside(self, steps: list[int]) -> None:
        """Rename checkpoints that are not whole, so that their steps can be saved again."""
        if steps and hosts.is_first():
            for step in steps:
                taken = {entry.name for entry in self._folder.iterdir()}
                name = next(name for i in range(len(taken) + 1) if (name := f"broken-{step}" + f"-{i}" * bool(i)) not in taken)
                (self._folder / str(step)).rename(self._folder / name)
        hosts.wait("checkpoints set aside")


def load_model(path: str | Path, shardings: Mapping[str, Sharding] | None = None) -> tuple[GPT2, Tokenizer | None]:
    """The model and tokenizer of a run or converted folder (its newest checkpoint), or of one step's folder inside checkpoints/. A run's adapters (lora) are
    merged into the weights. shardings: where each parameter is to lie, by name; None means the default device."""
    run_dir, step = split_step(Path(path))
    config = load_config(run_dir / CONFIG)
    checkpoints = checkpoint_folder(run_dir, config.checkpoint.dir)
    steps = finished_steps(checkpoints)
    if not steps:
        raise InputError(f"{run_dir} has no finished checkpoint yet; let the run reach checkpoint.every={config.checkpoint.every} steps")
    if step is not None and step not in steps:
        raise InputError(f"{run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    # the schedule of the machine that trained it may not exist here
    model_config = dataclasses.replace(config.model, attention_backend="auto")
    saved_at = checkpoints / str(steps[-1] if step is None else step) / "parameters"
    if config.lora.rank is None:
        parameters = read_parameters(saved_at, model_config, shardings)
    else:
        adapters = _read(saved_at, adapter_variables(abstract_adapted(model_config, config.lora)), shardings)
        parameters = merged({**read_parameters(run_dir / BASE, model_config, shardings), **adapters}, config.lora)
    folder = run_dir / TOKENIZER
    return with_parameters(abstract_model(model_config), parameters), load_tokenizer(str(folder)) if folder.is_dir() else None


def read_parameters(folder: Any, config: ModelConfig, shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
    """The parameters by name that a checkpoint's folder of a plain model holds. InputError if they do not fit config or cannot be read."""
    return _read(folder, abstract_model(config), shardings)


def write_parameters(folder: Path, parameters: dict[str, jax.Array]) -> None:
    """Write what `read_parameters` reads: all of it or nothing."""
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder.absolute(), parameters)


def _read(folder: Any, like: Any, shardings: Mapping[str, Sharding] | None = None) -> dict[str, jax.Array]:
    here = SingleDeviceSharding(jax.local_devices()[0])  # said, since Orbax would ask for the devices that it was saved from
    place = lambda name: here if shardings is None else shardings.get(name, _whole(shardings))  # noqa: E731
    wanted = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(name)) for name, leaf in named_parameters(like).items()}
    folder = epath.Path(folder).absolute()
    try:
        with ocp.StandardCheckpointer() as reader:
            check_parameters(wanted, ocp.PyTreeCheckpointHandler().metadata(folder).tree)  # Orbax itself may cut or pad
            return reader.restore(folder, wanted)
    except InputError:
        raise
    except Exception as error:  # Orbax and TensorStore raise errors of many kinds for a file that is cut, missing or of another format
        checkpoint = folder if folder.name == BASE else folder.parent
        raise InputError(f"cannot read the checkpoint {checkpoint}: {_reason(error)}; it is damaged: use another step's") from error


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
        with ocp.CheckpointManager(checkpoint_folder(draft, None)) as manager:
            manager.save(0, args=ocp.args.Composite(parameters=ocp.args.StandardSave(named_parameters(model))))
            manager.wait_until_finished()
        os.replace(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _items(state: TrainState) -> dict[str, Any]:
    """The trees of arrays that a checkpoint is made of."""
    items = {"parameters": state.parameters, "optimizer": state.optimizer}
    return items if state.guard is None else {**items, "guard": state.guard}


def _read_arrays(at: epath.Path, target: Any) -> Any:
    """Arrays as `target` asks for them; ValueError for any that is missing, left over, or of another shape or dtype (which Orbax would cut, pad or cast)."""
    saved, wanted = (_shapes(tree) for tree in (ocp.PyTreeCheckpointHandler().metadata(at).tree, target))
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(f"{at.name} {name} is {saved.get(name, 'missing')}, and the run's is {wanted.get(name, 'missing')}")
    return ocp.StandardCheckpointHandler().restore(at, args=ocp.args.StandardRestore(target))


def _shapes(tree: Any) -> dict[str, str]:
    return {".".join(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in ocp.tree.to_flat_dict(tree, keep_empty_nodes=False).items()}


def _reason(error: Exception) -> str:
    """An error in one line; of TensorStore's long ones first what the system says, which stands at their end."""
    text = " ".join(str(error).split())
    system = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO) if os.strerror(number) in text]
    return ": ".join([*system[:1], text[:200]]) or type(error).__name__


def _facts(step: int, seconds: float, val_loss: float | None) -> _Facts:
    known = None if val_loss is None or not math.isfinite(val_loss) else {"val_loss": float(val_loss)}  # nan would be taken for the lowest
    return _Facts(step, datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC), known)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
