"""Measures the daemon's own process: CPU time, resident memory, threads and open files.

Read at the tick, because a scrape measures nothing.  psutil reads this process, so the roots of /proc and /sys that
other collectors use do not apply.

CPU time covers all threads, including the kernel's part, scrapes and the socket server.  It comes from the process
clock because psutil's has steps of 10 ms, the whole cost of a tick.
"""

from __future__ import annotations

import time

import psutil

from pacecar.records import Failed, Ok, Outcome

from ..catalog_sample import sample

__all__ = ["DaemonProcessCollector"]


class DaemonProcessCollector:
    """CPU time, resident memory, threads and open files of this process."""

    name = "daemon"
    is_rarely_read = True

    def __init__(self, process: psutil.Process | None = None) -> None:
        self._process = process or psutil.Process()

    def collect(self) -> Outcome:
        """Read this process's own figures."""
        try:
            with self._process.oneshot():  # read each file once
                figures = {
                    "pacecar_daemon_cpu_seconds_total": time.process_time_ns(),
                    "pacecar_daemon_resident_memory_bytes": self._process.memory_info().rss,
                    "pacecar_daemon_threads": self._process.num_threads(),
                    "pacecar_daemon_open_files": self._process.num_fds(),
                }
        except (psutil.Error, OSError) as error:
            return Failed(f"/proc/self: {error}")
        return Ok(tuple(sample(metric, value) for metric, value in figures.items()))
