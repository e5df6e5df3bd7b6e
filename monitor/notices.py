"""How much may others write into our log?  So many lines a minute, and then how many more there were.

Whoever can connect can do something wrong, as often as he likes.  A line for each fills the disk of the node and is the
cheapest attack there is; no line at all hides what the metric only counts.  So each kind of fault has an allowance.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from pacecar.clock import NS_PER_SECOND, Clock

__all__ = ["Notices"]

KINDS_MAX = 64
"""Kinds that are told apart; beyond that all is forgotten and counted anew."""

_MINUTE_NS = 60 * NS_PER_SECOND


class Notices:
    """Warns at most `per_minute` times a minute about each kind of fault.  One thread at a time."""

    def __init__(self, log: logging.Logger, per_minute: int, clock: Clock) -> None:
        self._log = log
        self._per_minute = per_minute
        self._clock = clock
        self._kinds: dict[Hashable, tuple[int, int]] = {}

    def warn(self, kind: Hashable, message: str, *arguments: object) -> None:
        """Log a warning, unless there were too many of its kind in this minute."""
        self.tell(logging.WARNING, kind, message, *arguments)

    def tell(self, level: int, kind: Hashable, message: str, *arguments: object) -> None:
        """Log at `level`, under the same bound."""
        now = self._clock.monotonic_ns()
        since, count = self._kinds.get(kind, (now, 0))
        if now - since >= _MINUTE_NS:
            if count > self._per_minute:
                self._log.log(level, "%d more like this in the minute before: %s", count - self._per_minute, kind)
            since, count = now, 0
        if len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        self._kinds[kind] = (since, count + 1)
        if count < self._per_minute:
            self._log.log(level, message, *arguments)
        elif count == self._per_minute:
            self._log.log(level, "more %s follow and are counted, not named, for the rest of the minute", kind)
