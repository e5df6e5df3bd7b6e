"""Replays DDP with buckets twice as large: two neighbours become one, which begins when the second would have.

A bucket's collective begins when its last gradient is ready, so the gradients of two neighbours are ready when the
later collective began.  Merging them saves one latency, and loses the time that the first was on the wire before the
second was ready:

    recorded    |aaaaaa|                        latency + bytes of a / bandwidth, likewise b
                    .  |bbbbbb|
    played             |aaabbbbbbb|             latency + bytes of both / bandwidth

In the graph nothing moves: the first takes no time, and the second that of both less one latency.  The latency is
the time at zero bytes, fitted to buckets of different sizes; it is unknown if all have one size.

Pure.  Left out: smaller buckets, which would need size and time of each gradient; the host's time for the saved call;
algorithms that change with the size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE
from .job_graph import JobGraph, Joins
from .rank_graph import EdgeKind, RankGraph

__all__ = ["Buckets", "Latency", "buckets_of", "latency_of", "merged"]

Index = NDArray[np.int64]
Times = NDArray[np.float64]

AGREEING_RATIO_MIN = 0.8
"""In this share of the steps, nothing may wait for a bucket before its neighbour begins."""

FIRST_RATIO_MAX = 0.5
"""A first bucket of less than this part of the next is DDP's own (1 MiB), which a larger cap leaves as it is."""

SIZES_RATIO_MIN = 1.2
"""The largest bucket must have so many times the bytes of the smallest, to tell latency from bandwidth."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The all-reduces of gradients: `members`, of which each pair (`first`, `second`) would merge."""

    members: Index
    first: Index
    second: Index


@dataclass(frozen=True, slots=True)
class Latency:
    """The time that a collective takes whatever its bytes, with its standard error; never below zero."""

    ns: float
    error_ns: float


def buckets_of(graph: JobGraph, is_gradient: NDArray[np.bool_], step: Index) -> Buckets:
    """Return the buckets among the collectives for which `is_gradient`; `step` is the step of each.

    Steps with an unusual number of collectives in a group are skipped.  In a pair, nothing waits for the first before
    the second begins, so buckets of two backward passes never pair.
    """
    joins = graph.joins
    whole = np.ones(joins.count, dtype=np.bool_)
    whole[joins.join[graph.leave_join == NONE]] = False
    chosen = np.flatnonzero((is_gradient & whole)[joins.join])
    needed, begun = _instants(graph, chosen)
    members, pairs = [], []
    chosen = chosen[np.argsort(joins.group[joins.join[chosen]], kind="stable")]
    _, first = np.unique(joins.group[joins.join[chosen]], return_index=True)
    for its in np.split(chosen, first[1:]) if len(chosen) else ():
        mine = np.unique(joins.join[its])
        mine = mine[np.lexsort((graph.arrive_ns[mine], step[mine]))]
        _, which, count = np.unique(step[mine], return_inverse=True, return_counts=True)
        usual = int(np.bincount(count).argmax())
        if usual < 2:
            continue
        by_step = mine[count[which] == usual].reshape(-1, usual)
        apart = _awaited_before_next(joins, its, by_step, needed, begun).mean(axis=0)
        places = _first_of_pairs(joins.bytes[by_step[-1]], apart)
        pairs += [by_step[:, at : at + 2] for at in places]
        members += [by_step.reshape(-1)] if places else []
    nothing = np.empty(0, dtype=np.int64)
    found = np.concatenate([nothing.reshape(0, 2), *pairs])
    return Buckets(np.concatenate([nothing, *members]), found[:, 0], found[:, 1])


def _first_of_pairs(size: Index, apart: Times) -> list[int]:
    """Return the places at which pairs begin; `apart` counts how often something came between a bucket and the next."""
    found = []
    at = 1 if len(size) > 2 and 0 < size[0] < FIRST_RATIO_MAX * size[1] else 0
    while at + 1 < len(size):
        if apart[at] <= 1 - AGREEING_RATIO_MIN:
            found.append(at)
            at += 1
        at += 1
    return found


def _instants(graph: JobGraph, members: Index) -> tuple[Index, Index]:
    """For all members of collectives, return when something first waited for them, and when they began."""
    joins = graph.joins
    needed, begun = (np.zeros(len(joins.join), dtype=np.int64) for _ in range(2))
    members = members[np.argsort(joins.rank[members], kind="stable")]
    places, first = np.unique(joins.rank[members], return_index=True)
    for place, mine in zip(places.tolist(), np.split(members, first[1:]), strict=True) if len(members) else ():
        rank, row = graph.ranks[place], joins.row[mine]
        needed[mine], begun[mine] = _first_needed(rank, row), _begun(rank, row)
    return needed, begun


def _awaited_before_next(joins: Joins, its: Index, by_step: Index, needed: Index, begun: Index) -> NDArray[np.bool_]:
    """Return (steps, buckets - 1) whether a rank waited for a bucket before it began the next, or lacks one of the two.

    `its` are the members of a group's collectives, `by_step` (steps, buckets) the collectives.
    """
    collectives, at = np.unique(joins.join[its], return_inverse=True)
    ranks, column = np.unique(joins.rank[its], return_inverse=True)
    first_needed = np.full((len(collectives), len(ranks)), np.iinfo(np.int64).min)
    first_needed[at, column] = needed[its]
    began = np.full((len(collectives), len(ranks)), np.iinfo(np.int64).max)
    began[at, column] = begun[its]
    place = np.searchsorted(collectives, by_step)
    is_awaited: NDArray[np.bool_] = first_needed[place[:, :-1]] < began[place[:, 1:]]
    return np.asarray(is_awaited.any(axis=2), dtype=np.bool_)


def _begun(rank: RankGraph, row: Index) -> Index:
    """Return when the host launched these rows, or when they began if that is unknown."""
    rows, lane = rank.events.rows, rank.events.host
    launch = rows.launch[row]
    if len(lane.time_ns) == 0:
        return rows.start_ns[row]
    found: Index = np.where(launch == NONE, rows.start_ns[row], lane.time_ns[np.maximum(launch, 0)])
    return found


def _first_needed(rank: RankGraph, row: Index) -> Index:
    """Return when the host first went on after a wait for each of these rows, or began other work that waits for it."""
    seg = rank.seg_of_rows()[row]
    found = np.full(len(row), np.iinfo(np.int64).max)
    number = np.full(len(rank.seg_first), NONE)
    number[seg] = np.arange(len(row))

    def need(segs: Index, times: Index) -> None:
        mine = number[segs]
        np.minimum.at(found, mine[mine != NONE], times[mine != NONE])

    hosts = len(rank.host_begin)
    source, _, waiting = rank.edges[EdgeKind.EVENT]
    need(source - hosts, _begun(rank, rank.order[waiting]))
    source, cut, _ = rank.edges[EdgeKind.SYNC]
    if hosts:
        need(source - hosts, rank.events.host.time_ns[rank.host_begin[cut]])
    # Later work on its own stream waits for it too, except other collectives.
    source, _, follower = rank.edges[EdgeKind.STREAM]
    other = ~rank.is_join[follower]
    need(source[other] - hosts, _begun(rank, rank.order[rank.seg_first[follower[other]]]))
    return found


def latency_of(size: Index, work: Times) -> Latency | None:
    """Return the latency of collectives of these bytes and times on the wire; None if it is unknown.

    It is the intercept of a line through the median of each size, weighted by counts; the error follows from how far
    single collectives are off the line.
    """
    if len(size) < 3 or (size <= 0).any() or size.max() < SIZES_RATIO_MIN * size.min():
        return None
    sizes, which, count = np.unique(size, return_inverse=True, return_counts=True)
    medians = np.array([float(np.median(work[which == at])) for at in range(len(sizes))])
    weight = count / count.sum()
    middle = float((weight * sizes).sum())
    spread = float((weight * (sizes - middle) ** 2).sum())
    slope = max(float((weight * (sizes - middle) * medians).sum()) / spread, 0.0)
    at_zero = float((weight * medians).sum()) - slope * middle
    off = np.abs(work - at_zero - slope * size)
    sigma = 1.4826 * float(np.median(off)) * (np.pi / 2) ** 0.5  # medians scatter more than means by this factor
    error = sigma * ((1 + middle**2 / spread) / len(size)) ** 0.5
    return Latency(max(at_zero, 0.0), error)


def merged(buckets: Buckets, work: Times, latency_ns: float) -> Times:
    """Return the times that collectives need on the wire alone with each pair merged; `work` are the recorded ones."""
    found = work.copy()
    saved = np.minimum(latency_ns, np.minimum(work[buckets.first], work[buckets.second]))
    found[buckets.second] += work[buckets.first] - saved
    found[buckets.first] = 0.0
    return found
