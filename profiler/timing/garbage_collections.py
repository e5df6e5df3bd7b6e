"""Times the collections of Python's garbage collector, which stop all Python threads of this process.

A full collection of a job with millions of objects takes 0.3 to 1.5 s, at other steps on other ranks, and the others
wait for it.  `gc.callbacks` are called before and after each collection, on the thread that caused it.  They cost less
than a microsecond, which is measured at the start and charged by the number of collections.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["GarbageCollections"]

LONG_NS_MIN = 50_000
"""Shorter collections, of the youngest objects, only count in the total."""

LONG_MAX = 1024
"""Long collections that are kept for steps without a record yet; the oldest are dropped."""

PRICED = 256
"""Collections whose callbacks are timed to learn what one costs."""


class GarbageCollections:
    """The collections of this process between `start` and `close`."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._begun_ns: int | None = None
        self._long: deque[tuple[int, int]] = deque(maxlen=LONG_MAX)
        self._price_ns = 0.0
        self._count = self._charged = 0
        self._total_ns = 0
        self._is_started = False

    def start(self) -> None:
        """Time collections from now on; takes about 100 us."""
        self._price_ns = _price_ns()
        self._is_started = True
        gc.callbacks.append(self.collects)

    def close(self) -> None:
        """Time no more, also in a forked child.  May be called repeatedly."""
        if self.collects in gc.callbacks:
            gc.callbacks.remove(self.collects)

    def collects(self, phase: str, _: Mapping[str, Any]) -> None:
        """Note the "start" or the "stop" of a collection; a collection never begins within another."""
        now_ns = self._now_ns()
        if phase == "start":
            self._begun_ns = now_ns
            return
        begun_ns, self._begun_ns = self._begun_ns, None
        if begun_ns is None:  # this was attached during a collection
            return
        self._count += 1
        self._total_ns += now_ns - begun_ns
        if now_ns - begun_ns >= LONG_NS_MIN:
            self._long.append((begun_ns, now_ns))

    @property
    def total_ns(self) -> int | None:
        """How long all collections took so far; None if they are not timed."""
        return self._total_ns if self._is_started else None

    def long(self) -> list[tuple[int, int]]:
        """Return the beginning and end of each long collection, as far as they are kept."""
        return [*self._long]

    def within(self, start_ns: int, end_ns: int) -> int | None:
        """Return how long collections took between two times, short ones left out; None if they are not timed."""
        if not self._is_started:
            return None
        taken_ns = 0
        for begun_ns, ended_ns in reversed(self._long.copy()):  # a copy: a collection may end meanwhile
            if ended_ns <= start_ns:
                break
            taken_ns += max(0, min(ended_ns, end_ns) - max(begun_ns, start_ns))
        return taken_ns

    def take_cost_ns(self) -> int:
        """Return what the callbacks have cost since the last call."""
        count, self._charged = self._count - self._charged, self._count
        return round(count * self._price_ns)


def _price_ns() -> float:
    scratch = GarbageCollections()
    begun_ns = time.perf_counter_ns()
    for _ in range(PRICED):
        scratch.collects("start", {})
        scratch.collects("stop", {})
    return (time.perf_counter_ns() - begun_ns) / PRICED
