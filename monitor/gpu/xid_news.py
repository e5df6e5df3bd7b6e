"""Logs changes of the GPUs' state: one line for all GPUs that share a change, and a bounded number of lines a minute.

One cause (a driver's lock, a reset, a reload) hits all GPUs of a node at once, and a line for each makes eight of it,
each time that a driver comes and goes.  So what changes within a tick is one line that names all of them, what may wait
(slow, not dead) is gathered for a few seconds, and each kind of change has an allowance a minute.
"""

from __future__ import annotations

import logging

from pacecar.clock import NS_PER_SECOND, Clock

from ..ingest.log_limiter import LogLimiter

__all__ = ["LINES_PER_MINUTE", "SETTLE_SECONDS", "GpuChangeLog"]

LINES_PER_MINUTE = 4
"""Lines of each kind of change; further ones are in the metrics only."""

SETTLE_SECONDS = {"slow": 3.0, "as fast as a tick again": 3.0, "down: hung": 1.0}
"""Change -> how long others of its kind are waited for: GPUs that one cause slows down are found slow within a reading
or two of each other, and calls that hang behind one lock within a tick."""

JOIN_SECONDS = {"slow": 60.0, "as fast as a tick again": 60.0}
"""Change -> for how long after a line further GPUs with that change count as of the same cause, and are in the metrics
only: a slow GPU is found slow when its reading has come, which takes the longer the slower it is."""

_log = logging.getLogger(__name__)


class GpuChangeLog:
    """Collects changes as they are found, and logs them when `flush` is called.  One thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notices = LogLimiter(_log, LINES_PER_MINUTE, clock)
        self._waiting: dict[tuple[int, str], list[tuple[str, str, str]]] = {}
        self._since_ns: dict[tuple[int, str], int] = {}
        self._said_ns: dict[str, int] = {}

    def tell(self, level: int, change: str, gpu: str, words: str = "", identity: str = "") -> None:
        """Log at the next `flush` that `gpu` is `change` ("down: hung"), with the details of it alone in `words`.

        `identity` is what the GPU is known by outside pacecar, for those who have to find it.
        """
        key = (level, change)
        told = self._waiting.setdefault(key, [])
        self._since_ns.setdefault(key, self._clock.monotonic_ns())
        if gpu not in {other for other, _, _ in told}:
            told.append((gpu, words, identity))

    def flush(self) -> None:
        """Log all changes, except those that wait for others of their kind."""
        now = self._clock.monotonic_ns()
        for key, told in list(self._waiting.items()):
            level, change = key
            if now - self._since_ns[key] < SETTLE_SECONDS.get(change, 0.0) * NS_PER_SECOND:
                continue
            del self._waiting[key], self._since_ns[key]
            said_ns = self._said_ns.get(change)
            if said_ns is not None and now - said_ns < JOIN_SECONDS.get(change, 0.0) * NS_PER_SECOND:
                continue
            self._said_ns[change] = now
            words = told[0][1] + (" (the first of them)" if len(told) > 1 and told[0][1] else "")
            told.sort(key=lambda one: (len(one[0]), one[0]))
            gpus = ", ".join(gpu for gpu, _, _ in told)
            text = f"{change}: {words}" if words else change
            text += "".join(f"; {gpu} is {identity}" for gpu, _, identity in told if identity)
            self._notices.tell(level, change, "gpu%s %s: %s", "s" if len(told) > 1 else "", gpus, text)
