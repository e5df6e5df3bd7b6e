"""Sums up the device rows of a trace by name, and each name by what launched it.

The name of a long kernel does not say what to change: forty layers share a matmul.  So each name is split by the
operator that launched it, that operator's shapes and its module.

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.document.report_tables import KernelLauncher, KernelTotal
from pacecar.analysis.trace.columns import NONE, WORKS
from pacecar.ledger.attribution import Work

from ..kernel_families import family_of, sums_by_group
from ..origins.calls import Calls
from ..origins.grouping import Groups, Origin, longest_of
from ..origins.nesting import values_at
from ..origins.window import TableWindow

__all__ = ["LAUNCHERS_MAX", "KernelTable", "kernel_totals"]

LAUNCHERS_MAX = 8
"""The most launchers listed for one kernel: the longest, which nearly always have most of its time."""

Index = NDArray[np.int64]


class KernelTable(NamedTuple):
    """The totals, the longest first, and the place of each device row there, NONE outside the window or the list."""

    totals: list[KernelTotal]
    place_of_row: Index
    launcher_of_row: Index


def kernel_totals(calls: Calls, window: TableWindow, origins: list[Origin], origin_of: Index) -> KernelTable:
    """Return the totals of the device rows of `window` by name; `origin_of` is the index of each row in `origins`."""
    trace, device = calls.trace, calls.trace.device
    rows = window.rows
    if len(rows) == 0:
        nowhere = np.full(len(device.start_ns), NONE, dtype=np.int64)
        return KernelTable([], nowhere, nowhere)
    kinds = Groups.of(device.name[rows].astype(np.int64), device.work[rows].astype(np.int64))
    pairs = Groups.of(kinds.number, origin_of[rows])
    durations = window.duration_ns[rows]
    sums = sums_by_group(kinds.number, durations, kinds.count)
    exposed = sums_by_group(kinds.number, window.charged_ns[rows], kinds.count)
    launchers = _launchers(calls, window, pairs, origins, rows)
    order = sorted(
        range(kinds.count), key=lambda group: (-sums[group], trace.names[kinds.keys[0][group]], kinds.keys[1][group])
    )
    totals = []
    place_of_pair = np.full(pairs.count, NONE, dtype=np.int64)
    for group in order:
        name, work = trace.names[kinds.keys[0][group]], WORKS[kinds.keys[1][group]]
        its = np.sort(durations[kinds.rows(group)])
        mine = sorted(launchers.get(group, ()), key=lambda pair: _longest_first(pair[1]))
        for at, (pair, _) in enumerate(mine[:LAUNCHERS_MAX]):
            place_of_pair[pair] = at
        totals.append(
            KernelTotal(
                name=name,
                work=work.value,
                family=family_of(name) if work is Work.COMPUTE else work.value,
                count=len(its),
                duration_ns=sums[group],
                median_ns=int(its[(len(its) - 1) // 2]),
                min_ns=int(its[0]),
                max_ns=int(its[-1]),
                exposed_ns=exposed[group],
                critical_ns=None,
                launchers=[launcher for _, launcher in mine[:LAUNCHERS_MAX]],
                launchers_count=len(mine),
            )
        )
    place, launcher = (np.full(len(device.start_ns), NONE, dtype=np.int64) for _ in range(2))
    place[rows] = np.argsort(np.array(order))[kinds.number]
    launcher[rows] = place_of_pair[pairs.number]
    return KernelTable(totals, place, launcher)


def _launchers(
    calls: Calls, window: TableWindow, pairs: Groups, origins: list[Origin], rows: Index
) -> dict[int, list[tuple[int, KernelLauncher]]]:
    """Return the launchers of each kind of kernel, each with its number among `pairs`."""
    durations = window.duration_ns[rows]
    sums = sums_by_group(pairs.number, durations, pairs.count)
    exposed = sums_by_group(pairs.number, window.charged_ns[rows], pairs.count)
    line = longest_of(pairs, durations, values_at(calls.line, calls.row_call[rows]))
    found: dict[int, list[tuple[int, KernelLauncher]]] = {}
    for pair in range(pairs.count):
        origin = origins[pairs.keys[1][pair]]
        launcher = KernelLauncher(
            operator=origin.operator,
            shapes=origin.shapes,
            types=origin.types,
            module=origin.module,
            source=calls.lines[line[pair]] if line[pair] != NONE else None,
            count=len(pairs.rows(pair)),
            duration_ns=sums[pair],
            exposed_ns=exposed[pair],
        )
        found.setdefault(pairs.keys[0][pair], []).append((pair, launcher))
    return found


def _longest_first(row: KernelLauncher) -> tuple[int, str, str, str]:
    return -row.duration_ns, row.operator or "", row.shapes or "", row.module or ""
