"""Builds the input of the causal model: matched rows of collectives as columns, and each trace's clock.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..align.collective_matching import Events, Matched
from ..align.host_clocks import SYNCHRONIZING, Clocks
from ..graph.job_graph import Joins
from ..shelf import Shelf
from ..trace.columns import NONE, Trace
from ..verdict.roles import roles_of
from .causal_model import JobInput, JobModel, build_model

__all__ = ["model_of"]


def model_of(
    traces: Sequence[Trace], groups: Sequence[Matched], events: Sequence[Events], clocks: Clocks, shelf: Shelf
) -> JobModel | None:
    """Return the causal model of the job, with collectives numbered across `groups`; None for empty traces."""
    hosts = _hosts(traces)
    places: dict[str | int, list[int]] = {}
    for place, host in enumerate(hosts):
        if host is not None:
            places.setdefault(host, []).append(place)
    joins = _joins(traces, groups, events, hosts)
    if None in hosts:
        joins = replace(joins, label=_labels_by_role(joins, len(traces)))
    return build_model(JobInput(traces, clocks.corrections, joins, list(places.values()), shelf))


def _hosts(traces: Sequence[Trace]) -> list[str | int | None]:
    """Return the host of each trace, by its name or by the numbers of the ranks' devices; None if unknown.

    Launchers number ranks host by host, and a rank uses the device of its local rank.  So ranks 0 to 15 on devices 0 to
    7 and again 0 to 7 are on two hosts.  If each rank sees only one device, number 0, the hosts are unknown.
    """
    if any(trace.host is not None for trace in traces):
        return [trace.host for trace in traces]
    used = [np.unique(trace.device.device) for trace in traces]
    devices = [int(each[0]) if len(each) == 1 else NONE for each in used]
    count = max(devices, default=0) + 1
    known = count > 1 and all(
        trace.rank is not None and trace.rank % count == at for trace, at in zip(traces, devices, strict=True)
    )
    return [trace.rank // count if known and trace.rank is not None else None for trace in traces]


def _labels_by_role(joins: Joins, ranks: int) -> NDArray[np.int64]:
    """Return labels that separate collectives whose ranks have different roles.

    With unknown hosts, a message between two stages may cross to another host and one between two others may not: only
    messages of the same two stages in other replicas are comparable.
    """
    role = np.zeros(ranks, dtype=np.int64)
    for number, places in enumerate(roles_of(joins, ranks)):
        role[places] = number
    roles: list[set[int]] = [set() for _ in range(joins.count)]
    for join, place in zip(joins.join.tolist(), joins.rank.tolist(), strict=True):
        roles[join].add(int(role[place]))
    numbers: dict[tuple[int, ...], int] = {}
    kinds = [(label, *sorted(mine)) for label, mine in zip(joins.label.tolist(), roles, strict=True)]
    return np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], dtype=np.int64)


def _joins(
    traces: Sequence[Trace], groups: Sequence[Matched], events: Sequence[Events], of_host: Sequence[str | int | None]
) -> Joins:
    """Return all matched collectives as columns; those of one kind that span equally many hosts have one label."""
    join, rank, row, label, of_group, pair, binds, receives, size = ([] for _ in range(9))
    labels: dict[tuple[object, ...], int] = {}
    ranks = np.array([NONE - 1 if trace.rank is None else trace.rank for trace in traces], dtype=np.int64)
    count = 0
    for number, group in enumerate(groups):
        at, column = np.nonzero(group.has)
        places = np.array(group.traces, dtype=np.int64)[column]
        join.append(count + at)
        rank.append(places)
        source = np.stack(
            [events[place].source[group.rows[:, each]] for each, place in enumerate(group.traces)], axis=1
        )
        row.append(source[at, column])
        receives.append(ranks[places] == (NONE if group.pair is None else group.pair[1]))
        hosts = len({of_host[place] for place in group.traces})
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
