"""What does the daemon itself cost?  A monitor that does not measure itself cannot claim to be light.

Read at the tick like everything else: a scrape measures nothing.  The root of /proc that other collectors may be
given does not apply: this process knows itself by its own /proc/self.
"""

from __future__ import annotations

import os
import time

from pacecar.monitor.collectors.reading import Files, Reading, whole
from pacecar.records import Outcome

__all__ = ["OwnCollector"]


class OwnCollector:
    """CPU time and resident memory of this process."""

    name = "daemon"

    def __init__(self, files: Files | None = None) -> None:
        self._files = files or Files()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def collect(self) -> Outcome:
        """Read this process's own figures."""
        reading = Reading(self._files)
        reading.add("pacecar_daemon_cpu_seconds_total", time.process_time_ns())
        for pages in reading.lines(self._files.proc / "self" / "statm", parse_statm):
            reading.add("pacecar_daemon_resident_memory_bytes", pages * self._page_bytes)
        return reading.outcome()

    def close(self) -> None:
        """Nothing is held open."""


def parse_statm(line: str) -> int:
    """Return the resident pages; raises ValueError or IndexError (proc(5), /proc/pid/statm)."""
    return whole(line.split()[1])
