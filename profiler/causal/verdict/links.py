"""Finds links that are slower than others that carry the same: the wire time of like collectives in several groups.

Kinds of collectives (operation, size, size of the group) are compared among the groups that run them.  The reference is
the fast quartile of the groups, because a slow host slows most of them.  A group is slow if nearly all its collectives
take longer than the reference by more than groups scatter.  A link may be slow for a part of the run only: then the
group's steps are compared with the same steps of the others, and must stand out of how groups and steps vary.  The slow
link is that of the rank, or else of the host, that is in all slow groups and in no fast one that could use it; or else
the smallest set of ranks that is in all slow groups.  All ranks of a host share its network cards: each of its tensor
parallel ranks is in a slow data parallel group of its own.

Pure.  A link that all collectives use has no reference in one run: `untold_joins` says which time that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...trace.columns import NONE
from ..all_ranks.job_graph import JobGraph, Scenario

__all__ = ["SlowLink", "slow_links", "untold_joins"]

SLOW_RATIO_MIN = 1.15
"""A group is slow if its median wire time is so many times the reference."""

COLLECTIVES_MIN = 4
"""Collectives of one kind that a group needs for its median to mean anything."""

GROUPS_MIN = 2

SIGNS_MIN = 0.9
"""The share of a slow group's collectives that are slower than the reference."""

SLOW_STEPS_MIN = 2
"""Steps of a group that must be slow where not all are."""

SLOW_Z = 5.0
"""Robust standard deviations (of the logarithm, of all groups and steps) by which they must be."""

Index = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The places of a slow link's ranks, all wire times without it, its excess by step, and figures for evidence."""

    places: list[int]
    wire_ns: Index
    by_step_ns: Index
    details: dict[str, float]


def slow_links(
    graph: JobGraph, now: Scenario, step: Index, steps: int, hosts: Sequence[Sequence[int]] = ()
) -> SlowLink | None:
    """Return the slow link; None where none is seen.

    `step` is that of each collective, NONE where it is unknown; `hosts` are the places on each host, where they are
    known.
    """
    joins = graph.joins
    wire = (graph.wire_ns if now.wire_ns is None else now.wire_ns).copy()
    slow: set[int] = set()
    fast: set[int] = set()
    changes: list[tuple[Index, Floats]] = []
    for label in np.unique(joins.label).tolist():
        mine = np.flatnonzero(joins.label == label)
        names, group, counts = np.unique(joins.group[mine], return_inverse=True, return_counts=True)
        enough = counts >= COLLECTIVES_MIN
        if enough.sum() < GROUPS_MIN:
            continue
        mine, group = mine[enough[group]], group[enough[group]]
        for number, which, factor in _slow_parts(wire[mine], group, step[mine], steps):
            slow.add(int(names[number]))
            changes.append((mine[which], factor))
        fast |= set(names[enough].tolist()) - slow
    slow -= fast & slow if len(slow) > len(fast) else set()
    if not slow:
        return None
    members: dict[int, set[int]] = {}
    group_of = joins.group[joins.join]
    for each in slow | fast:
        members[each] = set(joins.rank[group_of == each].tolist())
    places = _of_one_host(slow, fast, members, hosts) or _smallest(slow, fast, members)
    if places is None:
        return None
    before = wire.copy()
    for some, factor in changes:
        wire[some] = np.minimum(wire[some], np.rint(wire[some] * factor).astype(np.int64))
    changed = np.concatenate([some for some, _ in changes])
    own, peers, count = int(before[changed].sum()), int(wire[changed].sum()), max(len(changed), 1)
    details = {
        "own_ns": own / count, "peers_ns": peers / count, "excess_ns": (own - peers), "p": 0.5 ** min(count, 1000),
        "groups": float(len(slow)), "count": float(count),
    }  # fmt: skip
    known = changed[step[changed] >= 0]
    by_step = np.bincount(step[known], (before - wire)[known], steps).astype(np.int64)
    return SlowLink(places, wire, by_step, details)


def _slow_parts(wire: Index, group: Index, step: Index, steps: int) -> list[tuple[int, Index, Floats]]:
    """Return each slow group of one kind of collectives, which of its collectives are slow, and their factors."""
    numbers = np.unique(group).tolist()
    medians = {number: float(np.median(wire[group == number])) for number in numbers}
    reference = float(np.quantile(list(medians.values()), 0.25, method="lower"))
    in_steps, least = _slow_in_steps(wire, group, step, steps)
    found: list[tuple[int, Index, Floats]] = []
    for number, median in medians.items():
        some = np.flatnonzero(group == number)
        if median > SLOW_RATIO_MIN * reference and (wire[some] > reference).mean() >= SIGNS_MIN:
            found.append((number, some, np.full(len(some), round(reference) / max(median, 1.0))))
            continue
        some = some[in_steps[some]]
        if len(some) >= COLLECTIVES_MIN and len(np.unique(step[some])) >= SLOW_STEPS_MIN:
            found.append((number, some, least[some]))
    return found


def _slow_in_steps(wire: Index, group: Index, step: Index, steps: int) -> tuple[Bools, Floats]:
    """Return which collectives are in a step in which their group is slow, and the reference over the group's median.

    The measure of what varies is how much all groups in all steps do, so it tells steps that are few among them.
    """
    cells, cell = np.unique(np.where(step < 0, -1, group * steps + step), return_inverse=True)
    of_step = np.where(cells < 0, -1, cells % max(steps, 1))
    median = np.array([np.median(part) for part in _grouped(wire, cell, len(cells))])
    reference = np.zeros(len(cells))
    for each in np.unique(of_step[of_step >= 0]).tolist():
        some = of_step == each
        if some.sum() >= GROUPS_MIN:
            reference[some] = np.quantile(median[some], 0.25, method="lower")
    above = np.bincount(cell, wire > reference[cell], len(cells)) / np.bincount(cell, minlength=len(cells))
    known = (reference > 0) & (median > 0)
    logs = np.log(np.where(known, median, 1.0) / np.where(known, reference, 1.0))
    middle = float(np.median(logs[known])) if known.any() else 0.0
    scale = 1.4826 * float(np.median(np.abs(logs[known] - middle))) if known.any() else 0.0
    is_slow = known & (logs > max(np.log(SLOW_RATIO_MIN), middle + SLOW_Z * scale)) & (above >= SIGNS_MIN)
    return is_slow[cell], np.exp(-logs)[cell]


def _grouped(values: Index, cell: Index, cells: int) -> list[Index]:
    """Return the values of each cell."""
    order = np.argsort(cell, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(cell, minlength=cells))[:-1])


def untold_joins(graph: JobGraph, hosts: Sequence[Sequence[int]]) -> Bools:
    """Return the collectives that no other group shows how fast they can be.

    They are the only ones of their kind, or all groups of their kind use the network of one host: if that is slow, all
    are alike.  Where hosts are unknown any may.
    """
    joins = graph.joins
    host_of = {place: number for number, places in enumerate(hosts) for place in places}
    spans: dict[int, set[int]] = {}
    for group, place in set(zip(joins.group[joins.join].tolist(), joins.rank.tolist(), strict=True)):
        spans.setdefault(group, set()).add(host_of.get(place, NONE))
    groups_of: dict[int, set[int]] = {}
    for label, group in set(zip(joins.label.tolist(), joins.group.tolist(), strict=True)):
        groups_of.setdefault(label, set()).add(group)
    untold = np.zeros(int(joins.label.max(initial=0)) + 1, dtype=np.bool_)
    for label, groups in groups_of.items():
        its = [spans[group] for group in groups]
        is_on_one_network = any(len(each) > 1 for each in its) and bool(set.intersection(*its))
        untold[label] = len(groups) < GROUPS_MIN or is_on_one_network or any(NONE in each for each in its)
    found: Bools = untold[joins.label]
    return found


def _of_one_host(
    slow: set[int], fast: set[int], members: dict[int, set[int]], hosts: Sequence[Sequence[int]]
) -> list[int] | None:
    """Return the places of the one host that is in all slow groups and in no fast one between hosts; None for none.

    A rank that alone is in all slow groups is the better answer, so it is None then, too.
    """
    if any(all(place in members[group] for group in slow) for place in set().union(*(members[one] for one in slow))):
        return None
    host_of = {place: number for number, places in enumerate(hosts) for place in places}
    hosts_of = {group: {host_of.get(place, NONE) for place in members[group]} for group in slow | fast}
    common = set.intersection(*(hosts_of[group] for group in slow))
    quick = set().union(*(hosts_of[group] for group in fast if len(hosts_of[group]) > 1))
    found = common - quick - {NONE}
    return sorted(hosts[found.pop()]) if len(found) == 1 else None


def _smallest(slow: set[int], fast: set[int], members: dict[int, set[int]]) -> list[int] | None:
    """Return the fewest places that touch all slow groups, those first that are in few fast ones."""
    left = set(slow)
    in_fast: dict[int, int] = {}
    for group in fast:
        for place in members[group]:
            in_fast[place] = in_fast.get(place, 0) + 1
    chosen: list[int] = []
    while left:
        counts: dict[int, int] = {}
        for group in left:
            for place in members[group]:
                counts[place] = counts.get(place, 0) + 1
        most = max((counts[place], -in_fast.get(place, 0)) for place in counts)
        # Ends of the same link that nothing tells apart are named together.
        alike = [place for place in counts if (counts[place], -in_fast.get(place, 0)) == most]
        first = min(alike)
        both = [p for p in alike if all((p in members[group]) == (first in members[group]) for group in left)]
        chosen += both
        left = {group for group in left if first not in members[group]}
        if len(chosen) > max(len(slow) // 2 + 1, 2):
            return None
    return sorted(chosen)
