"""What are the processors doing?  Time by mode from /proc/stat, and the load average.

Utilization is the share of the last tick's CPU time that was neither idle nor waiting for I/O.  The first tick has no
earlier reading and so no utilization.  Guest time is left out: the kernel counts it in `user` already, and a sum
over modes would count it twice.

Source: proc(5), "/proc/stat" and "/proc/loadavg".
"""

from __future__ import annotations

import os

from pacecar.monitor.collectors.reading import Files, Reading, whole
from pacecar.records import Outcome

__all__ = ["CpuCollector"]

MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_IDLE = frozenset({"idle", "iowait"})

WINDOWS = ("1m", "5m", "15m")


class CpuCollector:
    """Processor time, utilization since the collect before, processor count, load and context switches."""

    name = "cpu"

    def __init__(self, files: Files, *, ticks_per_second: int | None = None) -> None:
        self._files = files
        self._tick_ns = 1_000_000_000 // (ticks_per_second or os.sysconf("SC_CLK_TCK"))
        self._before: dict[str, int] | None = None

    def collect(self) -> Outcome:
        """Read /proc/stat and /proc/loadavg once."""
        reading = Reading(self._files)
        self._stat(reading)
        for loads in reading.lines(self._files.proc / "loadavg", parse_loadavg):
            for window, load in zip(WINDOWS, loads, strict=True):
                reading.add("pacecar_host_load_average", load, window)
        return reading.outcome()

    def close(self) -> None:
        """Nothing is held open."""

    def _stat(self, reading: Reading) -> None:
        rows = reading.lines(self._files.proc / "stat", parse_stat_line)
        for modes in (row for key, row in rows if key == "cpu" and isinstance(row, dict)):
            for mode, ticks in modes.items():
                reading.add("pacecar_host_cpu_seconds_total", ticks * self._tick_ns, mode)
            ratio = utilization(self._before, modes)
            if ratio is not None:
                reading.add("pacecar_host_cpu_utilization_ratio", ratio)
            self._before = modes
        online = sum(1 for key, _ in rows if key.startswith("cpu") and key != "cpu")
        if online:
            reading.add("pacecar_host_cpus_online", online)
        for switches in (row for key, row in rows if key == "ctxt" and isinstance(row, int)):
            reading.add("pacecar_host_context_switches_total", switches)


def parse_stat_line(line: str) -> tuple[str, dict[str, int] | int] | None:
    """Return (key, ticks by mode) of a cpu line, ("ctxt", count), None for what is not ours; raises ValueError."""
    key, *fields = line.split() or [""]
    if key == "ctxt":
        return key, whole(fields[0])
    if not key.startswith("cpu"):
        return None
    if len(fields) < 4:  # the oldest kernels have four; each newer one appended
        raise ValueError(f"{len(fields)} fields where at least 4 are due")
    return key, {mode: whole(field) for mode, field in zip(MODES, fields, strict=False)}


def parse_loadavg(line: str) -> tuple[float, float, float]:
    """Return the three averages; raises ValueError or IndexError."""
    fields = line.split()
    return float(fields[0]), float(fields[1]), float(fields[2])


def utilization(before: dict[str, int] | None, now: dict[str, int]) -> float | None:
    """Return the busy share (0..1) between two readings of one cpu line; None when no time passed between them.

    A mode that went back counts as zero: proc(5) says that iowait may decrease, and processors go offline.
    """
    if before is None:
        return None
    spent = {mode: max(0, ticks - before.get(mode, ticks)) for mode, ticks in now.items()}
    total = sum(spent.values())
    if total == 0:
        return None
    return sum(ticks for mode, ticks in spent.items() if mode not in _IDLE) / total
