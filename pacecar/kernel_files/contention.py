"""Judges whether more tasks want to run than a machine has processors, for the doctor and for a running job.

In a ledger, this loss looks like slow Python or a straggler, and the remedies for those would be wrong.
In: figures, None if unknown; an unknown figure proves nothing.  Pure.
Left out: the advice (`commands/doctor/rules/contention`, `controller/restart_advice`).
"""

from __future__ import annotations

import re

__all__ = [
    "LOAD_RATIO_MIN",
    "PRESSURE_MIN",
    "are_processors_contended",
    "do_ranks_exceed",
    "do_threads_exceed",
    "openmp_threads",
]

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
