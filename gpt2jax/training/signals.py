"""SIGTERM and Ctrl-C during a run: heard between two steps, and by all hosts at the same one."""

from __future__ import annotations

import signal
from types import FrameType

import jax

from gpt2jax.parallel import hosts


class Signals:
    """SIGTERM and the first Ctrl-C set `number`, which the loop looks at between steps and between validation batches; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.number = 0
        self._agreed = 0
        self._at_once = False

    def __enter__(self) -> Signals:
        self._before = {s: signal.signal(s, self._set) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def heard(self, step: int, every: int) -> int:
        """The signal to stop for, if there is one. Several processes ask each other every so many steps, and stop together."""
        if jax.process_count() == 1:
            return self.number
        if not self._agreed and step % every == 0:
            self._agreed = hosts.any_of(self.number)
            self.number = self._agreed or self.number  # one that came while the others were asked is told them the next time
        return self._agreed

    def end_at_once(self) -> None:
        """From now on, and if one has come before, a signal raises SystemExit with its exit status: there is nothing left to save."""
        self._at_once = True
        if self.number:
            raise SystemExit(128 + self.number)

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._at_once:
            raise SystemExit(128 + number)
