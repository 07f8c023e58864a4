"""Training steps of GPT-2 124M beside nanoGPT's in PyTorch: `python benchmarks/step.py` prints one JSON line.

Each program runs in its own process with one thread a core and the same settings of the allocator; they take turns step by step, and medians are compared.
Shapes are rows x tokens. peak_GB is the most memory that a process held, compilation included. Without torch only our own steps are timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from peers import CORES, Worker, serve

PROGRAMS = ("gpt2jax fp32", "gpt2jax bf16", "nanoGPT fp32", "nanoGPT bf16", "nanoGPT fp32 compiled", "nanoGPT bf16 compiled")


def our_step(dtype: str) -> Callable[[np.ndarray], float]:
    from gpt2jax import runtime
    from gpt2jax.config import ModelConfig, OptimizerConfig, TrainConfig
    from gpt2jax.model.parameters import abstract_model
    from gpt2jax.training.optimizer import make_optimizer, make_schedule
    from gpt2jax.training.step import init_state, make_train_step

    runtime.start()
    config = ModelConfig(compute_dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype])
    options = OptimizerConfig()
    optimizer = make_optimizer(options, 1000, abstract_model(config))
    schedule = make_schedule(options, 1000)
    run = make_train_step(config, optimizer, schedule, options.learning_rate, 0, loss_chunk=TrainConfig().loss_chunk)
    state = init_state(config, optimizer, 0)

    def step(tokens: np.ndarray) -> float:
        nonlocal state
        state, metrics = run(state, tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32))
        return float(metrics["loss"])

    return step


def work(program: str) -> None:
    name, dtype, *compiled = program.split()
    random = np.random.default_rng(0)
    if name == "gpt2jax":
        step = our_step(dtype)
    else:
        from nanogpt import make_step

        step = make_step(dtype, bool(compiled), CORES)

    def run(rows: int, tokens: int) -> list[float]:
        loss = step(random.integers(0, 50257, (rows, tokens + 1)))
        return [loss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6]

    serve(run)


def measure(programs: list[str], rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    workers = {name: Worker(__file__, "--worker", name) for name in programs}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    peaks = {}
    for number in range(rounds + 2):
        for name, worker in workers.items():
            took, (loss, peaks[name]) = worker(rows, tokens)
            assert 5 < loss < 13, f"{name}: a loss of {loss}"
            if number > 1:  # the first compiles; the second still finds its memory
                seconds[name].append(took)
            time.sleep(0.5)  # threads of some programs spin on for a while when they are done
    for worker in workers.values():
        worker.stop()
    speed = {name: rows * tokens / statistics.median(times) for name, times in seconds.items()}
    result: dict[str, Any] = {"tokens_per_s": {name: round(value, 1) for name, value in speed.items()}}
    for dtype in ("fp32", "bf16"):
        theirs = [value for name, value in speed.items() if name.startswith(f"nanoGPT {dtype}")]
        if theirs and f"gpt2jax {dtype}" in speed:
            result[f"{dtype}_times_nanoGPT"] = round(speed[f"gpt2jax {dtype}"] / max(theirs), 3)
    return {**result, "peak_GB": {name: round(peak, 2) for name, peak in peaks.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--shapes", nargs="+", default=["4x256", "4x1024"], metavar="BxT")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--worker", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker)
    skipped = [] if importlib.util.find_spec("torch") else [name for name in options.programs if name.startswith("nanoGPT")]
    programs = [name for name in options.programs if name not in skipped]
    tables = {shape: measure(programs, *map(int, shape.split("x")), options.rounds) for shape in options.shapes}
    print(json.dumps({"benchmark": "step", "model": "gpt2 124M", "cores": CORES, "rounds": options.rounds, **tables, "skipped": skipped}))


if __name__ == "__main__":
    main()
