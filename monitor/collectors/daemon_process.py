"""Measures the daemon's own process: CPU time, resident memory, threads and open files.

A monitor that does not measure itself cannot claim to be light.  It is read at the tick like everything else: a scrape
measures nothing.  The roots of /proc and /sys that other collectors may be given do not apply: psutil reads this
process itself, and is made for exactly that.

CPU time is the whole process's, all threads and the kernel's part included, and so scrapes and the socket server too.
It alone comes from the process clock: psutil gives it in steps of 10 ms, which is the whole cost of a tick.
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

    def __init__(self, process: psutil.Process | None = None) -> None:
        self._process = process or psutil.Process()

    def collect(self) -> Outcome:
        """Read this process's own figures."""
        try:
            with self._process.oneshot():  # one read of each file for all figures in it
                figures = {
                    "pacecar_daemon_cpu_seconds_total": time.process_time_ns(),
                    "pacecar_daemon_resident_memory_bytes": self._process.memory_info().rss,
                    "pacecar_daemon_threads": self._process.num_threads(),
                    "pacecar_daemon_open_files": self._process.num_fds(),
                }
        except (psutil.Error, OSError) as error:
            return Failed(f"/proc/self: {error}")
        return Ok(tuple(sample(metric, value) for metric, value in figures.items()))

    def close(self) -> None:
        """Nothing is held open."""
