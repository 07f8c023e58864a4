"""What a run tells its user: at the start what it is and where it runs, then its metrics, at the end a sample."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from gpt2jax.analysis.evals import HELLASWAG, LAMBADA
from gpt2jax.analysis.peak import Utilisation
from gpt2jax.config import Config, to_yaml
from gpt2jax.data import TokenData
from gpt2jax.kernels.backends import describe
from gpt2jax.model.gpt2 import GPT2, parameter_count
from gpt2jax.model.lora import adapter_variables
from gpt2jax.parallel import hosts
from gpt2jax.parallel.mesh import rows_held
from gpt2jax.tokenizer import Tokenizer
from gpt2jax.training.metrics import MetricsFile, ProgressView
from gpt2jax.training.track import open_tracker


class Report:
    """The metrics of a run: a line of metrics.jsonl and one on the terminal for each `log`. In processes other than the first it does nothing."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        """For a run at `step`; what metrics.jsonl says of later ones is dropped."""
        devices = jax.devices()
        self._used = Utilisation.of(config.model, config.sequence_length, devices[0].device_kind, len(devices), config.train.peak_tflops)
        if config.lora.rank is not None:
            self._used = dataclasses.replace(self._used, peak=None)  # its FLOPs are those of training all weights
        self._scores = [*(HELLASWAG if config.eval.hellaswag else ()), *(LAMBADA if config.eval.lambada else ())]
        self._batch_tokens = config.train.batch_size * config.sequence_length
        self._file = MetricsFile(run_dir / "metrics.jsonl", step) if hosts.is_first() else None
        self._view = ProgressView(config.train.steps, step, quiet=not hosts.is_first())
        self._tracker = open_tracker(config, run_dir, step) if hosts.is_first() else None
        self._mark = (time.monotonic(), step)
        self.say, self.advance = self._view.say, self._view.advance

    def __enter__(self) -> Report:
        self._view.__enter__()
        self._mark = (time.monotonic(), self._mark[1])
        return self

    def __exit__(self, *error: Any) -> None:
        self._view.__exit__(*error)
        if self._file:
            self._file.close()
        if self._tracker:
            self._tracker.close()

    def log(self, step: int, loss: float, grad_norm: float, lr: float, val: dict[str, float] | None, skipped: int | None = None, **loads: float) -> None:
        """skipped: steps that the guard has skipped so far. loads: of experts, if there are any (`load_metrics`). What is not finite, as in a step that the
        guard skipped, is written as null."""
        now, (then, before) = time.monotonic(), self._mark
        self._mark = (now, step)
        rate = self._batch_tokens * max(step - before, 1) / max(now - then, 1e-9)
        mfu, causal_mfu = self._used.at(rate)
        if self._file:
            values = dict(
                step=step, tokens=step * self._batch_tokens, loss=_finite(loss), val_loss=_finite(val["loss"]) if val else None, lr=lr,
                grad_norm=_finite(grad_norm), tokens_per_s=round(rate, 1), val_bits_per_byte=_finite(val["bits_per_byte"]) if val else None, mfu=mfu,
                causal_mfu=causal_mfu, memory_bytes=_peak_memory(), skipped=skipped, **{name: (val or {}).get(name) for name in self._scores},
                **{name: _finite(value) for name, value in loads.items()},
            )  # fmt: skip
            self._file.write(**values)
            if self._tracker:
                self._tracker.log(values)
        note = f"loss {loss:.4f}  {rate:,.0f} tokens/s"
        self._view.show(step, note if mfu is None else f"{note}  MFU {mfu:.1%} (causal {causal_mfu:.1%})")
        if val:
            scores = "".join(f", {name} {val[name]:.4g}" for name in self._scores)
            self.say(f"step {step}: val_loss {val['loss']:.4f} ({val['bits_per_byte']:.3f} bits a byte){scores}, {self._batch_tokens * step:,} tokens")


def introduce(config: Config, skeleton: GPT2, splits: dict[str, TokenData], run_dir: Path, resumed: int | None, mesh: Mesh) -> None:
    print(to_yaml(config))
    devices = jax.devices()
    adapters = sum(leaf.size for leaf in adapter_variables(skeleton).values())
    note = f"; lora trains {adapters:,} beside them" if adapters else ""
    print(
        f"model: {parameter_count(skeleton) - adapters:,} parameters{note}; devices: {len(devices)} x {devices[0].device_kind}; "
        f"{describe(config.model, config.sequence_length, segments=config.data.separate_documents)}"
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


def sample_text(config: Config, model: GPT2, tokenizer: Tokenizer) -> str | None:
    """The text that run.sample_prompt asks for, under a line that says what it is; None if it asks for none."""
    if config.run.sample_prompt is None or jax.process_count() > 1:  # decoding runs in one process
        return None
    from gpt2jax.decoding.generate import generate

    new = config.run.sample_tokens
    if config.model.context is not None:
        new = min(new, config.model.context + 1 - max(len(tokenizer.encode(config.run.sample_prompt)), 1))
    if new < 1:
        return None
    [result] = generate(model, [config.run.sample_prompt], tokenizer=tokenizer, max_new_tokens=new, temperature=0.6, seed=config.train.seed)
    return f"--- a sample of the trained model (temperature 0.6, seed {config.train.seed}) ---\n{config.run.sample_prompt}{result.text}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _peak_memory() -> int | None:
    """The most bytes that arrays have taken on this process's first device so far; None where the platform doesn't count (a CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _ranges(numbers: list[int]) -> str:
    """As in 0-3, 8."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in zip(starts, ends, strict=True))
