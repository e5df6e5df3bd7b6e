"""Replays a faster link where collectives of the same ranks share the wire and slow each other.

Torch's gloo runs a group's collectives on two threads, and DDP's buckets follow each other closely, so each takes twice
the time that it would take alone.  A link twice as fast would not need half the recorded time: the first collective
would end before the second arrives.

    recorded    |aaaaaaaa|                 alone 4 + 8/2 = 8 of a's 12, and so on: the work of a collective is the time
                    |bbbbbbbb|             that it would take alone, each of n on the wire getting 1/n of it

A full link usually gives equal shares.  If a single connection or the latency is the limit, collectives do not slow
each other.  If arrivals vary, the trace can tell: both hypotheses predict the duration of each collective from the
arrivals and the median of similar collectives (`is_shared`).

Pure.  Faster links are replayed only for collectives of the same ranks: groups with some ranks in common may or may
not use the same link.  `work_alone` takes any links, for callers that know them (`verdict.links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE
from .job_graph import JobGraph, ReplayScenario
from .replay import play

__all__ = ["is_shared", "shared_sets", "with_work", "work_alone", "work_of"]

Index = NDArray[np.int64]
Times = NDArray[np.float64]

ROUNDS_MAX = 8
"""The most replays until no collective's time on the wire changes; three are usual."""

SETTLED_NS = 1_000

STEPS_MIN = 4
"""The fewest steps that can tell the two hypotheses apart."""

Z_MIN = 2.0
"""One must predict better by this many standard errors; both are plausible, so this is enough."""


def shared_sets(graph: JobGraph) -> list[Index]:
    """Return, by arrival, the collectives of each set of ranks with at least two on the wire together."""
    joins = graph.joins
    whole = np.ones(joins.count, dtype=np.bool_)
    whole[joins.join[graph.leave_join == NONE]] = False
    whole &= ~joins.is_pair & (graph.wire_ns > 0)
    members = np.flatnonzero(whole[joins.join])
    members = members[np.argsort(joins.group[joins.join[members]], kind="stable")]
    _, first = np.unique(joins.group[joins.join[members]], return_index=True)
    of_ranks: dict[frozenset[int], list[Index]] = {}
    for its in np.split(members, first[1:]) if len(members) else ():
        ranks = frozenset(np.unique(joins.rank[its]).tolist())
        of_ranks.setdefault(ranks, []).append(np.unique(joins.join[its]))
    found = []
    for ranks in sorted(of_ranks, key=sorted):
        mine = np.concatenate(of_ranks[ranks])
        mine = mine[np.argsort(graph.arrive_ns[mine], kind="stable")]
        ends = np.maximum.accumulate((graph.arrive_ns + graph.wire_ns)[mine])
        if (graph.arrive_ns[mine][1:] < ends[:-1]).any():
            found.append(mine)
    return found


def is_shared(graph: JobGraph, sets: list[Index], step: Index) -> bool | None:
    """Return whether collectives that are on the wire together slow each other; None if unknown.

    `step` is the step of each collective.  Collectives of one label are similar if their sizes are known; otherwise
    those of one label and place in their step.
    """
    worse: dict[int, float] = {}
    for mine in sets:
        kind = _kinds(graph, mine, step)
        start, wire = _recorded(graph, mine)
        off = []
        for shared in (True, False):
            work = _work(start, wire) if shared else wire
            usual = np.array([np.median(work[kind == each]) for each in range(int(kind.max()) + 1)])[kind]
            off.append(np.abs((_played(start, usual) if shared else usual) - wire))
        for number, more in zip(step[mine].tolist(), (off[0] - off[1]).tolist(), strict=True):
            worse[number] = worse.get(number, 0.0) + more
    each = np.array(list(worse.values()))
    spread = float(each.std(ddof=1)) / len(each) ** 0.5 if len(each) >= STEPS_MIN else 0.0
    if spread == 0.0 or abs(float(each.mean())) < Z_MIN * spread:
        return None
    return float(each.mean()) < 0


def work_of(graph: JobGraph, sets: list[Index], *, shared: bool) -> Times:
    """Return how long each collective would be on the wire alone, if those of `sets` share it or not."""
    found = graph.wire_ns.astype(np.float64)
    for mine in sets if shared else ():
        found[mine] = _work(*_recorded(graph, mine))
    return found


def with_work(
    graph: JobGraph, sets: list[Index], work: Times, *, shared: bool, scatter_ratio: float = 1.0
) -> ReplayScenario:
    """Return the scenario in which collectives have this work: their time on the wire alone."""
    wire = np.rint(work).astype(np.int64)
    for _ in range(ROUNDS_MAX if shared and sets else 0):
        times = play(graph, graph.weights(ReplayScenario(wire_ns=wire, scatter_ratio=scatter_ratio)))
        arrive = times[graph.offset[-1] : graph.offset[-1] + graph.joins.count].astype(np.float64)
        before = wire.copy()
        for mine in sets:
            wire[mine] = np.rint(_played(arrive[mine], work[mine]))
        if int(np.abs(wire - before).max()) <= SETTLED_NS:
            break
    return ReplayScenario(wire_ns=wire, scatter_ratio=scatter_ratio)


def _recorded(graph: JobGraph, mine: Index) -> tuple[Times, Times]:
    """Return when the last rank arrived at each collective, and how long it was on the wire after that."""
    return (graph.arrive_ns[mine] - graph.base_ns).astype(np.float64), graph.wire_ns[mine].astype(np.float64)


def _kinds(graph: JobGraph, mine: Index, step: Index) -> Index:
    """Number the kinds: by label and, without sizes, by place among the set's collectives of the step."""
    of = step[mine]
    order = np.argsort(of, kind="stable")
    first = np.searchsorted(of[order], of[order])
    place = np.empty(len(mine), dtype=np.int64)
    place[order] = np.arange(len(mine)) - first
    place[graph.joins.bytes[mine] != NONE] = 0
    _, kind = np.unique(np.stack((graph.joins.label[mine], place)), axis=1, return_inverse=True)
    return kind.reshape(-1).astype(np.int64)


def work_alone(start: Times, wire: Times, use: Index, links: Sequence[frozenset[int]], shares: int) -> Times:
    """Return how long each collective would have been on the wire alone.

    Collective i uses all of `links[use[i]]`, or no link if `use[i]` is NONE.  A link carries `shares` of them at full
    speed, and splits equally among more; the fullest link decides.
    """
    found = wire.copy()
    end = start + wire
    on_link = {link: np.isin(use, [n for n, its in enumerate(links) if link in its]) for link in set().union(*links)}
    for number in np.unique(use[use != NONE]).tolist():
        mine = use == number
        beside = np.any([on_link[link] for link in links[number]], axis=0)
        at = np.unique(np.concatenate((start[beside], end[beside])))
        many = np.max([_on_wire(at, start[which], end[which]) for which in map(on_link.get, links[number])], axis=0)
        done = np.concatenate(([0.0], np.cumsum(np.diff(at) / np.maximum(many[:-1] / shares, 1))))
        found[mine] = np.interp(end[mine], at, done) - np.interp(start[mine], at, done)
    return found


def _on_wire(at: Times, start: Times, end: Times) -> Index:
    """Return how many of the collectives are on the wire after each of these times."""
    return np.searchsorted(np.sort(start), at, side="right") - np.searchsorted(np.sort(end), at, side="right")


def _work(start: Times, wire: Times) -> Times:
    """Return how long each would have been on the wire alone, if each of n at once gets 1/n of it."""
    return work_alone(start, wire, np.zeros(len(start), dtype=np.int64), [frozenset({0})], 1)


def _played(start: Times, work: Times) -> Times:
    """Return how long each is on the wire if each of n at once gets 1/n of it (processor sharing).

    All on the wire progress equally, so one virtual clock serves all: a collective ends when the clock has advanced by
    its work since its arrival.
    """
    found = np.zeros(len(start))
    on_wire: list[tuple[float, int]] = []
    now = clock = 0.0

    def end_next() -> None:
        nonlocal now, clock
        over, which = on_wire[0]
        now, clock = now + (over - clock) * len(on_wire), over
        heappop(on_wire)
        found[which] = now - start[which]

    for one in np.argsort(start, kind="stable").tolist():
        while on_wire and now + (on_wire[0][0] - clock) * len(on_wire) <= start[one]:
            end_next()
        if on_wire:
            clock += (start[one] - now) / len(on_wire)
        now = float(start[one])
        heappush(on_wire, (clock + work[one], one))
    while on_wire:
        end_next()
    return found
