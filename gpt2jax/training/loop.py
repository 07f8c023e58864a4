"""The training run: folder, data, steps, validation, checkpoints, and an orderly end on a signal. B batch, T tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from gpt2jax.config import Config, HostsConfig, to_yaml
from gpt2jax.data import TokenData
from gpt2jax.data.prefetch import Prefetch
from gpt2jax.errors import InputError, RunFailed
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.lora import abstract_adapted, adapter_variables
from gpt2jax.parallel import hosts
from gpt2jax.parallel.mesh import place_rows
from gpt2jax.tokenizer import Tokenizer
from gpt2jax.training.checkpoint import Checkpoints
from gpt2jax.training.diagnosis import diagnose
from gpt2jax.training.evaluate import benchmarks, make_evaluate
from gpt2jax.training.initial import frozen_parameters, initial_state, plain_model
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.report import Report, introduce, sample_text
from gpt2jax.training.signals import Signals
from gpt2jax.training.start import check_run, lay_out
from gpt2jax.training.step import Metrics, TrainState, abstract_state, make_train_step, state_shardings
from gpt2jax.training.trace import Trace


def train(config: Config) -> int:
    """Run `config` to its end; returns the exit status: 0, or 128 + the number of the signal that ended it after a last checkpoint.

    Raises InputError for what can be mended (before anything is written) and RunFailed when the loss is no longer finite, the guard stops it, or its folders
    can't be written.
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
    except BrokenPipeError:  # the reader of our output has gone
        raise
    except OSError as error:
        where = f"a file of the run in {config.run.dir} can't be read or written"
        raise RunFailed(f"{where} ({_one_line(error)}); if the disk is full make room, and go on with --run.resume=auto") from error
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # what a broken collective raises
        if jax.process_count() == 1 or isinstance(error, InputError):
            raise
        why = _one_line(error)
        raise RunFailed(f"another host is gone, or the network between them ({why}); start all hosts again with --run.resume=auto") from error


def _run(mesh: Mesh, config: Config, run_dir: Path, tokenizer: Tokenizer, splits: dict[str, TokenData], signals: Signals) -> int:
    skeleton = abstract_adapted(config.model, config.lora)
    trained: Any = adapter_variables(skeleton) or skeleton
    optimizer = make_optimizer(config.optimizer, config.train.steps, trained)
    schedule = make_schedule(config.optimizer, config.train.steps)
    shardings = state_shardings(config.model, optimizer, mesh, skeleton, guarded=config.guard.action != "none")
    step_function = make_train_step(
        config.model, optimizer, schedule, config.optimizer.learning_rate, config.train.seed, config.train.remat, shardings,
        loss_chunk=config.train.loss_chunk, z_loss=config.train.z_loss, accumulation=config.train.accumulation, skeleton=skeleton, guard=config.guard,
        separator=config.separator,
    )  # fmt: skip
    evaluate = make_evaluate(config, skeleton, mesh, tokenizer, splits["val"])

    checkpoints = Checkpoints(run_dir, config.checkpoint)
    restored = checkpoints.restore(abstract_state(optimizer, shardings, skeleton))  # before anything is written, and before there is another state
    if restored and int(restored.step) > config.train.steps:
        raise InputError(f"{run_dir} is already at step {restored.step}, past train.steps={config.train.steps}; raise train.steps")
    if hosts.is_first():
        lay_out(run_dir, config, tokenizer, splits["train"])
    hosts.wait("the run folder")
    frozen = frozen_parameters(config, shardings, run_dir)
    state = dataclasses.replace(restored, frozen=frozen) if restored else initial_state(config, optimizer, shardings, frozen)
    step, steps = int(state.step), config.train.steps
    if hosts.is_first():
        introduce(config, skeleton, splits, run_dir, step if restored else None, mesh)

    def read(step: int) -> tuple[jax.Array, jax.Array]:
        return place_rows(functools.partial(splits["train"].batch, step), config.train.batch_size, config.sequence_length, mesh)

    unlogged = checkpoints.unlogged
    validates = hosts.any_of(int(unlogged is not None))  # a signal came in between
    traced = Trace(config.run.trace, run_dir, step)
    with Report(config, run_dir, step - validates) as report, Prefetch(read, stop=steps) as batches, traced as trace:
        watch = Watch(config, skeleton, read, report.say, checkpoints)
        if validates and (val := evaluate(state, signals)) and unlogged:
            report.log(step, **unlogged, val=val)  # type: ignore[arg-type]
        while step < steps and not signals.heard(step, config.train.log_every):
            trace.before(step + 1)
            state, measured = step_function(state, *batches.take(step))
            step += 1
            trace.after(step, state)
            watch.add(step, measured)
            report.advance(step)
            checkpoints.check()
            last = step == steps
            validates = last or bool(config.eval.every and step % config.eval.every == 0)
            logs = validates or step % config.train.log_every == 0
            saves = last or bool(config.checkpoint.every and step % config.checkpoint.every == 0) or (logs and checkpoints.overdue())
            if logs or saves:
                watch.look(state)
            val = evaluate(state, signals) if validates else None
            unlogged = None
            if logs:
                numbers = {key: float(value) for key, value in measured.items() if key in ("loss", "grad_norm", "lr") or key.startswith("moe_load_")}
                if validates and val is None:
                    unlogged = numbers  # the next start validates, and logs them
                else:
                    report.log(step, **numbers, val=val, skipped=watch.skipped)
            if saves:
                checkpoints.save(state, val["loss"] if val else None, unlogged)
            if config.run.sample_every and step % config.run.sample_every == 0 and not last:
                report.say(sample_text(config, plain_model(config, state), tokenizer) or "")
        if signals.number:
            watch.look(state)
            checkpoints.save(state, unlogged=unlogged)
            report.say(f"stopped by {signal.Signals(signals.number).name} at step {step}; checkpoint saved; go on with --run.resume=auto")
    checkpoints.close()
    try:
        signals.end_at_once()
        if text := sample_text(config, plain_model(config, state), tokenizer):
            print(text)
    except SystemExit as ended:
        return int(str(ended.code))
    print(f"\nThe run is in {run_dir}. Sample from it: python sample.py {run_dir} --prompt TEXT", flush=True)
    return 0


class Watch:
    """What the step decided on the device, looked at from time to time: each step that was not applied is reported, or ends the run."""

    def __init__(
        self, config: Config, skeleton: GPT2, batch_of: Callable[[int], tuple[jax.Array, jax.Array]], say: Callable[[str], None], checkpoints: Checkpoints
    ) -> None:
        self._config, self._skeleton, self._batch_of, self._say, self._checkpoints = config, skeleton, batch_of, say, checkpoints
        self._since: dict[int, Metrics] = {}
        self.skipped: int | None = None

    def add(self, step: int, measured: Metrics) -> None:
        self._since[step] = measured

    def look(self, state: TrainState) -> None:
        """Report what was skipped since the last look. RunFailed, naming step, loss, gradient norm and the cause, if the run has ended on the device."""
        since, self._since = self._since, {}
        ended = -int(state.step) if int(state.step) < 0 else None
        guard = self._config.guard
        skipped = None if state.guard is None else int(state.guard.skipped)
        for step, measured in since.items() if skipped != self.skipped or ended else ():
            loss, norm, z = (float(measured[key]) for key in ("loss", "grad_norm", "z"))
            what = f"loss={loss:.6g}, grad_norm={norm:.6g}"
            spike = f"{what}, {z:.1f} standard deviations above the mean (guard.threshold={guard.threshold:g})" if math.isfinite(z) else what
            if step == ended:
                self._checkpoints.close()  # one that is being written is what the run may go on from
                raise RunFailed(f"at step {step} {spike}{self._explain(state, step, math.isfinite(z))}")
            if not bool(measured["applied"]):
                self._say(f"step {step} skipped by the guard: {spike}")
        self.skipped = skipped

    def _explain(self, state: TrainState, step: int, finite: bool) -> str:
        guard = self._config.guard
        why, out = "", "--guard.action=skip"
        if guard.action == "skip":
            why = f", the last of guard.patience={guard.patience} in a row that were skipped"
            out = "another guard, from an earlier checkpoint (remove later ones first)"
        if not finite:
            why += f": {diagnose(self._config, self._skeleton, state, *self._batch_of(step - 1))}"
        anew = "start in another --run.dir with a lower optimizer.learning_rate or more optimizer.warmup_steps"
        return f"{why}; the step was not applied; go on with --run.resume=auto and {out}, or {anew}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
