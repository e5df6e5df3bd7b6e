"""Where did the step go?  Split a window of time by the work that filled it.

Total communication time cannot answer: a collective that runs under a matmul costs nothing.  What costs is *exposed*
communication, when communication runs and no compute does.

    compute         ##########......
    communication   ......##########
    charged to      ccccccoooooeeeee    c compute, o compute that hides communication, e exposed communication

One instant has one heading, by this priority: compute, communication, copy, work of a kind that nobody could tell
(unknown), and, when nothing runs, the cause: data wait, checkpoint, pacecar's own hook, optimizer, else the host did
not feed the device (host_bound).  Outside the stretch that was observed everything is unknown: no event there is not
the same as no work.  Work of one kind at the same instant counts once; work from before or after the window is clipped.

On a CPU job the words mean: compute = an operator runs on a training thread, communication = gloo work runs on its own
threads, host_bound = python between operators; see `pacecar.profiler.reading`, which makes the spans.

Everything here is pure: spans in, ledgers out.  No torch, no clock and no files.  Left out: what a late rank cost
another one; that needs the records of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pacecar.profiler.spans import EMPTY, Intervals, clip, covers, union
from pacecar.records import LEDGER_HEADINGS, Ledger

__all__ = ["Cause", "Work", "attribute", "attribute_phases"]


class Work(StrEnum):
    """What ran."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"
    OTHER = "other"


class Cause(StrEnum):
    """Why nothing ran, as far as the host knows.  HOOK is pacecar's own code: the device waits for the host."""

    DATA_WAIT = "data_wait"
    CHECKPOINT = "checkpoint"
    OPTIMIZER = "optimizer_host"
    HOOK = "host_bound"


_HEADING = {heading: index for index, heading in enumerate(LEDGER_HEADINGS)}

REST = "rest"
"""The phase of every instant that no named phase covers."""


def attribute(
    work: Mapping[Work, Intervals],
    window: tuple[int, int],
    *,
    causes: Mapping[Cause, Intervals] | None = None,
    observed: tuple[int, int] | None = None,
) -> Ledger:
    """Return the ledger of `window` = [start, end); its parts sum to end - start exactly.

    Rows of `work` and `causes` may overlap and come in any order.  `observed` is the stretch in which every piece of
    work would have been seen; None means the whole window.
    """
    return attribute_phases(work, window, {}, causes=causes, observed=observed)[REST]


def attribute_phases(
    work: Mapping[Work, Intervals],
    window: tuple[int, int],
    phases: Mapping[str, Intervals],
    *,
    causes: Mapping[Cause, Intervals] | None = None,
    observed: tuple[int, int] | None = None,
) -> dict[str, Ledger]:
    """Return one ledger for each phase and one for `REST`; added up they are the ledger of `window`.

    Where phases overlap the one named first has the instant.
    """
    start, end = window
    causes = causes or {}
    layers = {kind: union(clip(rows, start, end)) for kind, rows in work.items()}
    reasons = {cause: union(clip(rows, start, end)) for cause, rows in causes.items()}
    stretches = {name: union(clip(rows, start, end)) for name, rows in phases.items()}
    seen = union(clip(np.array([observed or window], dtype=np.int64), start, end))
    edges = [np.array([start, end], dtype=np.int64), seen.ravel()]
    edges += [rows.ravel() for rows in (*layers.values(), *reasons.values(), *stretches.values())]
    cuts = np.unique(np.concatenate(edges))
    starts, durations = cuts[:-1], np.diff(cuts)

    heading, communication, hidden = _charge(starts, layers, reasons, seen)
    phase = np.full(len(starts), len(stretches), dtype=np.int64)
    for index, rows in reversed(list(enumerate(stretches.values()))):
        phase[covers(rows, starts)] = index
    return {
        name: _ledger(durations, phase == index, heading, communication, hidden)
        for index, name in enumerate((*stretches, REST))
    }


def _charge(
    starts: NDArray[np.int64],
    layers: Mapping[Work, Intervals],
    reasons: Mapping[Cause, Intervals],
    seen: Intervals,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return each segment's heading, whether communication ran in it, and whether that ran under compute."""
    heading = np.full(len(starts), _HEADING["unknown"], dtype=np.int64)
    heading[covers(seen, starts)] = _HEADING["host_bound"]
    # From the weakest claim to the strongest.  Operators may have run in the optimizer, so its claim holds only where
    # somebody looked; the others are stretches in which the host itself did nothing for the device.
    watched = covers(seen, starts)
    for cause, needs_watch in (
        (Cause.OPTIMIZER, True),
        (Cause.HOOK, False),
        (Cause.CHECKPOINT, False),
        (Cause.DATA_WAIT, False),
    ):
        claim = covers(reasons.get(cause, EMPTY), starts)
        heading[claim & watched if needs_watch else claim] = _HEADING[cause.value]
    heading[covers(layers.get(Work.OTHER, EMPTY), starts)] = _HEADING["unknown"]
    heading[covers(layers.get(Work.COPY, EMPTY), starts)] = _HEADING["exposed_copy"]
    communication = covers(layers.get(Work.COMMUNICATION, EMPTY), starts)
    heading[communication] = _HEADING["exposed_communication"]
    compute = covers(layers.get(Work.COMPUTE, EMPTY), starts)
    heading[compute] = _HEADING["compute"]
    return heading, communication, communication & compute


def _ledger(
    durations: NDArray[np.int64],
    mine: NDArray[np.bool_],
    heading: NDArray[np.int64],
    communication: NDArray[np.bool_],
    hidden: NDArray[np.bool_],
) -> Ledger:
    parts = {name: int(durations[mine & (heading == index)].sum()) for name, index in _HEADING.items()}
    return Ledger(
        wall_ns=int(durations[mine].sum()),
        communication_ns=int(durations[mine & communication].sum()),
        overlapped_communication_ns=int(durations[mine & hidden].sum()),
        **{f"{name}_ns": value for name, value in parts.items()},
    )
