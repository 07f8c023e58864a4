"""What a run is made of, checked before anything is written: its folder, its config against an earlier one's, data, tokenizer and mesh."""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path

from jax.sharding import Mesh

from gpt2jax.config import Config, to_tree, to_yaml
from gpt2jax.data import TokenData, open_splits
from gpt2jax.errors import InputError
from gpt2jax.kernels.backends import describe
from gpt2jax.parallel import hosts
from gpt2jax.parallel.mesh import training_mesh
from gpt2jax.tokenizer import Tokenizer, load_tokenizer
from gpt2jax.training.evaluate import benchmarks
from gpt2jax.training.folder import (
    CHECKPOINTS,
    CONFIG,
    DATA,
    TOKENIZER,
    checkpoint_folder,
    finished_steps,
    is_url,
    remove_drafts,
    require_unused,
    require_writable,
    run_id,
    saved_config,
    write_text,
    write_whole,
)
from gpt2jax.training.initial import check_start
from gpt2jax.training.step import check_accumulation
from gpt2jax.training.track import check_tracker

#: What may change when a run goes on; everything else must be as it was, or the result would be neither run's.
_MAY_CHANGE = {"train.steps", "train.log_every", "data.source", "data.verify", "data.val_fraction", "data.split_seed"}
_MAY_CHANGE |= {"train.remat", "train.loss_chunk", "train.peak_tflops", "model.attention_backend"}  # other schedules of the same computation
_MAY_CHANGE_SECTIONS = {"mesh", "hosts", "eval", "checkpoint", "guard", "run"}  # guard: one that is turned on goes around the spike that ended a run
_MUST_STAY = {"run.init_from"}


def check_run(config: Config) -> tuple[Config, dict[str, TokenData], Tokenizer, Mesh]:
    """What a run is made of; InputError for whatever is wrong with it, before anything is written."""
    run_dir, config = Path(config.run.dir), _from_anywhere(config)
    earlier = _check_run_dir(run_dir, config)
    kept = run_dir / TOKENIZER  # where the first one came from may be gone
    tokenizer = load_tokenizer(str(kept) if earlier and config.run.init_from and kept.is_dir() else config.data.tokenizer)
    config = _fit_tokenizer(config, tokenizer)
    if earlier is not None:
        _check_same(earlier, config, run_dir)
        if earlier.train.steps != config.train.steps and config.optimizer.decay_steps is None:
            steps = f"{earlier.train.steps}, is {config.train.steps}"
            print(f"note: train.steps was {steps}: the learning rate's decay is stretched with it (see optimizer.decay_steps)")
    else:
        check_start(config, tokenizer)
    splits = _open_splits(config, tokenizer)
    _check_data(run_dir / DATA, splits["train"], resume=earlier is not None)
    benchmarks(config.eval, tokenizer)
    if hosts.is_first():
        check_tracker(config.run.track)
    describe(config.model, config.sequence_length, segments=config.data.separate_documents)
    mesh = training_mesh(config)
    check_accumulation(config, mesh)
    return config, splits, tokenizer, mesh


def lay_out(run_dir: Path, config: Config, tokenizer: Tokenizer, data: TokenData) -> None:
    """Write what a run folder holds beside checkpoints and metrics. Wherever a process is killed in here, the next one starts or goes on."""
    run_dir.mkdir(parents=True, exist_ok=True)
    remove_drafts(run_dir)
    write_text(run_dir / CONFIG, to_yaml(config))  # first: it makes the folder one to go on with
    if not (run_dir / TOKENIZER).is_dir():
        write_whole(run_dir / TOKENIZER, tokenizer.save)
    facts = {"fingerprint": data.fingerprint, "tokens": data.tokens, "run": run_id(run_dir) or uuid.uuid4().hex}
    write_text(run_dir / DATA, json.dumps(facts) + "\n")


def _check_run_dir(run_dir: Path, config: Config) -> Config | None:
    """The configuration of the run to go on with; None for a new run. InputError if the folder, or that of its checkpoints, is used and may not be."""
    earlier = None if config.run.resume == "never" else saved_config(run_dir)
    if earlier is None:
        never = "pass --run.resume=auto to go on with that run, or another --run.dir"
        require_unused(run_dir, never if config.run.resume == "never" else "it holds no run to go on with; choose another --run.dir")
    require_writable(run_dir, "run.dir")
    where = config.checkpoint.dir
    if where is None or not is_url(where):
        require_writable(Path(where or run_dir / CHECKPOINTS), "checkpoint.dir")
    steps, before = _steps(run_dir, config), [] if earlier is None else _steps(run_dir, earlier)
    if earlier is None and steps:
        raise InputError(f"checkpoint.dir={where} holds checkpoints of another run (steps {steps}); give a folder of its own")
    if before and not steps:
        there = checkpoint_folder(run_dir, earlier.checkpoint.dir if earlier else None)
        raise InputError(f"the checkpoints of {run_dir} are in {there}, and checkpoint.dir={where} has none; move them there first")
    return earlier


def _from_anywhere(config: Config) -> Config:
    """The config with a checkpoint.dir that means the same in any working folder."""
    where = config.checkpoint.dir
    if where is None or is_url(where):
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, dir=str(Path(where).absolute())))


def _steps(run_dir: Path, config: Config) -> list[int]:
    folder = checkpoint_folder(run_dir, config.checkpoint.dir)
    try:
        return finished_steps(folder)
    except Exception as error:  # what the packages behind a URL raise is of many kinds
        raise InputError(f"cannot read checkpoint.dir={config.checkpoint.dir}: {' '.join(str(error).split())[:200]}") from error


def _check_same(earlier: Config, config: Config, run_dir: Path) -> None:
    before, now = to_tree(earlier), to_tree(config)
    changed = [
        f"{section}.{key} was {before[section][key]!r}, is {value!r}"
        for section, values in now.items()
        for key, value in values.items()
        if value != before[section][key] and not _may_change(section, key)
    ]
    if changed:
        raise InputError(f"cannot go on with {run_dir}: {'; '.join(changed)}; pass the earlier values, or start in another --run.dir")


def _may_change(section: str, key: str) -> bool:
    name = f"{section}.{key}"
    return name not in _MUST_STAY and (section in _MAY_CHANGE_SECTIONS or name in _MAY_CHANGE)


def _fit_tokenizer(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with the tokenizer's end of text; InputError if the model's vocabulary cannot hold the tokenizer's."""
    if tokenizer.n_vocab > config.model.vocab_size:
        raise InputError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {tokenizer.n_vocab} ids of data.tokenizer={config.data.tokenizer}; "
            f"pass --model.vocab_size={tokenizer.n_vocab}"
        )
    if config.data.separate_documents and tokenizer.eot is None:
        raise InputError(f"data.separate_documents needs an end of text between documents, and data.tokenizer={config.data.tokenizer} has none; leave it out")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, eos_token_id=tokenizer.eot))


def _open_splits(config: Config, tokenizer: Tokenizer) -> dict[str, TokenData]:
    data, train = config.data, config.train
    return open_splits(
        data.source, tokenizer, sequence_length=config.sequence_length, batch_size=train.batch_size, seed=train.seed, verify=data.verify,
        val_fraction=data.val_fraction, split_seed=data.split_seed,
    )  # fmt: skip


def _check_data(path: Path, data: TokenData, *, resume: bool) -> None:
    if resume and path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path} is damaged: no fingerprint of the data can be read; remove it if the data is as it was") from None
        if before != data.fingerprint:
            prints = f"fingerprint {before[:12]} in {path}, now {data.fingerprint[:12]}"
            raise InputError(f"the data has changed since this run began ({prints}); give the old data back, or start in another --run.dir")
