"""Finds links that are slower than others with the same traffic, by the wire times of similar collectives.

Collectives of one kind (operation, size, group size) are compared among the groups that run them.  The reference is the
fast quartile of the groups, because a slow host slows most of them.  A group is slow if the whole distribution of its
wire times lies above the reference's, decile by decile: on a shared link, slow or not, a collective is fastest when it
has the link to itself.  If a link is slow for a part of the run, the group's steps are compared with the same steps of
the others and must stand out from the variation among groups and steps.

First, all groups that span the same hosts are taken together, because they use the same network cards.  Their times
depend on the other traffic, so the time that each would take alone is compared.  If all traffic of exactly one host is
slow, that is the answer.  Otherwise each group is compared by itself.  The slow link is that of the rank, or else the
host, in all slow groups and in no fast group that could use it; or else the smallest set of ranks that touches all slow
groups.  (Each tensor parallel rank of a slow host is in a slow data parallel group of its own.)

Pure.  A link that all collectives use has no reference in one run: see `untold_joins`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..graph.job_graph import JobGraph, Joins, ReplayScenario
from ..graph.shared_wire import work_alone
from ..trace.columns import NONE

__all__ = ["SlowLink", "slow_links", "untold_joins"]

SLOW_RATIO_MIN = 1.15
"""A group is slow if each decile of its wire times is at least this many times the reference's."""

DECILES = np.arange(1, 10) / 10

COLLECTIVES_MIN = 4
"""The fewest collectives of one kind that give a group a meaningful median."""

GROUPS_MIN = 2

SLOW_STEPS_MIN = 2
"""At least so many steps of a group must be slow if not all are."""

SLOW_Z = 5.0
"""And slow by so many robust standard deviations of the logarithms of all groups and steps."""

SHARES = (1, 2, 4, 8)
"""The numbers of collectives that a link may carry at full speed: as many as hosts have network cards."""

Scalar = TypeVar("Scalar", bound=np.generic)
Index = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The places of a slow link's ranks, all wire times without it, its excess by step, and figures for evidence.

    The excess is that of a mean rank of the link, as of any finding.
    """

    places: list[int]
    wire_ns: Index
    by_step_ns: Index
    details: dict[str, float]


def slow_links(
    graph: JobGraph, now: ReplayScenario, step: Index, steps: int, hosts: Sequence[Sequence[int]] = ()
) -> SlowLink | None:
    """Return the slow link; None if there is none.

    `step` is that of each collective, NONE where it is unknown; `hosts` are the places on each host, where they are
    known.
    """
    joins = graph.joins
    wire = graph.wire_ns if now.wire_ns is None else now.wire_ns
    host_of = _host_of(hosts)
    members = _members(joins)
    across = _across(members, host_of)
    between = list(dict.fromkeys(its for its in across.values() if len(its) > 1))
    number = {its: at for at, its in enumerate(between)}
    number_of = {group: number.get(its, NONE) for group, its in across.items()}
    of_hosts = np.array([number_of[group] for group in joins.group.tolist()], dtype=np.int64)
    found = _slow_groups(joins.label, of_hosts, _alone(graph, wire, of_hosts, between, host_of), step, steps)
    common = _common_host(found.slow, found.fast, dict(enumerate(between)))
    if common is not None:
        return _link(joins, wire, found, sorted(hosts[common]), step, steps)
    found = _slow_groups(joins.label, joins.group, wire, step, steps)
    if not found.slow:
        return None
    places = _of_one_host(found, members, hosts, across) or _smallest(found.slow, found.fast, members)
    return None if places is None else _link(joins, wire, found, places, step, steps)


def _alone(
    graph: JobGraph, wire: Index, of_hosts: Index, between: Sequence[frozenset[int]], host_of: Mapping[int, int]
) -> Floats:
    """Return how long each collective would be on the wire without others on the same links at the same time.

    A trace does not show what they share (a host's way out and its way in, both together, or the path between two
    hosts) or how many fit at full speed.  The hypothesis that makes the times of similar collectives most alike wins.
    `of_hosts` indexes `between` by collective.
    """
    best: Floats = wire.astype(np.float64)
    if len(between) < GROUPS_MIN:
        return best
    come = (graph.arrive_ns - graph.base_ns).astype(np.float64)
    least = _spread(graph.joins.label, of_hosts, best)
    used = np.where(wire > 0, of_hosts, NONE)
    hypotheses = (
        _ways(graph.joins, used, between, host_of),
        (used, between),
        (used, [frozenset({number}) for number in range(len(between))]),
    )
    for use, links in hypotheses:
        for shares in SHARES:
            alone = work_alone(come, wire.astype(np.float64), use, links, shares)
            spread = _spread(graph.joins.label, of_hosts, alone)
            if spread < least:
                best, least = alone, spread
    return best


def _ways(
    joins: Joins, used: Index, between: Sequence[frozenset[int]], host_of: Mapping[int, int]
) -> tuple[Index, list[frozenset[int]]]:
    """Return the set of ways that each collective uses, and the sets; a message leaves one host and enters another.

    Host n has the ways 2 n out of it and 2 n + 1 into it.
    """
    into = np.full(joins.count, NONE)
    receives = joins.receives & joins.is_pair[joins.join]
    into[joins.join[receives]] = [host_of.get(place, NONE) for place in joins.rank[receives].tolist()]
    use = used.copy()
    known = used != NONE
    kinds, numbers = np.unique(np.stack((used[known], into[known])), axis=1, return_inverse=True)
    use[known] = numbers.reshape(-1)
    ways = [
        frozenset(2 * host + (host == to) for host in between[hosts])
        if to != NONE
        else frozenset(2 * host + way for host in between[hosts] for way in (0, 1))
        for hosts, to in kinds.T.tolist()
    ]
    return use, ways


def _spread(label: Index, number: Index, wire: Floats) -> float:
    """Return the mean scatter of the logarithms of similar collectives' times between the same hosts."""
    known = (number != NONE) & (wire > 0)
    if not known.any():
        return 0.0
    _, cell = np.unique(np.stack((label[known], number[known])), axis=1, return_inverse=True)
    logs: Floats = np.log(wire[known])
    parts = _grouped(logs, cell.reshape(-1), int(cell.max()) + 1)
    return sum(float(np.abs(part - np.median(part)).sum()) for part in parts) / len(logs)


def _host_of(hosts: Sequence[Sequence[int]]) -> dict[int, int]:
    return {place: number for number, places in enumerate(hosts) for place in places}


def _across(members: Mapping[int, set[int]], host_of: Mapping[int, int]) -> dict[int, frozenset[int]]:
    """Return the hosts of each group, with NONE among them if one is unknown."""
    return {group: frozenset(host_of.get(place, NONE) for place in its) for group, its in members.items()}


def _members(joins: Joins) -> dict[int, set[int]]:
    """Return the places of each group."""
    members: dict[int, set[int]] = {}
    for group, place in set(zip(joins.group[joins.join].tolist(), joins.rank.tolist(), strict=True)):
        members.setdefault(group, set()).add(place)
    return members


@dataclass(frozen=True, slots=True)
class _SlowGroups:
    """The slow groups and the fast ones.

    `changed` are the collectives of slow groups; `factor` scales the wire time of each to that of a normal link.
    """

    slow: set[int]
    fast: set[int]
    changed: Index
    factor: Floats


def _slow_groups(label: Index, group: Index, wire: Index | Floats, step: Index, steps: int) -> _SlowGroups:
    """Return the groups that are slow in any kind of collectives; collectives with `group` NONE are left out."""
    slow: set[int] = set()
    fast: set[int] = set()
    changes: list[tuple[Index, Floats]] = [(np.empty(0, dtype=np.int64), np.empty(0))]
    for each in np.unique(label).tolist():
        mine = np.flatnonzero((label == each) & (group != NONE))
        names, which, counts = np.unique(group[mine], return_inverse=True, return_counts=True)
        enough = counts >= COLLECTIVES_MIN
        if enough.sum() < GROUPS_MIN:
            continue
        mine, which = mine[enough[which]], which[enough[which]]
        for number, part, factor in _slow_parts(wire[mine], which, step[mine], steps):
            slow.add(int(names[number]))
            changes.append((mine[part], factor))
        fast |= set(names[enough].tolist()) - slow
    slow -= fast & slow if len(slow) > len(fast) else set()
    changed, factors = zip(*changes, strict=True)
    return _SlowGroups(slow, fast, np.concatenate(changed), np.concatenate(factors))


def _link(joins: Joins, wire: Index, found: _SlowGroups, places: list[int], step: Index, steps: int) -> SlowLink:
    """Return the slow link of `places`, with all wire times as they would be without it."""
    changed, count = found.changed, len(found.changed)
    then = wire.copy()
    then[changed] = np.minimum(wire[changed], np.rint(wire[changed] * found.factor).astype(np.int64))
    own, peers = int(wire[changed].sum()), int(then[changed].sum())
    details = {
        "own_ns": own / count, "peers_ns": peers / count, "excess_ns": (own - peers) / len(places),
        "p": 0.5 ** min(count, 1000), "groups": float(len(np.unique(joins.group[changed]))), "count": float(count),
    }  # fmt: skip
    known = changed[step[changed] >= 0]
    by_step = (np.bincount(step[known], (wire - then)[known], steps) / len(places)).astype(np.int64)
    return SlowLink(places, then, by_step, details)


def _slow_parts(wire: Index | Floats, group: Index, step: Index, steps: int) -> list[tuple[int, Index, Floats]]:
    """Return each slow group of one kind of collectives with its slow collectives and their factors."""
    own = {number: np.quantile(wire[group == number], DECILES) for number in np.unique(group).tolist()}
    reference = np.quantile(list(own.values()), 0.25, axis=0, method="lower")
    in_steps, factor = _slow_in_steps(wire, group, step, steps)
    found: list[tuple[int, Index, Floats]] = []
    for number, deciles in own.items():
        some = np.flatnonzero(group == number)
        if (deciles >= SLOW_RATIO_MIN * reference).all() and np.median(deciles) > 0:
            found.append((number, some, np.interp(wire[some], deciles, reference / np.maximum(deciles, 1.0))))
            continue
        some = some[in_steps[some]]
        if len(some) >= COLLECTIVES_MIN and len(np.unique(step[some])) >= SLOW_STEPS_MIN:
            found.append((number, some, factor[some]))
    return found


def _slow_in_steps(wire: Index | Floats, group: Index, step: Index, steps: int) -> tuple[Bools, Floats]:
    """Return which collectives are in a step in which their group is slow, and a factor for the wire time of each.

    The variation is that of all groups in all steps, so this finds slow steps that are few among them.
    """
    cells, cell = np.unique(np.where(step < 0, -1, group * steps + step), return_inverse=True)
    of_step = np.where(cells < 0, -1, cells % max(steps, 1))
    own = np.array([np.quantile(part, DECILES) for part in _grouped(wire, cell, len(cells))])
    reference = np.zeros_like(own)
    for each in np.unique(of_step[of_step >= 0]).tolist():
        some = of_step == each
        if some.sum() >= GROUPS_MIN:
            reference[some] = np.quantile(own[some], 0.25, axis=0, method="lower")
    known: Bools = np.all((reference > 0) & (own > 0), axis=1)
    logs: Floats = np.log(np.where(known[:, None], own, 1.0) / np.where(known[:, None], reference, 1.0))
    middle_log, least_log = np.median(logs, axis=1), logs.min(axis=1)
    middle = float(np.median(middle_log[known])) if known.any() else 0.0
    scale = 1.4826 * float(np.median(np.abs(middle_log[known] - middle))) if known.any() else 0.0
    is_slow = known & (least_log > max(np.log(SLOW_RATIO_MIN), middle + SLOW_Z * scale))
    return is_slow[cell], np.exp(-middle_log)[cell]


def _grouped(values: NDArray[Scalar], cell: Index, cells: int) -> list[NDArray[Scalar]]:
    """Return the values of each cell."""
    order = np.argsort(cell, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(cell, minlength=cells))[:-1])


def untold_joins(graph: JobGraph, hosts: Sequence[Sequence[int]]) -> Bools:
    """Return the collectives without a reference for how fast they can be.

    They are the only ones of their kind, or all groups of their kind use the network of one host and would be equally
    slow.  Where hosts are unknown, any may.
    """
    joins = graph.joins
    across = _across(_members(joins), _host_of(hosts))
    groups_of: dict[int, set[int]] = {}
    for label, group in set(zip(joins.label.tolist(), joins.group.tolist(), strict=True)):
        groups_of.setdefault(label, set()).add(group)
    untold = np.zeros(int(joins.label.max(initial=0)) + 1, dtype=np.bool_)
    for label, groups in groups_of.items():
        its = [across[group] for group in groups]
        is_on_one_network = any(len(each) > 1 for each in its) and bool(frozenset.intersection(*its))
        untold[label] = len(groups) < GROUPS_MIN or is_on_one_network or any(NONE in each for each in its)
    found: Bools = untold[joins.label]
    return found


def _of_one_host(
    found: _SlowGroups,
    members: Mapping[int, set[int]],
    hosts: Sequence[Sequence[int]],
    across: Mapping[int, frozenset[int]],
) -> list[int] | None:
    """Return the places of the one host in all slow groups and in no fast one between hosts; None without one.

    A single rank in all slow groups is the better answer, so the result is None then too.
    """
    if set.intersection(*(members[group] for group in found.slow)):
        return None
    common = _common_host(found.slow, found.fast, across)
    return None if common is None else sorted(hosts[common])


def _common_host(slow: set[int], fast: set[int], hosts_in: Mapping[int, frozenset[int]]) -> int | None:
    """Return the only host that all slow groups span and no fast group across hosts does; None if there is not one."""
    if not slow:
        return None
    common = frozenset.intersection(*(hosts_in[group] for group in slow))
    found = common.difference(*(hosts_in[group] for group in fast if len(hosts_in[group]) > 1), {NONE})
    return next(iter(found)) if len(found) == 1 else None


def _smallest(slow: set[int], fast: set[int], members: Mapping[int, set[int]]) -> list[int] | None:
    """Return the fewest places that touch all slow groups, preferring those in few fast ones."""
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
        # Both ends of a link are named together if the groups do not distinguish them.
        alike = [place for place in counts if (counts[place], -in_fast.get(place, 0)) == most]
        first = min(alike)
        both = [p for p in alike if all((p in members[group]) == (first in members[group]) for group in left)]
        chosen += both
        left = {group for group in left if first not in members[group]}
        if len(chosen) > max(len(slow) // 2 + 1, 2):
            return None
    return sorted(chosen)
