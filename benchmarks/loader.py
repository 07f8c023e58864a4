"""What reading data costs a step: `python benchmarks/loader.py [DIR]` prints one JSON line.

A small model (2 layers of width 128 and byte tokens, 8 rows of 256) is trained on real batches, read and placed as a run does it, and on one batch that
stays on the device. The two take turns of 10 steps; times are medians over the turns. DIR is what data.source takes; python-stdlib by default.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time

import jax

from gpt2jax import runtime
from gpt2jax.config import Config, load_config
from gpt2jax.data import open_splits
from gpt2jax.data.prefetch import Prefetch
from gpt2jax.model.parameters import abstract_model
from gpt2jax.parallel.mesh import place_rows, training_mesh
from gpt2jax.tokenizer import load_tokenizer
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import init_state, make_train_step, state_shardings

TURNS, STEPS = 12, 10


def measure(config: Config) -> dict[str, float]:
    data = open_splits(config.data.source, load_tokenizer(config.data.tokenizer), sequence_length=256, batch_size=8, seed=0, verify=False)["train"]
    mesh = training_mesh(config)
    optimizer = make_optimizer(config.optimizer, config.train.steps, abstract_model(config.model))
    shardings = state_shardings(config.model, optimizer, mesh)
    schedule = make_schedule(config.optimizer, config.train.steps)
    train_step = make_train_step(config.model, optimizer, schedule, config.optimizer.learning_rate, 0, shardings=shardings, loss_chunk=1024)
    seconds: dict[str, list[float]] = {"real": [], "same": [], "waiting": []}
    with jax.set_mesh(mesh), Prefetch(lambda step: place_rows(functools.partial(data.batch, step), 8, 256, mesh), stop=10**9) as batches:
        state, same, step, waited = init_state(config.model, optimizer, 0, shardings), batches.take(0), 0, 0.0
        for turn in range(TURNS + 1):
            for kind in ("real", "same") if turn % 2 else ("same", "real"):
                start, waited = time.perf_counter(), 0.0
                for _ in range(STEPS):
                    asked = time.perf_counter()
                    batch = batches.take(step) if kind == "real" else same
                    waited += time.perf_counter() - asked
                    step += kind == "real"
                    state, measured = train_step(state, *batch)
                jax.block_until_ready(measured)
                if turn:  # the first compiles
                    seconds[kind].append((time.perf_counter() - start) / STEPS)
                    seconds["waiting"] += [waited / STEPS] if kind == "real" else []
    more = statistics.median(real / same for real, same in zip(seconds["real"], seconds["same"], strict=True)) - 1
    return {**{f"{kind}_ms": round(1e3 * statistics.median(times), 3) for kind, times in seconds.items()}, "more_percent": round(100 * more, 2)}


if __name__ == "__main__":
    runtime.start()
    model = ["--model.vocab_size=257", "--model.n_layer=2", "--model.n_embd=128", "--model.n_head=4", "--model.n_positions=256"]
    options = [*model, "--data.tokenizer=bytes", "--train.batch_size=8", *(f"--data.source={source}" for source in sys.argv[1:])]
    print(json.dumps(measure(load_config(None, options))))
