"""Computes the timeline of a report's window: which heading each instant was charged to.

A ledger has sums; a picture and a trace viewer need intervals.  Both come from the same sweep, so the intervals of a
heading add up to the ledger to the nanosecond.  That is checked each time: a drawing that contradicts the table beside
it would be worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.attribution import LossCause, Work, charge
from pacecar.ledger.intervals import Intervals
from pacecar.records import LEDGER_HEADINGS, Ledger

from ..document.report import TraceReport
from ..one_rank.one_trace import charges_of
from ..trace.columns import Trace
from ..trace.steps import rows_of_hta

__all__ = ["TraceTimeline", "columns_of", "timeline", "timeline_between"]


@dataclass(frozen=True, slots=True)
class TraceTimeline:
    """A window of one trace: n + 1 times, the heading of each interval between them, and the spans behind it.

    `heading` indexes LEDGER_HEADINGS.  Times are the trace's own.
    """

    window: tuple[int, int]
    times: NDArray[np.int64]
    heading: NDArray[np.int8]
    work: dict[Work, Intervals]
    causes: dict[LossCause, Intervals]

    def stretches(self, heading: str) -> Intervals:
        """Return the rows [start, end) that were charged to `heading`."""
        mine = self.heading == LEDGER_HEADINGS.index(heading)
        rows: Intervals = np.stack((self.times[:-1][mine], self.times[1:][mine]), axis=1)
        return rows


def timeline(trace: Trace, report: TraceReport, part: tuple[int, Ledger] | None = None) -> TraceTimeline:
    """Return the timeline of the report's window, or of a `part` of it, given by its start and its ledger.

    Raises ValueError if the intervals do not add up to the ledger, which would be a bug.
    """
    start, ledger = part if part is not None else (report.start_ns, report.ledger)
    if start is None:
        start = trace.start_ns if trace.start_ns is not None else 0
    found = timeline_between(trace, report, (start, start + ledger.wall_ns))
    for name, part_ns in ledger.parts().items():
        rows = found.stretches(name)
        total = int((rows[:, 1] - rows[:, 0]).sum())
        if total != part_ns:
            raise ValueError(f"{report.file}: {name} is {part_ns} ns in the ledger and {total} ns on the time axis")
    return found


def timeline_between(trace: Trace, report: TraceReport, window: tuple[int, int]) -> TraceTimeline:
    """Return the timeline of any window of the trace's own time, without a ledger to check it."""
    charges = charges_of(trace, rows_of_hta(trace) if report.window == "hta" else None)
    times, heading = charge(charges.work, window, causes=charges.causes, observed=charges.observed)
    return TraceTimeline(window, times, heading, charges.work, charges.causes)


def columns_of(report: TraceReport, table: Trace | None) -> Trace:
    """Return the columns of a trace, read again if they were too many to keep.  Raises LookupError if that fails."""
    if table is not None:
        return table
    from ..plausibility.examine import examine
    from ..trace.decoding.remote_file import place_of
    from ..trace.reader import TraceError, read_trace

    try:
        return examine(read_trace(place_of(report.file))).trace
    except TraceError as error:
        raise LookupError(f"{report.file}: cannot be read again: {error}") from error
