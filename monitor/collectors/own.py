"""What does the daemon itself cost?  A monitor that does not measure itself cannot claim to be light.

Read at the tick like everything else: a scrape measures nothing.
"""

from __future__ import annotations

import time

import psutil

from pacecar.monitor.collectors.reading import sample
from pacecar.records import Failed, Ok, Outcome

__all__ = ["OwnCollector"]


class OwnCollector:
    """CPU time and resident memory of this process."""

    name = "daemon"

    def __init__(self) -> None:
        self._process = psutil.Process()

    def collect(self) -> Outcome:
        """Read this process's own figures."""
        spent = sample("pacecar_daemon_cpu_seconds_total", time.process_time_ns())
        try:
            resident = self._process.memory_info().rss
        except (psutil.Error, OSError) as error:
            return Failed(f"resident memory: {error}", (spent,))
        return Ok((spent, sample("pacecar_daemon_resident_memory_bytes", resident)))

    def close(self) -> None:
        """Nothing is held open."""
