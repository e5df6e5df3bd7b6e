"""Reads processor time by mode and NUMA node, utilization, load, frequencies, switches, interrupts and the boot time.

Utilization is the share of CPU time since the previous reading that was neither idle nor waiting for I/O; the first
reading has none.  Guest time is left out: the kernel counts it in `user` already, so a sum over modes would count it
twice.

A series for each processor would be 256 times 8 on one node.  A job suffers when one NUMA node is full while the other
idles, so processors are added up by node.  For the same reason frequencies are reported as minimum and mean.

The counters of a processor that went offline keep their values: without them a node's sum would fall, which Prometheus
takes for a restart.  A row that cannot be read loses one reading of its own node.

psutil is not used: it knows no other root for /sys and no NUMA nodes.

Source: proc(5), "/proc/stat" and "/proc/loadavg"; Documentation/admin-guide/pm/cpufreq.rst (frequencies in kHz);
Documentation/ABI/stable/sysfs-devices-node.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pacecar.clock import NS_PER_SECOND
from pacecar.kernel_files.processors import CPUS_MAX, numa_nodes, parse_cpu_list
from pacecar.kernel_files.reader import NOT_THERE, KernelFiles, OpenFile, whole
from pacecar.records import Outcome, Sample

from ..catalog_sample import sample
from .source_reader import CachedReading, SourceReading

__all__ = ["CpuCollector"]

MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
MODES_MIN = 4
"""Columns of the oldest kernels; newer ones appended more."""

_IDLE = frozenset({"idle", "iowait"})

WINDOWS = ("1m", "5m", "15m")

CACHED_TICKS = 10
"""Frequencies cost a file per processor, and processors move between NUMA nodes only by hot-plug."""

HEAD_BYTES = 512
"""Room for the first line of /proc/stat: ten numbers of at most twenty digits."""

NODES_MAX = 256

TICKS_MAX = 1 << 56
"""A larger mode fell below zero (steal on Xen), and would dominate the total."""

COUNTS = {
    "ctxt": "pacecar_host_context_switches_total",
    "intr": "pacecar_host_interrupts_total",
    "processes": "pacecar_host_forks_total",
    "procs_running": "pacecar_host_tasks_runnable",
    "procs_blocked": "pacecar_host_tasks_blocked",
    "btime": "pacecar_host_boot_time_seconds",
}
"""Rows of /proc/stat whose first number is served: counts, and a time in seconds."""

INSIDE = {"btime": NS_PER_SECOND}
"""Inside units per unit of the kernel, where that is not 1."""

CORRECTION_NS = 3 * NS_PER_SECOND
"""How far idle and iowait may go back, as proc(5) allows; more is another machine's /proc, or a restart."""

FREQUENCY_UNKNOWN = "<unknown>"
"""What cpufreq writes if its driver reports no frequency (drivers/cpufreq/cpufreq.c)."""

POLICY_HAS_NONE = NOT_THERE | {errno.EBUSY, errno.EINVAL, errno.ENXIO, errno.EAGAIN}
"""Errors by which cpufreq says that it has no frequency now; EBUSY: all processors of the policy are offline."""

Modes = dict[str, int]


class CpuCollector:
    """Processor time, utilization, count, frequency and load, NUMA nodes, context switches and interrupts."""

    name = "cpu"

    def __init__(self, files: KernelFiles, *, ticks_per_second: int | None = None) -> None:
        self._files = files
        self._stat_path = files.proc / "stat"
        self._stat_file = OpenFile(self._stat_path)
        self._tick_ns = 1_000_000_000 // (ticks_per_second or os.sysconf("SC_CLK_TCK"))
        self._before: dict[str, Modes] = {}
        self._rows: dict[str, Modes] = {}
        """The last row of each processor, including offline ones."""
        self._node_of: dict[str, str] = {}
        self._nodes: CachedReading[dict[str, frozenset[str]]] = CachedReading(CACHED_TICKS)
        self._frequencies: CachedReading[list[Sample]] = CachedReading(CACHED_TICKS)

    def collect(self) -> Outcome:
        """Read /proc/stat and /proc/loadavg once, and sometimes the frequencies."""
        reading = SourceReading(self._files)
        self._stat(reading)
        for where, line in reading.numbered(self._files.proc / "loadavg"):
            self._load(reading, where, line)
        reading.add_cached(self._frequencies, lambda: self._read_frequencies(reading))
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
        """Close the file that glances read."""
        self._stat_file.close()

    def _stat(self, reading: SourceReading) -> None:
        rows: dict[str, Modes] = {}
        unread: set[str] = set()
        for where, line in reading.numbered(self._stat_path):
            key, _, rest = line.partition(" ")
            try:
                if key in COUNTS:  # split once: the row of interrupts has thousands of numbers
                    reading.add(COUNTS[key], whole(rest.split(None, 1)[0]) * INSIDE.get(key, 1))
                elif key.startswith("cpu"):
                    rows[key] = self._settled(self._rows.get(key), parse_modes(rest))
            except (ValueError, IndexError) as error:
                reading.fail(f"{where}: {error} in {line[:120]!r}")
                unread.add(key)
        self._rows |= rows
        total = rows.pop("cpu", None)
        if total is not None:
            for mode, ticks in total.items():
                reading.add("pacecar_host_cpu_seconds_total", ticks * self._tick_ns, mode)
            ratio = self._utilization("cpu", total)
            if ratio is not None:
                reading.add("pacecar_host_cpu_utilization_ratio", ratio)
        if rows:
            reading.add("pacecar_host_cpus_online", len(rows) + len(unread - COUNTS.keys() - {"cpu"}))
            self._numa(reading, unread)

    def _settled(self, before: Modes | None, now: Modes) -> Modes:
        """Return `now` with small falls of idle and iowait treated as no progress."""
        if before is not None:
            for mode in _IDLE & now.keys() & before.keys():
                back = before[mode] - now[mode]
                if 0 < back * self._tick_ns <= CORRECTION_NS:
                    now[mode] = before[mode]
        return now

    def _load(self, reading: SourceReading, where: str, line: str) -> None:
        fields = line.split()
        if len(fields) < len(WINDOWS) + 1:
            reading.fail(f"{where}: {len(fields)} fields, expected at least {len(WINDOWS) + 1}")
            return
        for window, average in zip(WINDOWS, fields, strict=False):
            try:
                reading.add("pacecar_host_load_average", float(average), window)
            except ValueError as error:
                reading.fail(f"{where}: {error}")
        reading.add_number(where, fields[len(WINDOWS)].partition("/")[2], "pacecar_host_threads")

    def _numa(self, reading: SourceReading, unread: set[str]) -> None:
        for node, cpus in self._nodes.get(reading, lambda: self._read_nodes(reading)).items():
            self._node_of |= dict.fromkeys(cpus, node)
        by_node: dict[str, list[Modes]] = {}
        for cpu, node in self._node_of.items():
            if cpu in self._rows:
                by_node.setdefault(node, []).append(self._rows[cpu])
        for node in {self._node_of[cpu] for cpu in unread & self._node_of.keys()}:
            by_node.pop(node, None)  # a partial sum would look like a smaller machine
        for node, rows in by_node.items():
            modes = sum_modes(rows)
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
            if cpus:  # a memory-only node has an empty list
                nodes[name.removeprefix("node")] = frozenset(f"cpu{cpu}" for cpu in cpus)
        return nodes

    def _read_frequencies(self, reading: SourceReading) -> list[Sample]:
        folder = self._files.sys / "devices" / "system" / "cpu" / "cpufreq"
        names = [name for name in reading.names(folder) or [] if re.fullmatch(r"policy\d+", name)]
        policies = [folder / name for name in reading.first(names, CPUS_MAX, "processors")]
        now, limits = (
            self._each(reading, policies, "scaling_cur_freq"),
            self._each(reading, policies, "scaling_max_freq"),
        )
        samples: list[Sample] = []
        if now:
            samples.append(sample("pacecar_host_cpu_frequency_min_hertz", min(now)))
            samples.append(sample("pacecar_host_cpu_frequency_mean_hertz", sum(now) / len(now)))
        if limits:
            samples.append(sample("pacecar_host_cpu_frequency_limit_hertz", min(limits)))
        return samples

    def _each(self, reading: SourceReading, policies: Sequence[Path], name: str) -> list[int]:
        """Return the frequency of each policy that has one; nothing if one cannot be read, as that is incomplete."""
        found: list[int] = []
        failures = reading.failures
        for policy in policies:
            value = reading.parsed(policy / name, parse_frequency, has_none=POLICY_HAS_NONE)
            if value is not None:
                found.append(value)
        return found if reading.failures == failures else []


def parse_modes(text: str) -> Modes:
    """Return ticks by mode from a cpu line without its key; raises ValueError."""
    fields = text.split()
    if len(fields) < MODES_MIN:
        raise ValueError(f"{len(fields)} fields, expected at least {MODES_MIN}")
    return {mode: whole(field) for mode, field in zip(MODES, fields, strict=False)}


def parse_frequency(line: str) -> int | None:
    """Return kHz, None if the driver reports none; raises ValueError."""
    return None if line == FREQUENCY_UNKNOWN else whole(line)


def sum_modes(rows: Iterable[Modes]) -> Modes:
    """Return the sum of cpu lines, mode by mode."""
    total: Modes = {}
    for row in rows:
        for mode, ticks in row.items():
            total[mode] = total.get(mode, 0) + ticks
    return total


def utilization(before: Modes | None, now: Modes) -> float | None:
    """Return the busy share (0..1) between two readings of one cpu line; None if no time passed between them.

    A mode that fell counts as zero: proc(5) says that iowait may decrease, and processors go offline.
    """
    if before is None:
        return None
    spent = {mode: max(0, ticks - before.get(mode, ticks)) for mode, ticks in now.items() if ticks <= TICKS_MAX}
    total = sum(spent.values())
    if total == 0:
        return None
    return sum(ticks for mode, ticks in spent.items() if mode not in _IDLE) / total
