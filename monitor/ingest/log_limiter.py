"""Logs clients' faults, with a limit on lines per minute for each kind of fault and each user or address.

Any client can make errors as often as it likes.  A log line for each would fill the disk; no lines would hide what the
metric only counts.  So each kind of fault of each client has its own limit, and no client uses up another's.  Clients'
text is cleaned and cut before it is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.formatting.plain_text import clean

__all__ = ["LogLimiter"]

KINDS_MAX = 256
"""Pairs of kind and client with their own limit; beyond that, new ones share one."""

LINE_CHARACTERS_MAX = 1000
"""Characters of one line: a frame of 64 KiB must not become a line of 64 KiB."""

_MINUTE_NS = 60 * NS_PER_SECOND


class LogLimiter:
    """Logs at most `per_minute` lines a minute for each kind of fault and client.  One thread at a time."""

    def __init__(self, log: logging.Logger, per_minute: int, clock: Clock) -> None:
        self._log = log
        self._per_minute = per_minute
        self._clock = clock
        self._kinds: dict[Hashable, tuple[int, int]] = {}

    def warn(self, kind: Hashable, message: str, *arguments: object, of: Hashable = None) -> None:
        """Log a warning, unless the limit for its kind and the client `of` is reached."""
        self.tell(logging.WARNING, kind, message, *arguments, of=of)

    def tell(
        self, level: int, kind: Hashable, message: str, *arguments: object, of: Hashable = None, trace: bool = False
    ) -> None:
        """Log at `level` with the same limit; `trace` adds the traceback of the exception being handled."""
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
            self._log.log(level, "more %s follow; they are counted but not logged for the rest of the minute", kind)

    def _sum_up(self, level: int, kind: Hashable, count: int) -> None:
        if count > self._per_minute:
            self._log.log(level, "%d more like this in the minute before: %s", count - self._per_minute, kind)

    def _key(self, kind: Hashable, of: Hashable, now: int) -> Hashable:
        """Return what is counted together; with too many clients, new ones share one limit."""
        key = (kind, of)
        if key in self._kinds or len(self._kinds) < KINDS_MAX - 1:
            return key
        for old in [old for old, (since, _) in self._kinds.items() if now - since >= _MINUTE_NS]:
            del self._kinds[old]
        return key if len(self._kinds) < KINDS_MAX - 1 else "others"
