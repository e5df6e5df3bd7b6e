"""Logs what clients do wrong, at most so many lines a minute for each kind of fault and each user or address.

Whoever can connect can do something wrong, as often as he likes.  A line for each fills the disk of the node and is the
cheapest attack there is; no line at all hides what the metric only counts.  So each kind of fault of each client has an
allowance, and one client's faults do not use up another's.  What a client wrote is cleaned and cut before it is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.formatting.plain_text import clean

__all__ = ["LogLimiter"]

KINDS_MAX = 256
"""Pairs of kind and client that are told apart; beyond that newcomers share one allowance."""

LINE_CHARACTERS_MAX = 1000
"""Most characters of one line: a frame of 64 KiB must not be a line of 64 KiB."""

_MINUTE_NS = 60 * NS_PER_SECOND


class LogLimiter:
    """Warns at most `per_minute` times a minute about each kind of fault of each client.  One thread at a time."""

    def __init__(self, log: logging.Logger, per_minute: int, clock: Clock) -> None:
        self._log = log
        self._per_minute = per_minute
        self._clock = clock
        self._kinds: dict[Hashable, tuple[int, int]] = {}

    def warn(self, kind: Hashable, message: str, *arguments: object, of: Hashable = None) -> None:
        """Log a warning, unless there were too many of its kind in this minute; `of` names the client."""
        self.tell(logging.WARNING, kind, message, *arguments, of=of)

    def tell(
        self, level: int, kind: Hashable, message: str, *arguments: object, of: Hashable = None, trace: bool = False
    ) -> None:
        """Log at `level`, under the same bound; `trace` adds the traceback of the exception that is being handled."""
        now = self._clock.monotonic_ns()
        key = self._key(kind, of, now)
        since, count = self._kinds.get(key, (now, 0))
        if now - since >= _MINUTE_NS:
            self._sum_up(level, kind, count)
            since, count = now, 0
        self._kinds[key] = (since, count + 1)
        if count < self._per_minute:
            line = clean(message % arguments if arguments else message, LINE_CHARACTERS_MAX)
            self._log.log(level, "%s", line, exc_info=trace)
        elif count == self._per_minute:
            self._log.log(level, "more %s follow and are counted, not named, for the rest of the minute", kind)

    def _sum_up(self, level: int, kind: Hashable, count: int) -> None:
        if count > self._per_minute:
            self._log.log(level, "%d more like this in the minute before: %s", count - self._per_minute, kind)

    def _key(self, kind: Hashable, of: Hashable, now: int) -> Hashable:
        """Return what is counted together; with too many clients the newcomers share one allowance."""
        key = (kind, of)
        if key in self._kinds or len(self._kinds) < KINDS_MAX - 1:
            return key
        for old in [old for old, (since, _) in self._kinds.items() if now - since >= _MINUTE_NS]:
            del self._kinds[old]
        return key if len(self._kinds) < KINDS_MAX - 1 else "others"
