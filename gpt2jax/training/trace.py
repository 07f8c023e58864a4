"""`run.trace`: a profile of some steps by JAX's profiler, for TensorBoard's profile plugin, xprof or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from gpt2jax.config import traced_steps


class Trace:
    """Writes steps A to B, counted from 1 as everywhere, to RUN/trace. A run that goes on within them traces the rest; each process writes its own files."""

    def __init__(self, text: str | None, run_dir: Path, step: int) -> None:
        first, self._last = traced_steps(text) if text else (0, 0)
        self._first = max(first, step + 1)
        self._folder, self._running = run_dir / "trace", False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Before the step that is number `step`."""
        if step == self._first <= self._last:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int, state: Any) -> None:
        """Behind it, with what it computes."""
        if self._running and step == self._last:
            jax.block_until_ready(state)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
