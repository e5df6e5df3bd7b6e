"""Keeps the daemon's latest news of whether this rank's device throttles its clocks.

The hook does not read that itself: NVML stays out of the job, and a call of the driver may hang for 45 s.  The daemon
reads the reasons anyway and sends them to the jobs connected to it when they change (`Throttling`).  Nobody waits for
that: until it has come, and after the connection broke, the state is unknown.

Left out: which reasons count (the daemon's `throttles`).
"""

from __future__ import annotations

from pacecar.records import JobHello, Throttling

__all__ = ["ThrottleNews"]


class ThrottleNews:
    """The daemon's last news of the device of `hello`; `heed` is called on the queue's thread and is one assignment."""

    def __init__(self, hello: JobHello) -> None:
        self._device_uuid = hello.device_uuid
        self._latest: Throttling | None = None

    def heed(self, news: Throttling | None) -> None:
        """Record news of the daemon; None: there is no connection."""
        if news is None or news.device_uuid == self._device_uuid:
            self._latest = news

    def is_throttled(self) -> bool | None:
        """Return whether the device throttles its clocks; None when that is unknown."""
        latest = self._latest
        return None if latest is None or latest.reasons is None else bool(latest.reasons)
