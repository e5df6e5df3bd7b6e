"""Parses the kernel's files about processors (CPU lists, NUMA nodes, run delay, pressure), and judges if they suffice.

More tasks than processors look in a ledger like slow Python or a straggler, and the remedies for those would be wrong.
The doctor and a running job use the same rule.  An unknown figure is None and proves nothing.  Pure.

Source: Documentation/admin-guide/cputopology.rst (lists), ABI/stable/sysfs-devices-node, scheduler/sched-stats.rst and
accounting/psi.rst of the kernel.
Left out: the advice (`commands/doctor/rules/contention`, `controller/restart_advice`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .reader import lines_of, whole

__all__ = [
    "CPUS_MAX",
    "LOAD_RATIO_MIN",
    "PRESSURE_MIN",
    "are_processors_contended",
    "do_ranks_exceed",
    "do_threads_exceed",
    "numa_nodes",
    "openmp_threads",
    "parse_cpu_list",
    "parse_pressure_average",
    "parse_pressure_line",
    "run_delay_ns",
]

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


LOAD_RATIO_MIN = 1.25
"""From this many tasks per processor on, over five minutes, tasks wait for each other; at 1 a machine is just busy."""

PRESSURE_MIN = 0.20
"""Share of the last minute in which some task waited for a processor.  A machine that is just busy shows a few percent
from task switches; at a fifth, other tasks may have the processor for a fifth of a step."""


def are_processors_contended(*, pressure: float | None, load: float | None, count: int | None) -> bool:
    """Return whether tasks wait for a processor: by PSI, or by the five-minute load if the kernel has no PSI.

    The load also counts tasks that wait for a disk, so it may overstate.
    """
    if pressure is not None:
        return pressure >= PRESSURE_MIN
    return load is not None and count is not None and load >= LOAD_RATIO_MIN * count


def openmp_threads(setting: str | None) -> int | None:
    """Return the threads in OMP_NUM_THREADS, the first of a list; None if it is unset or has no number."""
    number = None if setting is None else re.match(r"\s*(\d+)", setting)
    return int(number[1]) if number is not None and int(number[1]) > 0 else None


def do_threads_exceed(*, threads: int | None, ranks: int, usable: int | None) -> bool:
    """Return whether `ranks` with `threads` each need more than the `usable` processors.

    A single thread per rank cannot be reduced, so it is never too many: see `do_ranks_exceed`.
    """
    return threads is not None and usable is not None and threads > 1 and threads * max(ranks, 1) > usable


def do_ranks_exceed(*, ranks: int, usable: int | None) -> bool:
    """Return whether there are more `ranks` that compute on processors than `usable` processors."""
    return usable is not None and ranks > usable
