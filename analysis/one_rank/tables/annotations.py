"""Sums up the ranges that the script (`record_function`) or torch marked: optimizer, loader, checkpoint.

The host time of a range means little if the device runs behind.  So the table also has the device time of the work
launched inside the range, on the same thread.

Left out: step marks, which are steps.  Pure.
"""

from __future__ import annotations

import numpy as np

from pacecar.analysis.document.report_tables import AnnotationTotal
from pacecar.analysis.trace.columns import NONE, HostKind

from ..kernel_families import sums_by_group
from ..origins.calls import Calls
from ..origins.grouping import Groups
from ..origins.nesting import values_at
from ..origins.window import TableWindow

__all__ = ["annotation_totals"]

KINDS = (HostKind.ANNOTATION, HostKind.OPTIMIZER, HostKind.LOADER, HostKind.CHECKPOINT)

STEP_PREFIX = "ProfilerStep#"


def annotation_totals(calls: Calls, window: TableWindow) -> list[AnnotationTotal]:
    """Return the ranges that began in `window` by name, the longest first."""
    trace, host, nesting = calls.trace, calls.trace.host_rows, calls.nesting
    is_step = np.array([name.startswith(STEP_PREFIX) for name in trace.names] or [False], dtype=np.bool_)
    is_range = np.isin(host.kind, KINDS) & ~is_step[host.name]
    above = nesting.nearest(nesting.parent, is_range)
    outer = is_range.copy()
    at = above.copy()
    while len(going := np.flatnonzero((at != NONE) & is_range)):
        outer[going[host.name[at[going]] == host.name[going]]] = False
        at[going] = above[at[going]]
    rows = np.flatnonzero(outer & window.has_host)
    groups = Groups.of(host.name[rows].astype(np.int64))
    durations = (host.end_ns - host.start_ns)[rows]
    sums = sums_by_group(groups.number, durations, groups.count)
    place = np.full(len(host.start_ns), NONE, dtype=np.int64)
    place[rows] = groups.number
    device, exposed = ([0] * groups.count for _ in range(2))
    inside = nesting.nearest(calls.row_call[window.rows], is_range)
    while len(going := np.flatnonzero(inside != NONE)):
        group = values_at(place, inside[going])
        mine = window.rows[going[group != NONE]]
        group = group[group != NONE]
        for found, values in ((device, window.duration_ns), (exposed, window.charged_ns)):
            for number, value in enumerate(sums_by_group(group, values[mine], groups.count)):
                found[number] += value
        inside[going] = above[inside[going]]
    totals = [
        AnnotationTotal(
            name=trace.names[name],
            count=len(groups.rows(group)),
            host_ns=sums[group],
            min_ns=int(durations[groups.rows(group)].min()),
            max_ns=int(durations[groups.rows(group)].max()),
            device_ns=device[group],
            exposed_ns=exposed[group],
        )
        for group, name in enumerate(groups.keys[0])
    ]
    return sorted(totals, key=lambda row: (-row.host_ns, row.name))
