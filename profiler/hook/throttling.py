"""Does this rank's device hold its clocks down?  What the node's daemon says, for as long as it can say it.

The hook does not ask: NVML stays out of the job, and a question to the driver may hang for 45 s.  The daemon reads the
reasons anyway and tells the jobs connected to it when they change (`Throttling`).  Nobody waits for that: until it has
come, and after the connection broke, nothing is known.

Left out: which reasons count (the daemon's `throttles`).
"""

from __future__ import annotations

from pacecar.records import JobHello, Throttling

__all__ = ["ThrottleNews"]


class ThrottleNews:
    """The daemon's last word about the device of `hello`; `heed` comes from the courier's thread, one assignment."""

    def __init__(self, hello: JobHello) -> None:
        self._device_uuid = hello.device_uuid
        self._latest: Throttling | None = None

    def heed(self, news: Throttling | None) -> None:
        """Take what the daemon says; None: there is nobody to say anything."""
        if news is None or news.device_uuid == self._device_uuid:
            self._latest = news

    def is_throttled(self) -> bool | None:
        """Return whether the clocks are held down; None when nobody knows."""
        latest = self._latest
        return None if latest is None or latest.reasons is None else bool(latest.reasons)
