"""What a run writes and shows: metrics.jsonl, and a progress bar on a terminal or plain lines in a log."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class MetricsFile:
    """One JSON object a line: step, tokens, loss, val_loss, lr, grad_norm, tokens_per_s, val_bits_per_byte, mfu and causal_mfu (see analysis/peak.py),
    memory_bytes (the most that arrays have taken on a device) and skipped (steps that the guard has skipped so far); with experts also moe_load_max,
    moe_load_min and moe_load_entropy (see `load_metrics` in model/moe.py).

    Values not measured at a step are null. Each line is written whole, so that a killed run leaves at most one torn line, which the next start removes.
    """

    def __init__(self, path: Path, step: int) -> None:
        """Open for appending after `step`; lines of later steps, from a run that went further than its last checkpoint, are dropped."""
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(draft, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a torn last line is left out."""
    return [json.loads(line) for line in _whole_lines(path)]


def _whole_lines(path: Path) -> list[str]:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            json.loads(line)
        except json.JSONDecodeError:
            continue
        lines.append(line)
    return lines


class ProgressView:
    """A rich progress bar with rate and time left on a terminal; elsewhere one plain line for each line of metrics."""

    def __init__(self, total: int, done: int, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self._bar: Progress | None = None
        self._task: Any = None
        self._start = (time.monotonic(), done)
        self._total = total
        if self.console.is_terminal:
            columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console)
            self._task = self._bar.add_task("train", total=total, completed=done, note="")

    def __enter__(self) -> ProgressView:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def show(self, step: int, note: str) -> None:
        """`note` beside the bar, or as a line of its own with the time left."""
        if self._bar:
            self._bar.update(self._task, completed=step, note=note)
        else:
            began, first = self._start
            left = (time.monotonic() - began) / max(step - first, 1) * (self._total - step)
            self.say(f"step {step}/{self._total}  {note}  {left:.0f} s left")

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
