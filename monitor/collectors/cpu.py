"""Reads processor time by mode and NUMA node, utilization, load, frequencies, switches, interrupts and the last start.

Utilization is the share of CPU time, since the reading before, that was neither idle nor waiting for I/O.  The first
reading has no earlier one and so no utilization.  Guest time is left out: the kernel counts it in `user` already, and
a sum over modes would count it twice.

A series for each processor would be 256 times 8 on one node.  What a job suffers from is one NUMA node that is full
while the other idles, so processors are added up by node.  For the same reason frequency is the lowest and the mean.

/proc and /sys are read here and not through psutil, which knows no other root for /sys and no NUMA nodes.

Source: proc(5), "/proc/stat" and "/proc/loadavg"; Documentation/admin-guide/pm/cpufreq.rst (frequencies in kHz);
Documentation/ABI/stable/sysfs-devices-node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.kernel_files.processors import CPUS_MAX, numa_nodes, parse_cpu_list
from pacecar.kernel_files.reader import KernelFiles, OpenFile, whole
from pacecar.records import Outcome, Sample

from ..catalog_sample import sample
from .source_reader import Seldom, SourceReading

__all__ = ["CpuCollector"]

MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
MODES_MIN = 4
"""What the oldest kernels have; each newer one appended."""

_IDLE = frozenset({"idle", "iowait"})

WINDOWS = ("1m", "5m", "15m")

SELDOM_TICKS = 10
"""Frequencies cost a file for each processor, and processors move between NUMA nodes only by hot-plug."""

HEAD_BYTES = 512
"""Room for the first line of /proc/stat: ten numbers of at most twenty digits."""

NODES_MAX = 256

COUNTS = {
    "ctxt": "pacecar_host_context_switches_total",
    "intr": "pacecar_host_interrupts_total",
    "processes": "pacecar_host_forks_total",
    "procs_running": "pacecar_host_tasks_runnable",
    "procs_blocked": "pacecar_host_tasks_blocked",
    "btime": "pacecar_host_boot_time_seconds",
}
"""Rows of /proc/stat of which the first number is served: counts, and a time in seconds."""

INSIDE = {"btime": NS_PER_SECOND}
"""Inside units in one of the kernel's, where that is not 1."""

Modes = dict[str, int]


class Load(NamedTuple):
    """What /proc/loadavg says: runnable and uninterruptible tasks over each of WINDOWS, and threads that exist."""

    averages: tuple[float, float, float]
    threads: int


class CpuCollector:
    """Processor time, utilization, count, frequency and load, NUMA nodes, context switches and interrupts."""

    name = "cpu"

    def __init__(self, files: KernelFiles, *, ticks_per_second: int | None = None) -> None:
        self._files = files
        self._stat_path = files.proc / "stat"
        self._stat_file = OpenFile(self._stat_path)
        self._tick_ns = 1_000_000_000 // (ticks_per_second or os.sysconf("SC_CLK_TCK"))
        self._before: dict[str, Modes] = {}
        self._nodes: Seldom[dict[str, frozenset[str]]] = Seldom(SELDOM_TICKS)
        self._frequencies: Seldom[list[Sample]] = Seldom(SELDOM_TICKS)

    def collect(self) -> Outcome:
        """Read /proc/stat and /proc/loadavg once, and now and then the frequencies."""
        reading = SourceReading(self._files)
        self._stat(reading)
        load = reading.parsed(self._files.proc / "loadavg", parse_loadavg)
        if load is not None:
            for window, average in zip(WINDOWS, load.averages, strict=True):
                reading.add("pacecar_host_load_average", average, window)
            reading.add("pacecar_host_threads", load.threads)
        reading.add_seldom(self._frequencies, lambda: self._read_frequencies(reading))
        return reading.outcome()

    def glance(self) -> Sequence[Sample]:
        """Read the first line of /proc/stat."""
        key, _, rest = self._stat_file.head(HEAD_BYTES).partition(b"\n")[0].partition(b" ")
        fields = rest.split()
        if key != b"cpu" or len(fields) < MODES_MIN or not b"".join(fields).isdigit():
            return ()
        ratio = self._utilization("cpu", dict(zip(MODES, map(int, fields), strict=False)))
        return () if ratio is None else (sample("pacecar_host_cpu_utilization_ratio", ratio),)

    def close(self) -> None:
        """Close what glances read."""
        self._stat_file.close()

    def _stat(self, reading: SourceReading) -> None:
        failures = reading.failures
        rows = reading.lines(self._stat_path, parse_stat_line)
        by_cpu = {key: row for key, row in rows if isinstance(row, dict)}
        for key, row in rows:
            if isinstance(row, int):
                reading.add(COUNTS[key], row * INSIDE.get(key, 1))
        total = by_cpu.pop("cpu", None)
        if total is not None:
            for mode, ticks in total.items():
                reading.add("pacecar_host_cpu_seconds_total", ticks * self._tick_ns, mode)
            ratio = self._utilization("cpu", total)
            if ratio is not None:
                reading.add("pacecar_host_cpu_utilization_ratio", ratio)
        if (
            by_cpu and reading.failures == failures
        ):  # a sum over some of the processors would look like a smaller machine
            reading.add("pacecar_host_cpus_online", len(by_cpu))
            self._numa(reading, by_cpu)

    def _numa(self, reading: SourceReading, by_cpu: dict[str, Modes]) -> None:
        for node, cpus in self._nodes.get(reading, lambda: self._read_nodes(reading)).items():
            modes = added_up(row for cpu, row in by_cpu.items() if cpu in cpus)
            for mode, ticks in modes.items():
                reading.add("pacecar_host_numa_cpu_seconds_total", ticks * self._tick_ns, node, mode)
            ratio = self._utilization(f"node{node}", modes)
            if ratio is not None:
                reading.add("pacecar_host_numa_cpu_utilization_ratio", ratio, node)

    def _utilization(self, key: str, now: Modes) -> float | None:
        ratio = utilization(self._before.get(key), now)
        self._before[key] = now
        return ratio

    def _read_nodes(self, reading: SourceReading) -> dict[str, frozenset[str]]:
        folder = self._files.sys / "devices" / "system" / "node"
        nodes = {}
        for name in reading.first(numa_nodes(reading.names(folder) or []), NODES_MAX, "NUMA nodes"):
            cpus = reading.parsed(folder / name / "cpulist", parse_cpu_list)
            if cpus:  # a node of memory alone has an empty list
                nodes[name.removeprefix("node")] = frozenset(f"cpu{cpu}" for cpu in cpus)
        return nodes

    def _read_frequencies(self, reading: SourceReading) -> list[Sample]:
        folder = self._files.sys / "devices" / "system" / "cpu" / "cpufreq"
        policies = [n for n in reading.names(folder) or [] if re.fullmatch(r"policy\d+", n)]
        now: list[int] = []
        limits: list[int] = []
        failures = reading.failures
        for policy in reading.first(policies, CPUS_MAX, "processors"):
            for name, found in (("scaling_cur_freq", now), ("scaling_max_freq", limits)):
                value = reading.parsed(folder / policy / name, whole)
                if value is not None:
                    found.append(value)
        samples: list[Sample] = []
        if reading.failures != failures:  # the mean of some is not the mean
            return samples
        if now:
            samples.append(sample("pacecar_host_cpu_frequency_min_hertz", min(now)))
            samples.append(sample("pacecar_host_cpu_frequency_mean_hertz", sum(now) / len(now)))
        if limits:
            samples.append(sample("pacecar_host_cpu_frequency_limit_hertz", min(limits)))
        return samples


def parse_stat_line(line: str) -> tuple[str, Modes | int] | None:
    """Return (key, ticks by mode) of a cpu line, (key, count) of a row in COUNTS, None for others; else ValueError."""
    key, _, rest = line.partition(" ")
    if key in COUNTS:  # the row of interrupts goes on with one number for each of thousands of lines
        return key, whole(rest.split(None, 1)[0])
    if not key.startswith("cpu"):
        return None
    fields = rest.split()
    if len(fields) < MODES_MIN:
        raise ValueError(f"{len(fields)} fields where at least {MODES_MIN} are due")
    return key, {mode: whole(field) for mode, field in zip(MODES, fields, strict=False)}


def parse_loadavg(line: str) -> Load:
    """Return the averages and the number of threads; raises ValueError or IndexError."""
    fields = line.split()
    averages = (float(fields[0]), float(fields[1]), float(fields[2]))
    return Load(averages, whole(fields[3].partition("/")[2]))


def added_up(rows: Iterable[Modes]) -> Modes:
    """Return the sum of cpu lines, mode by mode."""
    total: Modes = {}
    for row in rows:
        for mode, ticks in row.items():
            total[mode] = total.get(mode, 0) + ticks
    return total


def utilization(before: Modes | None, now: Modes) -> float | None:
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
