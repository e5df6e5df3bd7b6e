"""Attributes a window of time to the kinds of work that filled it, by a sweep line over unions of intervals.

Total communication time does not say what a step lost: a collective that runs under a matmul costs nothing.  Only
*exposed* communication costs, when communication runs and no compute does.

    compute         ##########......
    communication   ......##########
    charged to      ccccccoooooeeeee    c compute, o compute that hides communication, e exposed communication

Each instant has one heading, by this priority: compute, communication, copy, work of unknown kind (unknown), and, if
nothing runs, the cause: the process was stopped, data wait, checkpoint, pacecar's own hook, optimizer, else the host
did not feed the device (host_bound).  Outside the observed interval everything is unknown, because the absence of
events there does not mean that nothing ran.  Work of one kind at the same instant counts once; work from before or
after the window is clipped.

For a CPU job: compute = an operator runs on a training thread, communication = gloo works on its own threads,
host_bound = Python between operators.  `pacecar.profiler.windows.trace_spans` makes the intervals.

One sweep serves any number of windows.  The edges of all unions are sorted once.  Each edge adds the bit of a kind to a
running sum, or subtracts it, so that the sum *is* the set of what runs; a table maps each set to its heading.  With
cumulative sums, a window is the difference of two sums, so a thousand steps do not need a thousand passes.

Pure: no torch, no clock, no files.  Left out: what a late rank costs another, which needs the records of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pacecar.records import LEDGER_HEADINGS, Ledger

from .intervals import Intervals, clip, intervals, subtract, union

__all__ = [
    "SKEW_NS_MAX", "LossCause", "Work",
    "attribute", "attribute_phases", "attribute_windows", "charge", "compute_on_host",
]  # fmt: skip

SKEW_NS_MAX = 100_000
"""A kernel cannot begin before its launch; clocks are converted with an error of microseconds."""


class Work(StrEnum):
    """The kind of work that ran."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"
    OTHER = "other"


class LossCause(StrEnum):
    """Why nothing ran, as far as the host knows.  HOOK is pacecar's own code, for which the device waits."""

    STOPPED = "stopped"
    DATA_WAIT = "data_wait"
    CHECKPOINT = "checkpoint"
    OPTIMIZER = "optimizer_host"
    HOOK = "host_bound"


REST = "rest"
"""The phase of all instants outside named phases."""

_LAYERS: tuple[Work | LossCause, ...] = (*Work, *LossCause)
_BITS: dict[Work | LossCause, int] = {layer: index for index, layer in enumerate(_LAYERS)}
_SEEN = len(_LAYERS)
_PHASE = _SEEN + 1
"""The bit of the first phase; the lower bits are work, causes and "observed"."""

_HEADINGS = {heading: index for index, heading in enumerate(LEDGER_HEADINGS)}


def _heading(running: int) -> int:
    """Return the heading of an instant at which the layers in the bit set `running` run."""

    def runs(layer: Work | LossCause) -> bool:
        return bool(running >> _BITS[layer] & 1)

    is_seen = bool(running >> _SEEN & 1)
    if runs(Work.COMPUTE):
        name = "compute"
    elif runs(Work.COMMUNICATION):
        name = "exposed_communication"
    elif runs(Work.COPY):
        name = "exposed_copy"
    elif runs(Work.OTHER):
        name = "unknown"
    elif cause := next(
        (c for c in (LossCause.STOPPED, LossCause.DATA_WAIT, LossCause.CHECKPOINT, LossCause.HOOK) if runs(c)), None
    ):
        name = cause.value  # the host did nothing for the device, whether the instant was observed or not
    elif not is_seen:
        name = "unknown"
    else:
        # Operators may have run in the optimizer, so this heading holds only where work was observed.
        name = LossCause.OPTIMIZER.value if runs(LossCause.OPTIMIZER) else "host_bound"
    return _HEADINGS[name]


_HEADING_OF = np.array([_heading(running) for running in range(1 << _PHASE)], dtype=np.int8)
_COMMUNICATION = 1 << _BITS[Work.COMMUNICATION]
_OVERLAP = _COMMUNICATION | 1 << _BITS[Work.COMPUTE]


def compute_on_host(operators: Intervals, launches: Intervals, waits: Intervals) -> Intervals:
    """Return when a CPU job computes: operators of training threads, without launches of collectives and data waits."""
    return subtract(subtract(union(operators), union(launches)), union(waits))


def attribute(
    work: Mapping[Work, Intervals],
    window: tuple[int, int],
    *,
    causes: Mapping[LossCause, Intervals] | None = None,
    observed: tuple[int, int] | None = None,
) -> Ledger:
    """Return the ledger of `window` = [start, end); its parts sum to end - start exactly.

    Rows of `work` and `causes` may overlap and come in any order.  `observed` is the interval in which all work was
    recorded; None means the whole window.
    """
    return attribute_windows(work, [window], causes=causes, observed=observed)[0]


def attribute_windows(
    work: Mapping[Work, Intervals],
    windows: Sequence[tuple[int, int]],
    *,
    causes: Mapping[LossCause, Intervals] | None = None,
    observed: tuple[int, int] | None = None,
) -> list[Ledger]:
    """Return the ledger of each of `windows`, which may overlap and come in any order."""
    if not windows:
        return []
    edges = np.array(windows, dtype=np.int64)
    cuts = np.unique(edges)
    times, running = _sweep(work, cuts, {}, causes, observed)
    durations = np.diff(times)
    at = np.searchsorted(times, edges)
    return _ledgers(durations, _HEADING_OF[running], running, at[:, 0], at[:, 1], edges[:, 1] - edges[:, 0])


def attribute_phases(
    work: Mapping[Work, Intervals],
    window: tuple[int, int],
    phases: Mapping[str, Intervals],
    *,
    causes: Mapping[LossCause, Intervals] | None = None,
    observed: tuple[int, int] | None = None,
) -> dict[str, Ledger]:
    """Return one ledger per phase and one for `REST`; they sum to the ledger of `window`.

    Where phases overlap, the first one gets the instant.
    """
    times, running = _sweep(work, np.array(window), phases, causes, observed)
    durations = np.diff(times)
    phase = running >> _PHASE
    phase &= -phase  # the lowest bit is the phase named first
    order = np.argsort(phase, kind="stable")
    bits = [1 << index for index in range(len(phases))] + [0]
    low, high = (np.searchsorted(phase[order], bits, side=side) for side in ("left", "right"))
    durations, running = durations[order], running[order] & (1 << _PHASE) - 1
    walls = np.concatenate(([0], np.cumsum(durations)))
    ledgers = _ledgers(durations, _HEADING_OF[running], running, low, high, walls[high] - walls[low])
    return dict(zip((*phases, REST), ledgers, strict=True))


def charge(
    work: Mapping[Work, Intervals],
    window: tuple[int, int],
    *,
    causes: Mapping[LossCause, Intervals] | None = None,
    observed: tuple[int, int] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Return the timeline of `window`: n + 1 times, and the heading of each interval between them.

    Headings are indices into `LEDGER_HEADINGS`; neighbours differ and no interval is empty.
    """
    times, running = _sweep(work, np.array(window), {}, causes, observed)
    heading = _HEADING_OF[running]
    keep = np.diff(times) > 0
    times, heading = np.append(times[:-1][keep], times[-1]), heading[keep]
    changes = np.flatnonzero(np.concatenate((np.ones(min(len(heading), 1), np.bool_), heading[1:] != heading[:-1])))
    return np.append(times[changes], times[-1]), heading[changes]


def _sweep(
    work: Mapping[Work, Intervals],
    cuts: NDArray[np.int64],
    phases: Mapping[str, Intervals],
    causes: Mapping[LossCause, Intervals] | None,
    observed: tuple[int, int] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sorted times from the first of `cuts` to the last and, for each but the last, the set of what runs then.

    The times include all of `cuts`, which are sorted.  Times may repeat; the interval between equal ones is empty.
    """
    start, end = int(cuts[0]), int(cuts[-1])
    layers: list[tuple[int, Intervals]] = [(_BITS[kind], rows) for kind, rows in work.items()]
    layers += [(_BITS[cause], rows) for cause, rows in (causes or {}).items()]
    layers += [(_SEEN, intervals([observed or (start, end)]))]
    layers += [(_PHASE + index, rows) for index, rows in enumerate(phases.values())]
    merged = [(bit, union(clip(rows, start, end))) for bit, rows in layers]
    # A union's rows are disjoint, so flattened they are sorted: each layer is one sorted run.
    times = np.concatenate((cuts, *(rows.ravel() for _, rows in merged)))
    changes = np.zeros(len(times), dtype=np.int64)
    at = len(cuts)
    for bit, rows in merged:
        changes[at : at + rows.size : 2] = 1 << bit
        changes[at + 1 : at + rows.size : 2] = -1 << bit
        at += rows.size
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order])[:-1]


def _ledgers(
    durations: NDArray[np.int64],
    heading: NDArray[np.int8],
    running: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    walls: NDArray[np.int64],
) -> list[Ledger]:
    """Return a ledger for each window of segments [low, high)."""
    sums = np.zeros(len(durations) + 1, dtype=np.int64)

    def inside(mine: NDArray[np.bool_]) -> list[int]:
        np.cumsum(np.where(mine, durations, 0), out=sums[1:])
        found: list[int] = (sums[high] - sums[low]).tolist()
        return found

    columns = [inside(heading == index) for index in range(len(LEDGER_HEADINGS))]
    columns.append(inside(running & _COMMUNICATION != 0))
    columns.append(inside(running & _OVERLAP == _OVERLAP))
    columns.append(walls.tolist())
    return [Ledger(**dict(zip(_COLUMNS, row, strict=True))) for row in zip(*columns, strict=True)]


_COLUMNS = (
    *(f"{heading}_ns" for heading in LEDGER_HEADINGS),
    "communication_ns",
    "overlapped_communication_ns",
    "wall_ns",
)
