"""Checks that the marked steps hold the trace's work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pacecar.formatting.quantities import percent, plural

from ...ledger.intervals import covers, intervals, union
from ...trace.columns import HostKind, Trace, TraceWarning
from ..one_rank.steps import step_windows

__all__ = ["check_steps"]

OUTSIDE_RATIO_SAID = 0.1
"""From this part of the work's time on what the steps leave out is said.  Some work before the first step is usual."""


def check_steps(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without its marks where no work is in any of them."""
    if not trace.steps:
        return trace, []
    rows, works = trace.device, np.ones(len(trace.device.start_ns), dtype=np.bool_)
    start, end = rows.start_ns, rows.end_ns
    if not trace.has_device:
        host = trace.host_rows
        works = (host.kind == HostKind.OPERATOR) | (host.kind == HostKind.COLLECTIVE_WORK)
        start, end = host.start_ns[works], host.end_ns[works]
    busy = int((end - start).sum())
    steps, _ = step_windows(trace)
    marked = union(intervals((step.start_ns, step.end_ns) for step in steps))
    outside = int((end - start)[~covers(marked, start)].sum())
    if not busy or outside < OUTSIDE_RATIO_SAID * busy:
        return trace, []
    if outside == busy:
        message = f"none of the {plural(len(trace.steps), 'marked step')} has any work in it: the marks are not used"
        return replace(trace, steps=()), [TraceWarning("steps_without_work", message, len(trace.steps), "left_out")]
    message = f"{percent(outside / busy)} of the work's time is outside of the marked steps, whose figures leave it out"
    return trace, [TraceWarning("work_outside_steps", message)]
