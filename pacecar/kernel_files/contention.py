"""Judges whether more wants to run on a machine than it has processors: one rule for the doctor and for a running job.

What a job loses there looks in its ledger like slow Python or a straggler, so the remedies for those would be wrong.
In go figures that somebody has read, None for what is not known; what is not known proves nothing.
Pure.  Left out: what to say of it (`commands/doctor/rules/contention`, `controller/restart_advice`).
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
"""Tasks a processor, over five minutes, from on which they wait for each other; at 1 a machine is merely busy."""

PRESSURE_MIN = 0.20
"""Share of the last minute in which some task waited for a processor.  A machine that is busy, and no more, has some
per cent of that at switches; with a fifth every fifth moment of a step may be somebody else's."""


def are_processors_contended(*, pressure: float | None, load: float | None, count: int | None) -> bool:
    """Return whether tasks wait for a processor: by PSI, or by the load of five minutes where the kernel has no PSI.

    A load also counts tasks that wait for a disk, which are then taken for tasks that wait for a processor.
    """
    if pressure is not None:
        return pressure >= PRESSURE_MIN
    return load is not None and count is not None and load >= LOAD_RATIO_MIN * count


def openmp_threads(setting: str | None) -> int | None:
    """Return the threads of OMP_NUM_THREADS, the first of a list; None where it is not set or says none."""
    number = None if setting is None else re.match(r"\s*(\d+)", setting)
    return int(number[1]) if number is not None and int(number[1]) > 0 else None


def do_threads_exceed(*, threads: int | None, ranks: int, usable: int | None) -> bool:
    """Return whether `ranks` of `threads` each are more than the `usable` processors.

    A single thread is no choice of anybody's, so it is never too many: see `do_ranks_exceed`.
    """
    return threads is not None and usable is not None and threads > 1 and threads * max(ranks, 1) > usable


def do_ranks_exceed(*, ranks: int, usable: int | None) -> bool:
    """Return whether `ranks` that compute on processors are more than the `usable` ones."""
    return usable is not None and ranks > usable
