"""Greedy decoding of a random GPT-2 124M in float32, beside transformers: `python benchmarks/decode.py` prints one JSON line.

Each program runs in its own process, on the same weights and prompts, with one thread a core; they take turns round by round, so that what else the machine
does hits both, and medians are compared. Tokens a second are new tokens over the whole call, prefill included. Without torch and transformers only gpt2jax
runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

#: What `gpt2jax.runtime` sets, given to every program: memory that is freed stays with the process.
KEEP_HEAP = dict(MALLOC_ARENA_MAX="1", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="200000000000", MALLOC_TOP_PAD_="67108864")


def gpt2jax_program(folder: Path, new_tokens: int) -> Callable[[list[list[int]]], list[list[int]]]:
    import gpt2jax
    from gpt2jax import runtime

    runtime.start()
    if (folder / "config.json").is_file():
        model, _ = gpt2jax.load(folder)
    else:
        import jax

        config = gpt2jax.ModelConfig.preset("gpt2")
        model = jax.jit(lambda key: gpt2jax.GPT2(config, key))(jax.random.key(0))

    def run(prompts: list[list[int]]) -> list[list[int]]:
        return [row.tokens for row in gpt2jax.generate(model, prompts, max_new_tokens=new_tokens, temperature=0, eos_token_id=None)]

    return run


def transformers_program(folder: Path, new_tokens: int) -> Callable[[list[list[int]]], list[list[int]]]:
    import torch
    import transformers

    torch.set_num_threads(CORES)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return out[:, ids.shape[1] :].tolist()

    return run


PROGRAMS = {"gpt2jax": gpt2jax_program, "transformers": transformers_program}


def write_random_model(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)


def work(name: str, folder: Path, new_tokens: int) -> None:
    """Answer each line of prompts with a line of seconds and ids."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    run = PROGRAMS[name](folder, new_tokens)
    for line in sys.stdin:
        prompts = json.loads(line)
        start = time.perf_counter()
        ids = run(prompts)
        print(json.dumps([time.perf_counter() - start, ids]), file=answers, flush=True)


class Worker:
    """One program in its own process."""

    def __init__(self, name: str, folder: Path, new_tokens: int) -> None:
        command = [sys.executable, __file__, "--worker", name, "--folder", str(folder), "--new-tokens", str(new_tokens)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **KEEP_HEAP})

    def __call__(self, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.process.args} has ended; its messages stand above")
        seconds, ids = json.loads(answer)
        return seconds, ids

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(workers: dict[str, Worker], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    prompts = np.random.default_rng(0).integers(0, 50257, (batch, options.prompt_tokens)).tolist()
    first = {name: worker(prompts)[1] for name, worker in workers.items()}  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(options.rounds):
        for name, worker in workers.items():
            seconds[name].append(worker(prompts)[0])
    speed = {name: batch * options.new_tokens / statistics.median(times) for name, times in seconds.items()}
    result: dict[str, Any] = {"tokens_per_s": {name: round(value, 1) for name, value in speed.items()}}
    if "transformers" in speed:
        pairs = zip(seconds["transformers"], seconds["gpt2jax"], strict=True)
        result["ratio"] = round(statistics.median(theirs / ours for theirs, ours in pairs), 3)
        result["equal_rows"] = sum(a == b for a, b in zip(first["gpt2jax"], first["transformers"], strict=True))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--prompt-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--worker", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options.folder, options.new_tokens)
    both = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    with tempfile.TemporaryDirectory() as folder:
        if both:
            write_random_model(Path(folder))
        workers = {name: Worker(name, Path(folder), options.new_tokens) for name in (PROGRAMS if both else ["gpt2jax"])}
        batches = {f"batch_{batch}": measure(workers, batch, options) for batch in options.batches}
        for worker in workers.values():
            worker.stop()
    shape = dict(model="gpt2 124M random float32", cores=CORES, prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens, rounds=options.rounds)
    print(json.dumps({"benchmark": "decode", **shape, **batches}))


if __name__ == "__main__":
    main()
