"""Batches made ahead of their steps by a thread, so that a step does not wait for the one it reads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class Prefetch(Generic[Batch]):
    """`take(step)` is `make(step)`, made by a thread while earlier steps ran: `ahead` steps after the one that is taken are on their way. `make` must be a
    pure function of the step that asks no other process for anything, for it runs at no fixed place among the steps. Steps may be taken in any order;
    those that follow each other are made ahead, up to `stop`. An error of `make` is raised by the `take` of its step.

    Leaving the `with` block waits for the batch that is being made, and makes no other.
    """

    def __init__(self, make: Callable[[int], Batch], *, stop: int, ahead: int = 2) -> None:
        self._make, self._stop, self._ahead = make, stop, ahead
        self._made: dict[int, Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def take(self, step: int) -> Batch:
        wanted = range(step, max(step + 1, min(step + 1 + self._ahead, self._stop)))
        self._made = {one: self._made.get(one) or self._thread.submit(self._make, one) for one in wanted}
        return self._made.pop(step).result()

    def __enter__(self) -> Prefetch[Batch]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
