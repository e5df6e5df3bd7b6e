"""Catches every exception of the hook at one outer boundary, so that pacecar's own errors never reach the job.

Every call from torch or the user's loop into the hook goes through the guard.  The first exception is logged with its
traceback, all are swallowed, and after FAILURES_MAX the hook becomes inert.  It is not removed then: torch may be
iterating over the table that holds it, and deleting an entry would raise in the user's `optimizer.step()`.
KeyboardInterrupt and SystemExit belong to the user and pass through.

The guard also measures: the time of the calls through it is pacecar's own time on the step path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

__all__ = ["FAILURES_MAX", "FailureGuard"]

FAILURES_MAX = 3

_log = logging.getLogger(__name__)

P = ParamSpec("P")


class FailureGuard:
    """The outer boundary of one hook."""

    def __init__(self, now_ns: Callable[[], int], charge: Callable[[int], None]) -> None:
        self._now_ns = now_ns
        self._charge = charge
        self.failures = 0
        self.is_alive = True

    def wrap(self, function: Callable[P, None]) -> Callable[P, None]:
        """Return `function` with exceptions swallowed and its time charged; once the guard is dead it does nothing."""
        now_ns, charge = self._now_ns, self._charge

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            if not self.is_alive:
                return
            start = now_ns()
            try:
                function(*args, **kwargs)
            except Exception:  # noqa: BLE001  the one boundary: the job comes first
                self.failed(function)
            charge(now_ns() - start)

        return guarded

    def failed(self, function: Callable[..., object]) -> None:
        """Count the exception being handled; log the first one, give up at the last."""
        self.failures += 1
        name = getattr(function, "__qualname__", repr(function))
        if self.failures == 1:
            _log.exception("pacecar failed in %s; training goes on", name)
        if self.failures == FAILURES_MAX:
            self.is_alive = False
            _log.error("pacecar failed %d times, last in %s; it is off for the rest of this run", self.failures, name)
