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


def test_hosts_that_have_agreed_stop_without_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a validation, which is broken off between two steps at which they would ask."""
    signals, asked = Signals(), []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "any_of", lambda number: asked.append(number) or signal.SIGTERM)
    assert [signals.heard(batch, 8) for batch in (7, 8, 9)] == [0, signal.SIGTERM, signal.SIGTERM]
    assert signals.heard(16, 8) == signals.number == signal.SIGTERM and asked == [0]


def test_a_signal_ends_at_once_when_all_is_saved() -> None:
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.number == signal.SIGTERM
        with pytest.raises(SystemExit, match="143"):
            signals.end_at_once()
    with Signals() as signals:
        signals.end_at_once()
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
