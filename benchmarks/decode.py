"""Greedy decoding and prefill of a random GPT-2 124M beside other programs: `python benchmarks/decode.py` prints one JSON line.

Each program runs in its own process, on the same weights and prompts, with one thread a core; they take turns round by round, so that what else the machine
does hits all, and medians are compared. Tokens a second are new tokens over the whole call, prefill included (prefill rows: prompt tokens). A random model's
greedy text soon repeats itself, so that equal tokens are a weak check; quantised programs may part from the others early. What is not installed is skipped
and named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from peers import CORES, PROGRAMS, Worker, make_models, missing, serve

BASE = "transformers fp32"
#: Seconds between two turns: the threads of some programs spin on for a while when they are done, and would slow whoever comes next.
PAUSE = 0.5


def measure(workers: dict[str, Worker], rows: int, prompt_tokens: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Median seconds of each program, and how many of its first greedy tokens are those of the first program, of all."""
    prompts = np.random.default_rng(0).integers(0, 50257, (rows, prompt_tokens)).tolist()
    first = {name: worker(prompts, new_tokens)[1] for name, worker in workers.items()}  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            time.sleep(PAUSE)
            seconds[name].append(worker(prompts, new_tokens)[0])
    ours = next(iter(first.values()))
    same = {name: sum(_equal_start(a, b) for a, b in zip(ids, ours, strict=True)) / (rows * new_tokens) for name, ids in first.items()}
    return {"seconds": {name: statistics.median(times) for name, times in seconds.items()}, "same_greedy_tokens": same}


def _equal_start(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def throughput(result: dict[str, Any], tokens: int) -> dict[str, Any]:
    speed = {name: tokens / seconds for name, seconds in result["seconds"].items()}
    out: dict[str, Any] = {"tokens_per_s": {name: round(value, 1) for name, value in speed.items()}}
    if BASE in speed:
        out[f"times_{BASE}"] = {name: round(value / speed[BASE], 2) for name, value in speed.items()}
    return {**out, "same_greedy_tokens": {name: round(value, 3) for name, value in result["same_greedy_tokens"].items()}}


def by_context(workers: dict[str, Worker], rounds: int) -> dict[str, Any]:
    """Milliseconds a token at batch 1 behind 32 and behind 928 tokens (the difference of two calls), and the megabytes of float32 keys and values between."""
    out: dict[str, Any] = {"cache_MB_more": round(2 * 12 * 768 * 4 * (928 - 32) / 1e6, 1)}
    for context in (32, 928):
        short, long = (measure(workers, 1, context, new, rounds)["seconds"] for new in (1, 97))
        out[f"ms_per_token_at_{context}"] = {name: round((long[name] - short[name]) / 96 * 1e3, 2) for name in workers}
    return out


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    tables = {name: row["tokens_per_s"] for name, row in result.items() if isinstance(row, dict) and "tokens_per_s" in row}
    figure, axes = plt.subplots(1, len(tables), figsize=(4 * len(tables), 3.5), layout="constrained", squeeze=False)
    for axis, (name, speed) in zip(axes[0], tables.items(), strict=True):
        axis.barh(list(speed)[::-1], list(speed.values())[::-1], color=["tab:orange" if "gpt2jax" in program else "tab:grey" for program in list(speed)[::-1]])
        axis.set(title=name.replace("_", " "), xlabel="tokens/s")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--tables", nargs="+", choices=("decode", "prefill", "context"), default=["decode", "prefill", "context"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--prompt-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--folder", type=Path, help="keep the random models here, for the next call")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument("--worker", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return serve(PROGRAMS[options.worker](options.folder))
    skipped = {name: lacking for name in options.programs if (lacking := missing(name))}
    programs = [name for name in options.programs if name not in skipped]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        make_models(folder, programs)
        workers = {name: Worker(__file__, "--worker", name, "--folder", str(folder)) for name in programs}
        result: dict[str, Any] = {}
        if "decode" in options.tables:
            for batch in options.batches:
                timed = measure(workers, batch, options.prompt_tokens, options.new_tokens, options.rounds)
                result[f"batch_{batch}"] = throughput(timed, batch * options.new_tokens)
        if "prefill" in options.tables:
            result["prefill_1024"] = throughput(measure(workers, 1, 1024, 1, options.rounds), 1024)
        if "context" in options.tables:
            result["context"] = by_context(workers, options.rounds)
        for worker in workers.values():
            worker.stop()
    if options.plot:
        plot(result, options.plot)
    shape = dict(model="gpt2 124M random", cores=CORES, prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens, rounds=options.rounds)
    print(json.dumps({"benchmark": "decode", **shape, **result, "skipped": skipped}))


if __name__ == "__main__":
    main()
