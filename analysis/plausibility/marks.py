"""Checks that the marked steps hold the trace's work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pacecar.formatting.quantities import percent, plural
from pacecar.ledger.intervals import covers, intervals, union

from ..trace.columns import HostKind, Trace, TraceWarning
from ..trace.steps import step_windows

__all__ = ["check_steps"]

OUTSIDE_RATIO_SAID = 0.1
"""From this share of the work's time on, work outside the steps is reported.  Some before the first step is usual."""


def check_steps(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without its marks if none of them contains work."""
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
        message = f"none of the {plural(len(trace.steps), 'marked step')} contains work: the marks are not used"
        return replace(trace, steps=()), [TraceWarning("steps_without_work", message, len(trace.steps), "left_out")]
    message = f"{percent(outside / busy)} of the work's time is outside the marked steps and missing in their figures"
    return trace, [TraceWarning("work_outside_steps", message)]
