"""Finds links that are slower than others that carry the same: the wire time of like collectives in several groups.

Kinds of collectives (operation, size, size of the group) are compared among the groups that run them.  The reference is
the fast quartile of the groups, because a slow host slows most of them.  A group is slow if nearly all its collectives
take longer than the reference by more than groups scatter.  The slow link is the smallest set of ranks that is in all
slow groups and in no fast one.

Pure.  Left out: a link that all collectives use, which has no reference in one run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..all_ranks.job_graph import JobGraph, Scenario

__all__ = ["slow_links"]

SLOW_RATIO_MIN = 1.15
"""A group is slow if its median wire time is so many times the reference."""

COLLECTIVES_MIN = 4
"""Collectives of one kind that a group needs for its median to mean anything."""

GROUPS_MIN = 2

SIGNS_MIN = 0.9
"""The share of a slow group's collectives that are slower than the reference."""

Index = NDArray[np.int64]


def slow_links(graph: JobGraph, now: Scenario) -> tuple[Index, list[int], dict[str, float]] | None:
    """Return the wire times without the slow link, the places of its ranks, and figures; None where none is seen."""
    joins = graph.joins
    wire = (graph.wire_ns if now.wire_ns is None else now.wire_ns).copy()
    slow: set[int] = set()
    fast: set[int] = set()
    changes: list[tuple[Index, int]] = []
    for label in np.unique(joins.label).tolist():
        mine = np.flatnonzero(joins.label == label)
        groups = joins.group[mine]
        medians = {}
        for group in np.unique(groups).tolist():
            some = wire[mine[groups == group]]
            if len(some) >= COLLECTIVES_MIN:
                medians[group] = float(np.median(some))
        if len(medians) < GROUPS_MIN:
            continue
        reference = float(np.quantile(list(medians.values()), 0.25, method="lower"))
        for group, median in medians.items():
            some = mine[groups == group]
            is_slow = median > SLOW_RATIO_MIN * reference and (wire[some] > reference).mean() >= SIGNS_MIN
            (slow if is_slow else fast).add(group)
            if is_slow:
                changes.append((some, round(reference)))
    slow -= fast & slow if len(slow) > len(fast) else set()
    if not slow:
        return None
    members: dict[int, set[int]] = {}
    group_of = joins.group[joins.join]
    for group in slow | fast:
        members[group] = set(joins.rank[group_of == group].tolist())
    places = _smallest(slow, fast, members)
    if places is None:
        return None
    own = peers = 0
    for some, reference_ns in changes:
        factor = reference_ns / max(float(np.median(wire[some])), 1.0)
        own += int(wire[some].sum())
        wire[some] = np.minimum(wire[some], np.rint(wire[some] * factor).astype(np.int64))
        peers += int(wire[some].sum())
    count = max(sum(len(some) for some, _ in changes), 1)
    details = {
        "own_ns": own / count, "peers_ns": peers / count, "excess_ns": (own - peers), "p": 0.5 ** min(count, 1000),
        "groups": float(len(slow)), "count": float(count),
    }  # fmt: skip
    return wire, places, details


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
