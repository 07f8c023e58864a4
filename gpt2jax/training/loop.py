"""The training run: folder, data, steps, validation, checkpoints, and an orderly end on a signal. B batch, T tokens."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gpt2jax.analysis.peak import Utilisation
from gpt2jax.config import Config, HostsConfig, to_tree, to_yaml
from gpt2jax.data import TokenData, default_cache_dir, open_data, resolve_source
from gpt2jax.errors import InputError
from gpt2jax.kernels.backends import describe
from gpt2jax.model.gpt2 import GPT2, parameter_count
from gpt2jax.model.parameters import abstract_model, with_parameters
from gpt2jax.parallel import hosts
from gpt2jax.parallel.mesh import place_rows, rows_held, training_mesh
from gpt2jax.tokenizer import Tokenizer, load_tokenizer
from gpt2jax.training.checkpoint import Checkpoints
from gpt2jax.training.folder import CONFIG, TOKENIZER, require_unused, saved_config, write_text
from gpt2jax.training.metrics import MetricsFile, ProgressView
from gpt2jax.training.objective import summed_loss
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import TrainState, check_accumulation, init_state, make_train_step, state_shardings

#: What may change when a run goes on; everything else must be as it was, or the result would be neither run's.
_MAY_CHANGE = {"train.steps", "train.log_every", "data.source", "data.verify", "data.val_fraction", "data.split_seed"}
_MAY_CHANGE |= {"train.remat", "train.loss_chunk", "train.peak_tflops", "model.attention_backend"}  # other schedules of the same computation
_MAY_CHANGE_SECTIONS = {"mesh", "hosts", "eval", "checkpoint", "run"}


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
        config, splits, tokenizer, mesh, failed = *_check(config), None
    except InputError as error:
        failed = error
    if hosts.any_of(int(failed is not None)):  # every process must hear of it, or the others would wait
        raise failed or InputError("another host could not start; its own message says why")
    facts = {"the config": to_yaml(dataclasses.replace(config, hosts=HostsConfig())), "the data": splits["train"].fingerprint}
    hosts.agree({**facts, "the code": hosts.code_fingerprint()})
    try:
        with jax.set_mesh(mesh), _Signals() as signals:
            return _run(mesh, config, Path(config.run.dir), tokenizer, splits, signals)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # what a broken collective raises
        if jax.process_count() == 1 or isinstance(error, InputError):
            raise
        why = " ".join(str(error).split())[:200]
        raise RunFailed(f"another host is gone, or the network between them ({why}); start all hosts again with --run.resume=auto") from error


def _check(config: Config) -> tuple[Config, dict[str, TokenData], Tokenizer, Mesh]:
    """What a run is made of; InputError for whatever is wrong with it, before anything is written."""
    run_dir = Path(config.run.dir)
    earlier = _check_run_dir(run_dir, config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    config = _fit_tokenizer(config, tokenizer)
    if earlier is not None:
        _check_same(earlier, config, run_dir)
        if earlier.train.steps != config.train.steps and config.optimizer.decay_steps is None:
            steps = f"{earlier.train.steps}, is {config.train.steps}"
            print(f"note: train.steps was {steps}: the learning rate's decay is stretched with it (see optimizer.decay_steps)")
    splits = _open_splits(config, tokenizer)
    _check_data(run_dir / "data.json", splits["train"], resume=earlier is not None)
    describe(config.model, config.sequence_length)
    mesh = training_mesh(config)
    check_accumulation(config, mesh)
    return config, splits, tokenizer, mesh


def _run(mesh: Mesh, config: Config, run_dir: Path, tokenizer: Tokenizer, splits: dict[str, TokenData], signals: _Signals) -> int:
    skeleton = abstract_model(config.model)
    optimizer = make_optimizer(config.optimizer, config.train.steps, skeleton)
    schedule = make_schedule(config.optimizer, config.train.steps)
    shardings = state_shardings(config.model, optimizer, mesh)
    step_function = make_train_step(
        config.model, optimizer, schedule, config.optimizer.learning_rate, config.train.seed, config.train.remat, shardings,
        loss_chunk=config.train.loss_chunk, z_loss=config.train.z_loss, accumulation=config.train.accumulation,
    )  # fmt: skip
    evaluate = _make_evaluate(config, skeleton, mesh, tokenizer, splits["val"])

    if hosts.is_first():
        _lay_out(run_dir, config, tokenizer, splits["train"])
    hosts.wait("the run folder")
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    state = init_state(config.model, optimizer, config.train.seed, shardings)
    restored = checkpoints.restore(state)
    state = restored or state
    step, steps = int(state.step), config.train.steps
    metrics = MetricsFile(run_dir / "metrics.jsonl", step) if hosts.is_first() else None
    batch_tokens = config.train.batch_size * config.sequence_length
    devices = jax.devices()
    used = Utilisation.of(config.model, config.sequence_length, devices[0].device_kind, len(devices), config.train.peak_tflops)
    if hosts.is_first():
        _introduce(config, skeleton, splits, run_dir, step if restored else None, mesh)

    val_loss: float | None = None
    mark = (time.monotonic(), step)
    with ProgressView(steps, step, quiet=not hosts.is_first()) as view:
        if step > steps:
            raise InputError(f"{run_dir} is already at step {step}, past train.steps={steps}; raise train.steps")
        while step < steps and not signals.heard(step, config.train.log_every):
            batch = place_rows(functools.partial(splits["train"].batch, step), config.train.batch_size, config.sequence_length, mesh)
            state, measured = step_function(state, *batch)
            step += 1
            view.advance(step)
            last = step == steps
            val: dict[str, float] | None = None
            if last or (config.eval.every and step % config.eval.every == 0):
                val = evaluate(state, signals)
            if val is not None or last or step % config.train.log_every == 0:
                loss, norm = float(measured["loss"]), float(measured["grad_norm"])
                if not math.isfinite(loss) or not math.isfinite(norm):
                    checkpoints.close()
                    raise RunFailed(f"loss={loss}, grad_norm={norm} at step {step}: lower optimizer.learning_rate, or raise optimizer.warmup_steps")
                now = time.monotonic()
                step_s = max(now - mark[0], 1e-9) / max(step - mark[1], 1)
                rate, (mfu, causal_mfu) = batch_tokens / step_s, used.at(batch_tokens / step_s)
                mark = (now, step)
                val_loss = val["loss"] if val else None
                bits = val["bits_per_byte"] if val else None
                if metrics:
                    metrics.write(
                        step=step, tokens=step * batch_tokens, loss=loss, val_loss=val_loss, lr=float(measured["lr"]), grad_norm=norm,
                        tokens_per_s=round(rate, 1), val_bits_per_byte=bits, mfu=mfu, causal_mfu=causal_mfu,
                        memory_bytes=_memory(devices[0]),
                    )  # fmt: skip
                view.show(step, f"loss {loss:.4f}  {rate:,.0f} tokens/s" + (f"  MFU {mfu:.1%} (causal {causal_mfu:.1%})" if mfu is not None else ""))
                if val:
                    view.say(f"step {step}: val_loss {val_loss:.4f} ({bits:.3f} bits a byte), {batch_tokens * step:,} tokens")
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                checkpoints.save(state, val["loss"] if val else None)
        if signals.number:
            checkpoints.save(state)
            view.say(f"stopped by {signal.Signals(signals.number).name} at step {step}; checkpoint saved; go on with --run.resume=auto")
    checkpoints.close()
    if metrics:
        metrics.close()
    if signals.number:
        return 128 + signals.number
    _print_sample(config, with_parameters(skeleton, state.parameters), tokenizer)
    print(f"\nThe run is in {run_dir}. Sample from it: python sample.py {run_dir} --prompt TEXT", flush=True)
    return 0


def _check_run_dir(run_dir: Path, config: Config) -> Config | None:
    """The configuration of the run to go on with; None for a new run. InputError if the folder is used and may not be."""
    if config.run.resume == "never":
        require_unused(run_dir, "pass --run.resume=auto to go on with that run, or another --run.dir")
        return None
    earlier = saved_config(run_dir)
    if earlier is None:
        require_unused(run_dir, "it holds no run to go on with; choose another --run.dir")
    return earlier


def _check_same(earlier: Config, config: Config, run_dir: Path) -> None:
    before, now = to_tree(earlier), to_tree(config)
    changed = [
        f"{section}.{key} was {before[section][key]!r}, is {value!r}"
        for section, values in now.items()
        for key, value in values.items()
        if value != before[section][key] and section not in _MAY_CHANGE_SECTIONS and f"{section}.{key}" not in _MAY_CHANGE
    ]
    if changed:
        raise InputError(f"cannot go on with {run_dir}: {'; '.join(changed)}; pass the earlier values, or start in another --run.dir")


def _fit_tokenizer(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with the tokenizer's end of text; InputError if the model's vocabulary cannot hold the tokenizer's."""
    if tokenizer.n_vocab > config.model.vocab_size:
        raise InputError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {tokenizer.n_vocab} ids of data.tokenizer={config.data.tokenizer}; "
            f"pass --model.vocab_size={tokenizer.n_vocab}"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, eos_token_id=tokenizer.eot))


def _open_splits(config: Config, tokenizer: Tokenizer) -> dict[str, TokenData]:
    folder = resolve_source(config.data.source, tokenizer, val_fraction=config.data.val_fraction, seed=config.data.split_seed, cache_dir=default_cache_dir())
    return {
        split: open_data(
            folder, split=split, sequence_length=config.sequence_length, batch_size=config.train.batch_size, seed=config.train.seed, verify=config.data.verify
        )
        for split in ("train", "val")
    }


def _check_data(path: Path, data: TokenData, *, resume: bool) -> None:
    if resume and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
        if before != data.fingerprint:
            prints = f"fingerprint {before[:12]} in {path}, now {data.fingerprint[:12]}"
            raise InputError(f"the data has changed since this run began ({prints}); give the old data back, or start in another --run.dir")


def _lay_out(run_dir: Path, config: Config, tokenizer: Tokenizer, data: TokenData) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / TOKENIZER).is_dir():
        tokenizer.save(run_dir / TOKENIZER)
    write_text(run_dir / "data.json", json.dumps({"fingerprint": data.fingerprint, "tokens": data.tokens}) + "\n")
    write_text(run_dir / CONFIG, to_yaml(config))


def _introduce(config: Config, skeleton: GPT2, splits: dict[str, TokenData], run_dir: Path, resumed: int | None, mesh: Mesh) -> None:
    print(to_yaml(config))
    devices = jax.devices()
    print(
        f"model: {parameter_count(skeleton):,} parameters; devices: {len(devices)} x {devices[0].device_kind}; {describe(config.model, config.sequence_length)}"
    )
    rows, axes = config.train.batch_size, " x ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    held = rows_held(rows, config.sequence_length, mesh)
    first = hashlib.sha256(splits["train"].batch(0, slice(0, rows))[0].tobytes()).hexdigest()[:12]
    print(
        f"processes: {jax.process_count()}; mesh: {axes or 'one device'}; this process reads {len(held)} of a batch's {rows} rows ({_ranges(held)}); "
        f"the first batch's inputs have sha256 {first}"
    )
    sizes = ", ".join(f"{split} {data.tokens:,} tokens" for split, data in splits.items())
    print(f"data: {sizes}; {config.train.batch_size} x {config.sequence_length} tokens a step; run folder {run_dir}")
    if resumed is not None:
        print(f"going on from step {resumed}")
    print(flush=True)


def _memory(device: jax.Device) -> int | None:
    """The most bytes that arrays have taken on this process's first device so far; None where the platform doesn't count (a CPU)."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use") if device.process_index == jax.process_index() else None


def _ranges(numbers: list[int]) -> str:
    """As in 0-3, 8."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in zip(starts, ends, strict=True))


def _make_evaluate(config: Config, skeleton: GPT2, mesh: Mesh, tokenizer: Tokenizer, data: TokenData) -> Any:
    bytes_of_id = tokenizer.token_bytes()

    @jax.jit
    def batch_sum(parameters: dict[str, jax.Array], inputs_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        model = with_parameters(skeleton, parameters)
        return summed_loss(model, inputs_BT, targets_BT, chunk=config.train.loss_chunk)[1]

    def evaluate(state: TrainState, signals: _Signals) -> dict[str, float] | None:
        """Exact mean over all targets of the validation sequences; None if a signal came in between."""
        total, targets, text_bytes = 0.0, 0, 0
        batches: Iterable[tuple[np.ndarray, np.ndarray]] = data.eval_batches(config.eval.sequences)
        for inputs_BT, targets_BT in batches:
            rows, tokens = targets_BT.shape
            batch = place_rows(lambda part: (inputs_BT[part], targets_BT[part]), rows, tokens, mesh)  # noqa: B023
            total += float(batch_sum(state.parameters, *batch))
            real = targets_BT[targets_BT >= 0]
            targets, text_bytes = targets + real.size, text_bytes + int(bytes_of_id[real].sum())
            if signals.number and jax.process_count() == 1:  # several stop together, between two steps
                return None
        return {"loss": total / targets, "bits_per_byte": total / math.log(2) / max(text_bytes, 1)}

    return evaluate


def _print_sample(config: Config, model: GPT2, tokenizer: Tokenizer) -> None:
    if config.run.sample_prompt is None or jax.process_count() > 1:  # decoding runs in one process
        return
    from gpt2jax.decoding.generate import generate

    new = config.run.sample_tokens
    if config.model.context is not None:
        new = min(new, config.model.context + 1 - max(len(tokenizer.encode(config.run.sample_prompt)), 1))
    if new < 1:
        return
    [result] = generate(model, [config.run.sample_prompt], tokenizer=tokenizer, max_new_tokens=new, temperature=0.6, seed=config.train.seed)
    print(f"--- a sample of the trained model (temperature 0.6, seed {config.train.seed}) ---")
    print(f"{config.run.sample_prompt}{result.text}", flush=True)


class _Signals:
    """SIGTERM and the first Ctrl-C set `number`, which the loop looks at between steps and between validation batches; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> _Signals:
        self._before = {s: signal.signal(s, self._set) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def heard(self, step: int, every: int) -> int:
        """The signal to stop for, if there is one. Several processes ask each other every so many steps, and stop together."""
        if jax.process_count() == 1:
            return self.number
        agreed = hosts.any_of(self.number) if step % every == 0 else 0
        self.number = agreed or self.number  # one that came while the others were asked is told them the next time
        return agreed

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
