"""gpt2jax.data.prefetch: the same batches as without it, made before they are asked for, and no thread left behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2jax.config import load_config
from gpt2jax.data import TokenData
from gpt2jax.data.batches import TokenSource
from gpt2jax.data.prefetch import Prefetch


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_batches_are_those_of_their_steps() -> None:
    data = TokenData([TokenSource([np.arange(1000)], 1000, "")], sequence_length=9, batch_size=4, seed=1)
    with Prefetch(data.batch, stop=60) as batches:
        for step in [*range(20), 7, 8, 50, 58, 59, 0]:  # going back and forth too
            for made, expected in zip(batches.take(step), data.batch(step), strict=True):
                assert np.array_equal(made, expected)


def test_two_steps_are_made_ahead_each_once() -> None:
    made, third = [], threading.Event()

    def make(step: int) -> int:
        assert threading.current_thread().name.startswith("batches")
        made.append(step)
        if step == 2:
            third.set()
        return step

    with Prefetch(make, stop=6) as batches:
        assert batches.take(0) == 0
        assert third.wait(60)  # before steps 1 and 2 are taken
        assert made == [0, 1, 2]
        assert [batches.take(step) for step in range(1, 6)] == [1, 2, 3, 4, 5]
        assert not batches._made  # nor is one past `stop` on its way
    assert made == list(range(6))


def test_an_error_is_raised_at_its_own_step() -> None:
    def make(step: int) -> int:
        if step == 3:
            raise ValueError(f"at {step}")
        return step

    with Prefetch(make, stop=9) as batches:
        assert [batches.take(step) for step in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="at 3"):
            batches.take(3)
        assert batches.take(4) == 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_leaving_ends_the_thread_and_makes_nothing_more(error: type[BaseException]) -> None:
    made, begun, go_on = [], threading.Event(), threading.Event()

    def make(step: int) -> int:
        if step == 1:
            begun.set()
            assert go_on.wait(20)
        made.append(step)
        return step

    before = threads()
    with pytest.raises(error), Prefetch(make, stop=9) as batches:
        assert batches.take(0) == 0 and begun.wait(60) and len(threads()) == len(before) + 1
        batches._made[2].add_done_callback(lambda cancelled: go_on.set())  # step 1 is being made until step 2 is given up
        raise error
    assert made == [0, 1] and threads() == before


@pytest.mark.slow
def test_training_reads_ahead(tiny_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from gpt2jax.training.loop import train

    real, read = TokenData.batch, []

    def watched(self: TokenData, step: int, rows: slice | None = None) -> tuple[np.ndarray, np.ndarray]:
        read.append((threading.current_thread().name.split("_")[0], step))
        return real(self, step, rows)

    monkeypatch.setattr(TokenData, "batch", watched)
    assert train(load_config(None, [*tiny_options, "--train.steps=4"])) == 0
    assert [step for thread, step in read if thread == "batches"] == [0, 1, 2, 3] and threads() == []
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert all(np.isfinite(json.loads(line)["loss"]) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
