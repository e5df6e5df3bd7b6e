"""Adds the critical path's time to the tables of kernels and operators.

A long kernel that is never on the critical path costs nothing; a short one that is always on it is where to begin.
Each part of the path has its row of work, and the tables have the place of each row.

For one trace alone, the path is that of its rank: from the end of the last work back through what each piece of work
waited for (launches, streams, events, host synchronizations), with communication as long as recorded.

Left out: the path's time on the host, which is in no row.  Changes only the given tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..align.clock_fit import RankClockCorrection
from ..graph.critical_path import CriticalPath
from ..graph.job_graph import Joins
from ..trace.columns import NONE, Trace
from .causal_model import JobInput, JobModel, build_model

if TYPE_CHECKING:
    from ..document.report_tables import TraceTables
    from ..one_rank.tables.all_tables import TablePlaces

__all__ = ["add_critical_time", "add_own_critical_time", "rows_before_cut"]

Index = NDArray[np.int64]


def add_critical_time(
    model: JobModel, traces: Sequence[Trace], tables: Sequence[tuple[TraceTables, TablePlaces] | None]
) -> None:
    """Set `critical_ns` in the tables of the model's `traces`; None for a trace without tables."""
    for place, (trace, its) in enumerate(zip(traces, tables, strict=True)):
        if its is not None:
            rows = rows_before_cut(trace, model.graph.ranks[place].events.trace)
            _add(model.path, place, rows, *its)


def add_own_critical_time(trace: Trace, tables: TraceTables, places: TablePlaces) -> None:
    """Set `critical_ns` in the tables of a single trace; leaves None if there is no path."""
    nothing = np.empty(0, dtype=np.int64)
    none = nothing.astype(np.bool_)
    joins = Joins(0, nothing, nothing, nothing, nothing, nothing, none, none, none, nothing)
    model = build_model(JobInput([trace], [RankClockCorrection(0.0)], joins))
    if model is not None:
        add_critical_time(model, [trace], [(tables, places)])


def rows_before_cut(trace: Trace, cut: Trace) -> Index:
    """For each device row of `cut`, return its row in `trace`; `cut` has the rows issued before some instant.

    `causal_model` keeps rows in order, and all or none of one instant.
    """
    device = trace.device
    kept = len(cut.device.start_ns)
    if kept == len(device.start_ns):
        return np.arange(kept)
    issued = np.where(device.launch_ns == NONE, device.start_ns, device.launch_ns)
    last = np.partition(issued, kept - 1)[kept - 1] if kept else np.iinfo(np.int64).min
    return np.flatnonzero(issued <= last)


def _add(path: CriticalPath, place: int, row_of: Index, tables: TraceTables, places: TablePlaces) -> None:
    mine = (path.rank == place) & (path.row != NONE) & (path.row < len(row_of))
    rows, time = row_of[path.row[mine]], (path.end_ns - path.start_ns)[mine]
    kernels, operators = places.kernel[rows], places.operator[rows]
    for kernel, value in zip(tables.kernels, _sums(kernels, time, len(tables.kernels)), strict=True):
        kernel.critical_ns = value
    for operator, value in zip(tables.operators, _sums(operators, time, len(tables.operators)), strict=True):
        operator.critical_ns = value if operator.exposed_ns is not None else None
    launchers = places.launcher[rows]
    known = launchers != NONE
    pairs, number = np.unique(np.stack((kernels[known], launchers[known])), axis=1, return_inverse=True)
    for listed in tables.kernels:
        for launcher in listed.launchers:
            launcher.critical_ns = 0
    sums = _sums(number.reshape(-1), time[known], pairs.shape[1])
    for (at, launcher), value in zip(pairs.T.tolist(), sums, strict=True):
        tables.kernels[at].launchers[launcher].critical_ns = value


def _sums(group: NDArray[np.integer], time: Index, count: int) -> list[int]:
    """Return the time of each group; the path is at most as long as a trace, so the sums fit."""
    sums = np.zeros(count, dtype=np.int64)
    known = group != NONE
    np.add.at(sums, group[known], time[known])
    listed: list[int] = sums.tolist()
    return listed
