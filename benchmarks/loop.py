"""What a run adds to its steps, and where: `python benchmarks/loop.py [CONFIG ...] [--section.key=value ...]` prints one JSON line.

A whole run (data, progress, metrics every train.log_every steps, one checkpoint at the end of `checkpoint.every`) whose steps are waited for and timed one by
one; what the loop takes beyond them is its own. By default GPT-2 124M, 4 rows of 256 tokens, 30 steps. Waiting for each step hides nothing that a run would
overlap, so a run's own share is at most this.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from typing import Any

import jax

from gpt2jax import runtime
from gpt2jax.config import load_config
from gpt2jax.training import loop

DEFAULTS = ["--model.preset=gpt2", "--train.sequence_length=256", "--train.batch_size=4", "--train.steps=30", "--eval.every=0", "--eval.sequences=4"]


def main() -> None:
    runtime.start()
    files, options = ([text for text in sys.argv[1:] if text.startswith("--") == wanted] for wanted in (False, True))
    starts: list[float] = []
    ends: list[float] = []
    make = loop.make_train_step

    def timed(*arguments: Any, **options: Any) -> Any:
        step = make(*arguments, **options)

        def run(*arguments: Any) -> Any:
            starts.append(time.perf_counter())
            result = jax.block_until_ready(step(*arguments))
            ends.append(time.perf_counter())
            return result

        return run

    loop.make_train_step = timed
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        fixed = [f"--run.dir={folder}/run", "--run.sample_prompt=none"]
        config = load_config(files or None, [*(DEFAULTS if not files else []), *options, *fixed])
        loop.train(config)
    bare, whole = sum(end - start for start, end in zip(starts[2:], ends[2:], strict=True)), ends[-1] - starts[2]
    shape = f"{config.train.batch_size}x{config.sequence_length}"
    result = dict(steps=len(ends) - 2, shape=shape, step_ms=round(1e3 * bare / (len(ends) - 2), 2), overhead_percent=round(100 * (whole / bare - 1), 2))
    print(json.dumps({"benchmark": "loop", **result}))


if __name__ == "__main__":
    main()
