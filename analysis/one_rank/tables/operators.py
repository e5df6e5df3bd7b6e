"""Sums up the operators of a trace: calls, time on the host, and the time on the device of what they launched.

An operator calls others: `aten::linear` calls `aten::addmm`, which launches the kernel.  So each time exists twice: of
the operator itself, and including all that it called.  A recursion counts once, by its outer call.

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.document.report_tables import OperatorTotal
from pacecar.analysis.trace.columns import NONE

from ..kernel_families import sums_by_group
from ..origins.calls import Calls
from ..origins.grouping import Groups, Origins, longest_of
from ..origins.window import TableWindow

__all__ = ["OperatorTable", "operator_totals"]

Index = NDArray[np.int64]


class OperatorTable(NamedTuple):
    """The totals, and for each device row the place of its launching operator, NONE for none."""

    totals: list[OperatorTotal]
    place_of_row: Index


def operator_totals(calls: Calls, window: TableWindow, origins: Origins) -> OperatorTable:
    """Return the operators that began in `window` or launched something that runs in it."""
    host = calls.trace.host_rows
    count = len(origins.texts) - 1
    above = _operators_above(calls)
    is_outer = _is_outer(above, origins.of_host)
    rows = np.flatnonzero(calls.is_operator & window.has_host)
    of_call = origins.of_host[rows]
    durations = (host.end_ns - host.start_ns)[rows]
    calls_made = np.bincount(of_call, minlength=count).tolist()
    host_ns = sums_by_group(of_call, np.where(is_outer[rows], durations, 0), count)
    self_ns = sums_by_group(of_call, _self_ns(calls, above)[rows], count)
    launched = window.rows[calls.row_operator[window.rows] != NONE]
    by = calls.row_operator[launched]
    of_row = origins.of_host[by]
    device_ns = sums_by_group(of_row, window.duration_ns[launched], count)
    exposed_ns = sums_by_group(of_row, window.charged_ns[launched], count)
    kernels = np.bincount(of_row, minlength=count).tolist()
    total_ns = _with_children(window.duration_ns[launched], by, above, is_outer, origins.of_host, count)
    lines = _lines(calls, origins.of_host, rows, durations, count)
    has_device = calls.trace.has_device
    order = [each for each in range(count) if calls_made[each] or kernels[each]]
    order.sort(key=lambda each: (-device_ns[each], -self_ns[each], tuple(part or "" for part in origins.texts[each])))
    totals = []
    for each in order:
        origin = origins.texts[each]
        assert origin.operator is not None
        totals.append(
            OperatorTotal(
                name=origin.operator,
                shapes=origin.shapes,
                types=origin.types,
                module=origin.module,
                source=calls.lines[lines[each]] if lines[each] != NONE else None,
                count=calls_made[each],
                host_ns=host_ns[each],
                host_self_ns=self_ns[each],
                device_ns=device_ns[each],
                device_total_ns=total_ns[each],
                exposed_ns=exposed_ns[each] if has_device else None,
                critical_ns=None,
                kernels=kernels[each],
            )
        )
    place = np.full(len(calls.trace.device.start_ns), NONE, dtype=np.int64)
    rank = np.full(count, NONE, dtype=np.int64)
    rank[order] = np.arange(len(order))
    place[launched] = rank[of_row]
    return OperatorTable(totals, place)


def _operators_above(calls: Calls) -> Index:
    """For each host row, return the nearest operator around it, not itself."""
    return calls.nesting.nearest(calls.nesting.parent, calls.is_operator)


def _is_outer(above: Index, group: Index) -> NDArray[np.bool_]:
    """Return which rows are not inside another row of their own group."""
    outer = np.ones(len(above), dtype=np.bool_)
    at = above.copy()
    while len(going := np.flatnonzero(at != NONE)):
        outer[going[group[at[going]] == group[going]]] = False
        at[going] = above[at[going]]
    return outer


def _self_ns(calls: Calls, above: Index) -> Index:
    """Return each row's duration without the parts of the operators directly inside it."""
    host = calls.trace.host_rows
    own = host.end_ns - host.start_ns
    children = np.flatnonzero(calls.is_operator & (above != NONE))
    parents = above[children]
    inside = np.minimum(host.end_ns[children], host.end_ns[parents]) - host.start_ns[children]
    np.subtract.at(own, parents, inside)
    kept: Index = np.maximum(own, 0)
    return kept


def _with_children(
    durations: Index, by: Index, above: Index, is_outer: NDArray[np.bool_], group: Index, count: int
) -> list[int]:
    """For each group, return the time of device rows launched anywhere inside its calls."""
    found = [0] * count
    at = by.copy()
    while len(going := np.flatnonzero(at != NONE)):
        counted = going[is_outer[at[going]]]
        for place, value in enumerate(sums_by_group(group[at[counted]], durations[counted], count)):
            found[place] += value
        at[going] = above[at[going]]
    return found


def _lines(calls: Calls, group: Index, rows: Index, durations: Index, count: int) -> list[int]:
    """For each group, return the python line of its longest call."""
    found = [NONE] * count
    if len(rows):
        groups = Groups.of(group[rows])
        for number, line in zip(groups.keys[0], longest_of(groups, durations, calls.line[rows]).tolist(), strict=True):
            found[number] = line
    return found
