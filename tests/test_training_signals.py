"""Signals are heard once, by all hosts, and none is lost."""

from __future__ import annotations

import signal

import jax
import pytest

from gpt2jax.parallel import hosts
from gpt2jax.training.signals import Signals


def test_a_signal_that_comes_while_hosts_are_asked_is_told_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = Signals()

    def asked(number: int) -> int:
        signals.number = signal.SIGTERM  # in the middle of the exchange, which ends with what it began with
        return number

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "any_of", asked)
    assert [signals.heard(step, 5) for step in range(4, 8)] == [0, 0, 0, 0]
    assert signals.heard(10, 5) == signal.SIGTERM
