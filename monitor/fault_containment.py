"""Contains a bug of our own to the job, collector, part or step of a tick in which it occurs; counts it, logs it once.

Frames are validated when they arrive, so no record should break a page.  If one does, that tick loses only the samples
of its job; the tick, the page and all other jobs are unaffected.  A log line at each scrape would fill the disk.  So
each place in the code is logged once, with its traceback, and the metric counts the rest.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

from pacecar.records import Sample

from .catalog_sample import sample

__all__ = ["ContainedPart", "FaultContainment"]

PLACES_MAX = 256
"""Places in the code that are remembered as logged; beyond that, faults are only counted."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ContainedPart(StrEnum):
    """Where a fault was contained: the label values of the counter."""

    JOB = "job"
    COLLECTOR = "collector"
    TICK = "tick"
    INBOX = "inbox"
    WEB = "web"
    DAEMON = "daemon"


class FaultContainment:
    """Counts exceptions that were caught, by part.  All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[ContainedPart] = Counter()
        self._logged: set[tuple[object, ...]] = set()

    def counts(self) -> dict[str, int]:
        """Return the number of faults of every part."""
        return {part.value: self._counts[part] for part in ContainedPart}

    def own_samples(self) -> Iterator[Sample]:
        """Yield the number of faults of every part."""
        for part, count in self.counts().items():
            yield sample("pacecar_daemon_faults_total", count, part)

    def caught(self, part: ContainedPart, subject: str, error: BaseException) -> None:
        """Count `error`, which lost the output of `subject`, and log a new one; called in its handler."""
        place = (part, type(error), *_innermost(error))
        with self._lock:
            self._counts[part] += 1
            is_new = place not in self._logged and len(self._logged) < PLACES_MAX
            if is_new:
                self._logged.add(place)
        if is_new:
            _log.error(
                "a bug loses the output of %s and nothing else (logged once, counted each time): %s: %s",
                subject, type(error).__name__, error, exc_info=error,
            )  # fmt: skip

    def contain(self, part: ContainedPart, subject: str, act: Callable[[], T], otherwise: T) -> T:
        """Return what `act` returns, or `otherwise` if it raises."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001  the outer boundary: a bug in one part must not stop the others
            self.caught(part, subject, error)
            return otherwise

    def each(self, part: ContainedPart, subject: str, samples: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Yield all of `samples()`, or nothing if it raises before its end."""
        nothing: list[T] = []
        yield from self.contain(part, subject, lambda: list(samples()), nothing)


def _innermost(error: BaseException) -> tuple[object, ...]:
    """Return file and line at which `error` was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return () if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
