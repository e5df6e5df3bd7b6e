"""Parses the kernel's files about processors: lists of CPUs, NUMA nodes, run delay, pressure.

Source: Documentation/admin-guide/cputopology.rst (lists), ABI/stable/sysfs-devices-node, scheduler/sched-stats.rst and
accounting/psi.rst of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .reader import lines_of, whole

__all__ = ["CPUS_MAX", "numa_nodes", "parse_cpu_list", "parse_pressure_average", "parse_pressure_line", "run_delay_ns"]

CPUS_MAX = 8192
"""The most processors that a kernel supports (CONFIG_NR_CPUS); bounds the files that are opened."""


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the processors of a list such as `0-3,8`; raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        low, high = whole(first), whole(last if dash else first)
        if not low <= high < CPUS_MAX:
            raise ValueError(f"{part!r} is not a range of processors")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def numa_nodes(names: Iterable[str]) -> list[str]:
    """Return the folders of NUMA nodes among the `names` in /sys/devices/system/node."""
    return [name for name in names if re.fullmatch(r"node\d+", name)]


def run_delay_ns(stat: str | bytes) -> int | None:
    """Return the nanoseconds that a task waited for a processor, from its schedstat; None for another format."""
    words = stat.split()
    return int(words[1]) if len(words) == 3 and words[1].isdigit() else None


def parse_pressure_line(line: str) -> tuple[str, int]:
    """Return (kind, nanoseconds stalled since boot) of a line in /proc/pressure; raises ValueError or IndexError."""
    kind, fields = _pressure_fields(line)
    if "total" not in fields:
        raise ValueError("no total")
    return kind, whole(fields["total"]) * 1000


def parse_pressure_average(text: str, kind: str) -> float:
    """Return the share of the last minute (0..1) in the line `kind` (some, full); raises ValueError."""
    for line in lines_of(text):
        if line.startswith(f"{kind} "):
            _, fields = _pressure_fields(line)
            if "avg60" not in fields:
                raise ValueError("no avg60")
            return float(fields["avg60"]) / 100
    raise ValueError(f"no line `{kind} ...`")


def _pressure_fields(line: str) -> tuple[str, dict[str, str]]:
    kind, *fields = line.split()
    if kind not in ("some", "full"):
        raise ValueError(f"unknown kind {kind!r}")
    return kind, dict(field.split("=", 1) for field in fields)
