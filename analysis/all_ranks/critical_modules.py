"""Finds in which module of the model each part of the critical path is.

A row of work belongs to the module of its launching operator, and so does the host's time before the launch.  On a CPU
job operators are the work: a part belongs to the module of the innermost operator open at its start.  Modules are those
that torch recorded (`with_stack`, and `with_modules` for TorchScript); without them nothing is known.

Pure.  Left out: gaps that a device needs between rows, and the wire time of a CPU job, which no operator launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..graph.rank_events import RankEvents
from ..one_rank.origins.nesting import Nesting, values_at
from ..trace.columns import NONE, HostKind, Trace
from .causal_model import JobModel
from .critical_tables import rows_before_cut

if TYPE_CHECKING:
    from ..one_rank.tables.all_tables import RowModules

__all__ = ["modules_of_path"]

Index = NDArray[np.int64]


def modules_of_path(
    model: JobModel, traces: Sequence[Trace], modules: Sequence[RowModules | None]
) -> tuple[Index, list[str]]:
    """For each part of the path, return its module as an index into the names, NONE if unknown.

    `traces` are the model's, uncut, and `modules` those of their rows, None for a trace without modules.
    """
    path = model.path
    found = np.full(len(path.rank), NONE, dtype=np.int64)
    names: dict[str, int] = {}
    for place, (trace, its) in enumerate(zip(traces, modules, strict=True)):
        if its is None:
            continue
        events = model.graph.ranks[place].events
        of_row = its.of_device[rows_before_cut(trace, events.trace)].astype(np.int64)
        number = np.array([names.setdefault(name, len(names)) for name in its.names], dtype=np.int64)
        mine = path.rank == place
        rows = np.flatnonzero(mine & (path.row != NONE) & (path.row < len(of_row)))
        found[rows] = values_at(number, of_row[path.row[rows]])
        # Only the host's own time has a name without a row: the launch that it prepares, or the operator around it.
        host = np.flatnonzero(mine & (path.row == NONE) & (path.join == NONE) & (path.name != NONE))
        at = np.searchsorted(events.host.time_ns, path.start_ns[host] + model.graph.base_ns, side="right") - 1
        if events.is_host_job:
            operator = _operators(events, events.host.time_ns[at])
            found[host] = values_at(number, values_at(its.of_host, operator))
        else:
            found[host] = values_at(number, _launched_next(events, of_row)[at])
    return found, list(names)


def _launched_next(events: RankEvents, of_row: Index) -> Index:
    """For each interval of the host lane, return the module of the launch at its end, NONE for none."""
    launch = events.rows.launch[: len(of_row)]
    known = np.flatnonzero(launch > 0)
    found = np.full(max(len(events.host.time_ns), 1), NONE, dtype=np.int64)
    found[launch[known] - 1] = of_row[known]
    return found


def _operators(events: RankEvents, instants: Index) -> Index:
    """Return the host row of the innermost operator open at each instant, on any training thread."""
    host = events.trace.host_rows
    rows = np.flatnonzero((host.kind == HostKind.OPERATOR) & np.isin(host.thread, events.activity.threads))
    one = np.zeros(len(rows), dtype=np.int32)
    nesting = Nesting(events.call_start_ns[rows], events.call_end_ns[rows], one)
    return values_at(rows, nesting.innermost(np.zeros(len(instants), dtype=np.int32), instants))
