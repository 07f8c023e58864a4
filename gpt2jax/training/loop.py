"""The training run: folder, data, steps, validation, checkpoints, and an orderly end on a signal. B batch, T tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
import signal
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from gpt2jax.config import Config, HostsConfig, to_yaml
from gpt2jax.data import TokenData
from gpt2jax.data.prefetch import Prefetch
from gpt2jax.errors import InputError
from gpt2jax.model.lora import abstract_adapted, adapter_variables
from gpt2jax.parallel import hosts
from gpt2jax.parallel.mesh import place_rows
from gpt2jax.tokenizer import Tokenizer
from gpt2jax.training.checkpoint import Checkpoints
from gpt2jax.training.evaluate import benchmarks, make_evaluate
from gpt2jax.training.folder import finished_steps
from gpt2jax.training.initial import initial_state, plain_model
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.report import Report, introduce, sample_text
from gpt2jax.training.signals import Signals
from gpt2jax.training.start import check_run, lay_out
from gpt2jax.training.step import make_train_step, state_shardings
from gpt2jax.training.trace import Trace


class RunFailed(RuntimeError):
    """The run cannot go on; the message is one line."""


def train(config: Config) -> int:
    """Run `config` to its end; returns the exit status: 0, or 128 + the number of the signal that ended it after a last checkpoint.

    Raises InputError for what can be mended (before anything is written) and RunFailed when the loss is no longer finite.
    """
    hosts.join(config.hosts)
    with hosts.one_voice():
        return _train(config)


def _train(config: Config) -> int:
    try:
        config, splits, tokenizer, mesh, failed = *check_run(config), None
    except InputError as error:
        failed = error
    if hosts.any_of(int(failed is not None)):  # every process must hear of it, or the others would wait
        raise failed or InputError("another host could not start; its own message says why")
    facts = {"the config": to_yaml(dataclasses.replace(config, hosts=HostsConfig())), "the data": splits["train"].fingerprint}
    facts["the benchmarks"] = repr([benchmark.rows for benchmark in benchmarks(config.eval, tokenizer)])
    hosts.agree({**facts, "the code": hosts.code_fingerprint()})
    try:
        with jax.set_mesh(mesh), Signals() as signals:
            return _run(mesh, config, Path(config.run.dir), tokenizer, splits, signals)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # what a broken collective raises
        if jax.process_count() == 1 or isinstance(error, InputError):
            raise
        why = " ".join(str(error).split())[:200]
        raise RunFailed(f"another host is gone, or the network between them ({why}); start all hosts again with --run.resume=auto") from error


def _run(mesh: Mesh, config: Config, run_dir: Path, tokenizer: Tokenizer, splits: dict[str, TokenData], signals: Signals) -> int:
    skeleton = abstract_adapted(config.model, config.lora)
    trained: Any = adapter_variables(skeleton) or skeleton
    optimizer = make_optimizer(config.optimizer, config.train.steps, trained)
    schedule = make_schedule(config.optimizer, config.train.steps)
    shardings = state_shardings(config.model, optimizer, mesh, skeleton)
    step_function = make_train_step(
        config.model, optimizer, schedule, config.optimizer.learning_rate, config.train.seed, config.train.remat, shardings,
        loss_chunk=config.train.loss_chunk, z_loss=config.train.z_loss, accumulation=config.train.accumulation, skeleton=skeleton,
    )  # fmt: skip
    evaluate = make_evaluate(config, skeleton, mesh, tokenizer, splits["val"])

    if hosts.is_first():
        lay_out(run_dir, config, tokenizer, splits["train"])
    hosts.wait("the run folder")
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    state = initial_state(config, optimizer, shardings, run_dir, going_on=bool(finished_steps(run_dir)))
    restored = checkpoints.restore(state)
    state = restored or state
    step, steps = int(state.step), config.train.steps
    if hosts.is_first():
        introduce(config, skeleton, splits, run_dir, step if restored else None, mesh)

    def read(step: int) -> tuple[jax.Array, jax.Array]:
        return place_rows(functools.partial(splits["train"].batch, step), config.train.batch_size, config.sequence_length, mesh)

    with Report(config, run_dir, step) as report, Prefetch(read, stop=steps) as batches, Trace(config.run.trace, run_dir, step) as trace:
        if step > steps:
            raise InputError(f"{run_dir} is already at step {step}, past train.steps={steps}; raise train.steps")
        while step < steps and not signals.heard(step, config.train.log_every):
            trace.before(step + 1)
            state, measured = step_function(state, *batches.take(step))
            step += 1
            trace.after(step, state)
            report.advance(step)
            last = step == steps
            val = evaluate(state, signals) if last or (config.eval.every and step % config.eval.every == 0) else None
            if val is not None or last or step % config.train.log_every == 0:
                loss, norm = float(measured["loss"]), float(measured["grad_norm"])
                if not math.isfinite(loss) or not math.isfinite(norm):
                    checkpoints.close()
                    raise RunFailed(f"loss={loss}, grad_norm={norm} at step {step}: lower optimizer.learning_rate, or raise optimizer.warmup_steps")
                report.log(step, loss, norm, float(measured["lr"]), val)
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                checkpoints.save(state, val["loss"] if val else None)
            if config.run.sample_every and step % config.run.sample_every == 0 and not last:
                report.say(sample_text(config, plain_model(config, state), tokenizer) or "")
        if signals.number:
            checkpoints.save(state)
            report.say(f"stopped by {signal.Signals(signals.number).name} at step {step}; checkpoint saved; go on with --run.resume=auto")
    checkpoints.close()
    if signals.number:
        return 128 + signals.number
    if text := sample_text(config, plain_model(config, state), tokenizer):
        print(text)
    print(f"\nThe run is in {run_dir}. Sample from it: python sample.py {run_dir} --prompt TEXT", flush=True)
    return 0
