"""Logs state changes of GPUs: one line for all GPUs that share a change, and a bounded number of lines a minute.

One cause (a driver's lock, a reset, a reload) hits all GPUs of a node at once, which would be eight lines each
time.  So changes of one kind within a tick are one line that names all GPUs; those that are not urgent (slow, not dead)
are gathered for a few seconds; and each kind has a limit per minute.
"""

from __future__ import annotations

import logging

from pacecar.clock import NS_PER_SECOND, Clock

from ..ingest.log_limiter import LogLimiter

__all__ = ["LINES_PER_MINUTE", "SETTLE_SECONDS", "GpuChangeLog"]

LINES_PER_MINUTE = 4
"""Lines for each kind of change; further changes are only in the metrics."""

SETTLE_SECONDS = {"slow": 3.0, "as fast as a tick again": 3.0, "down: hung": 1.0}
"""Change -> how long to wait for more GPUs with it: GPUs that one cause slows down are noticed within a reading or two
of each other, calls that hang behind one lock within a tick."""

JOIN_SECONDS = {"slow": 60.0, "as fast as a tick again": 60.0}
"""Change -> how long after a line further GPUs with it are only in the metrics, as they have the same cause: a slow GPU
is noticed when its reading arrives, and the slower it is, the later that is."""

_log = logging.getLogger(__name__)


class GpuChangeLog:
    """Collects changes, and logs them when `flush` is called.  One thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notices = LogLimiter(_log, LINES_PER_MINUTE, clock)
        self._waiting: dict[tuple[int, str], list[tuple[str, str, str]]] = {}
        self._since_ns: dict[tuple[int, str], int] = {}
        self._logged_ns: dict[str, int] = {}

    def record(self, level: int, change: str, gpu: str, words: str = "", identity: str = "") -> None:
        """Log at the next `flush` that `gpu` is `change` ("down: hung"), with its own details in `words`.

        `identity` names the GPU as tools other than pacecar do, so that an operator can find it.
        """
        key = (level, change)
        gpus_changed = self._waiting.setdefault(key, [])
        self._since_ns.setdefault(key, self._clock.monotonic_ns())
        if gpu not in {other for other, _, _ in gpus_changed}:
            gpus_changed.append((gpu, words, identity))

    def flush(self) -> None:
        """Log all changes, except those that wait for others of their kind."""
        now = self._clock.monotonic_ns()
        for key, gpus_changed in list(self._waiting.items()):
            level, change = key
            if now - self._since_ns[key] < SETTLE_SECONDS.get(change, 0.0) * NS_PER_SECOND:
                continue
            del self._waiting[key], self._since_ns[key]
            logged_ns = self._logged_ns.get(change)
            if logged_ns is not None and now - logged_ns < JOIN_SECONDS.get(change, 0.0) * NS_PER_SECOND:
                continue
            self._logged_ns[change] = now
            words = gpus_changed[0][1] + (
                " (the first of them)" if len(gpus_changed) > 1 and gpus_changed[0][1] else ""
            )
            gpus_changed.sort(key=lambda one: (len(one[0]), one[0]))
            gpus = ", ".join(gpu for gpu, _, _ in gpus_changed)
            text = f"{change}: {words}" if words else change
            text += "".join(f"; {gpu} is {identity}" for gpu, _, identity in gpus_changed if identity)
            self._notices.tell(level, change, "gpu%s %s: %s", "s" if len(gpus_changed) > 1 else "", gpus, text)
