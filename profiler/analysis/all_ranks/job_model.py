"""Gives the causal model what was matched and aligned: rows of collectives, and each trace's clock.

`causal` knows columns only; what a collective is and which clocks are one is decided here, in `collective_matching` and
`clocks`.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...causal.all_ranks.job_graph import Joins
from ...causal.model import JobInput, JobModel, build_model
from ...trace.columns import NONE, Trace
from .clocks import SYNCHRONIZING, Clocks
from .matching.collective_matching import Events, Matched

__all__ = ["model_of"]


def model_of(
    traces: Sequence[Trace], groups: Sequence[Matched], events: Sequence[Events], clocks: Clocks
) -> JobModel | None:
    """Return the causal model of the job, whose collectives are numbered through `groups`; None of empty traces."""
    hosts: dict[str, list[int]] = {}
    for place, trace in enumerate(traces):
        if trace.host is not None:
            hosts.setdefault(trace.host, []).append(place)
    return build_model(
        JobInput(traces, clocks.corrections, _joins(traces, groups, events, clocks), list(hosts.values()))
    )


def _joins(traces: Sequence[Trace], groups: Sequence[Matched], events: Sequence[Events], clocks: Clocks) -> Joins:
    """Return all matched collectives as columns; those of one kind that span as many hosts have one label."""
    join, rank, row, label, of_group, pair, binds, receives, size = ([] for _ in range(9))
    labels: dict[tuple[object, ...], int] = {}
    ranks = np.array([NONE - 1 if trace.rank is None else trace.rank for trace in traces], dtype=np.int64)
    count = 0
    for number, group in enumerate(groups):
        at, column = np.nonzero(group.has)
        places = np.array(group.traces, dtype=np.int64)[column]
        rows = group.rows[at, column]
        join.append(count + at)
        rank.append(places)
        source = np.empty(len(rows), dtype=np.int64)
        for place in group.traces:
            mine = places == place
            source[mine] = events[place].source[rows[mine]]
        row.append(source)
        receives.append(ranks[places] == (NONE if group.pair is None else group.pair[1]))
        hosts = len(set(clocks.clock[list(group.traces)].tolist()))
        for meta in group.collectives:
            key = (meta.operation, meta.bytes, meta.dtype, group.size, group.pair is not None, hosts)
            label.append(labels.setdefault(key, len(labels)))
            binds.append(meta.operation in SYNCHRONIZING and group.pair is None)
            size.append(NONE if meta.bytes is None else meta.bytes)
        of_group += [number] * len(group.collectives)
        pair += [group.pair is not None] * len(group.collectives)
        count += len(group.collectives)
    nothing = np.empty(0, dtype=np.int64)
    return Joins(
        count=count,
        join=np.concatenate([nothing, *join]),
        rank=np.concatenate([nothing, *rank]),
        row=np.concatenate([nothing, *row]),
        label=np.array(label, dtype=np.int64),
        group=np.array(of_group, dtype=np.int64),
        is_pair=np.array(pair, dtype=np.bool_),
        binds=np.array(binds, dtype=np.bool_),
        receives=np.concatenate([nothing.astype(np.bool_), *receives]),
        bytes=np.array(size, dtype=np.int64),
    )
