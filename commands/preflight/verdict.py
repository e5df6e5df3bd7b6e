"""Says which nodes, ranks and links are slow, by comparison with their peers.  Pure.

A value is slow if it is below `1 - tolerance` of its peers' median.  Peers are the ranks with the same device, and for
links those of the same kind: within a node, or between nodes.  The reference of links is the median over the ranks of
each rank's best, because every link of a slow node is slow.

A link has two ends.  The node to which most of the slow links lead is slow itself, if most of its links are; what that
explains is taken away, and so on.  Then the same with single ranks (one slow port of a node).  What remains is the
fault of a link, unless one end is slow itself.  With one link there is nothing to compare, and with two nodes no other
node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from .document import Check, LinkMeeting, NodeChecks, PreflightFault
from .pairing import Pair

__all__ = ["LinkVerdict", "judge_links", "judge_nodes", "nodes_to_exclude"]

DISK_SHARE = 0.2
"""A disk is slow below this share of its peers' median: caches and neighbours make good disks differ by a factor."""

BLAMED_SHARE = 0.6
BLAMED_MIN = 2
"""A node or rank is slow itself if this share of its links is slow, and at least so many."""


def judge_nodes(
    nodes: Sequence[NodeChecks], tolerance: float, reference: Sequence[NodeChecks] = ()
) -> tuple[list[PreflightFault], list[str]]:
    """Return what is slow or broken in the ranks' own checks, and what could not be told.

    `reference` are checks of an earlier run, which count as further peers.
    """
    faults, untold = [], []
    checks: tuple[tuple[Check, str, Callable[[NodeChecks], float | None], float], ...] = (
        ("compute", "FLOP/s", lambda one: one.flops_per_second, 1 - tolerance),
        ("memory", "bytes/s", lambda one: one.memory_bytes_per_second, 1 - tolerance),
        ("disk", "bytes/s", lambda one: one.disk_bytes_per_second, DISK_SHARE),
    )
    for check, unit, value_of, share in checks:
        alone = set()
        for one in nodes:
            value = value_of(one)
            if value is None:
                continue
            peers = [p for p in nodes if p.rank != one.rank and p.device == one.device]
            values = [v for p in (*peers, *reference) if p.device == one.device and (v := value_of(p)) is not None]
            if not values:
                alone.add(one.device)
                continue
            usual = median(values)
            if value < share * usual:
                detail = f"{value:.3g} {unit} where its peers have {usual:.3g}"
                faults.append(_fault(check, [one], detail, value / usual))
        untold += [f"{check} of {device}: no peer to compare with" for device in sorted(alone)]
    for one in nodes:
        faults += [_fault("hardware", [one], finding, None) for finding in one.findings]
    disks = sum(one.disk_bytes_per_second is not None for one in (*nodes, *reference))
    lacking = [one for one in nodes if one.missing]
    for one in lacking:
        if disks > len(lacking):
            faults += [_fault("disk", [one], reason, None) for reason in one.missing]
        else:
            untold += [f"rank {one.rank} on {one.host}: {reason}" for reason in one.missing]
    return faults, untold


@dataclass(frozen=True)
class LinkVerdict:
    """Who is slow by the meetings so far; `slow` says it of each pair by its best meeting, `doubted` are slow links."""

    faults: list[PreflightFault]
    untold: list[str]
    slow: dict[Pair, bool]
    doubted: list[Pair]


def judge_links(nodes: Sequence[NodeChecks], meetings: Sequence[LinkMeeting], tolerance: float) -> LinkVerdict:
    """Judge all links; `nodes` are the checks of every rank that answered."""
    known = {one.rank: one for one in nodes}
    best: dict[Pair, float] = {}
    for meeting in meetings:
        if not known.keys() >= set(meeting.ranks):
            continue  # the silent rank is named already
        best[meeting.ranks] = max(best.get(meeting.ranks, 0.0), meeting.bytes_per_second or 0.0)
    ratios: dict[Pair, float] = {}
    faults: list[PreflightFault] = []
    untold: list[str] = []
    doubted: list[Pair] = []
    for is_within in (False, True):
        kind = {pair: rate for pair, rate in best.items() if (len({known[r].node for r in pair}) == 1) is is_within}
        if len(kind) == 1 and next(iter(kind.values())) > 0:
            where = "within nodes" if is_within else "between nodes"
            untold.append(f"links {where}: there is one only, and nothing to compare it with")
            continue
        joined = {frozenset(known[rank].node for rank in pair) for pair in kind}
        if not is_within and len(joined) == 1 < len(kind):
            untold.append("links between nodes: all join the same two; if one were slow, it would not show")
        ends: dict[int, float] = defaultdict(float)
        for pair, rate in kind.items():
            for rank in pair:
                ends[rank] = max(ends[rank], rate)
        usual = median(ends.values()) if ends else 0.0
        ratios |= {pair: rate / usual if usual else 0.0 for pair, rate in kind.items()}
        left = {pair: ratios[pair] < 1 - tolerance for pair in kind}
        for unit in (lambda rank: known[rank].node, lambda rank: rank):
            while (found := _most_blamed(left, unit)) is not None:
                mine = [pair for pair in left if found in {unit(rank) for rank in pair}]
                bad = [ratios[pair] for pair in mine if left[pair]]
                detail = f"{len(bad)} of its {len(mine)} links have {max(bad):.0%} of the usual rate or less"
                ranks = [one for one in nodes if unit(one.rank) == found]
                faults.append(_fault("link", ranks, detail, median(bad)))
                left = {pair: is_slow for pair, is_slow in left.items() if pair not in mine}
        doubted += [pair for pair, is_slow in left.items() if is_slow]
    blamed = {rank for fault in faults for rank in fault.ranks}
    doubted = [pair for pair in doubted if not blamed.intersection(pair)]
    for pair in doubted:
        detail = f"{ratios[pair]:.0%} of the usual rate, while the others of both ends are well"
        fault = _fault("link", [known[rank] for rank in pair], detail, ratios[pair], is_between=True)
        faults.append(fault)
    return LinkVerdict(faults, untold, {pair: ratio < 1 - tolerance for pair, ratio in ratios.items()}, doubted)


def _most_blamed(slow: dict[Pair, bool], unit: Callable[[int], str | int]) -> str | int | None:
    """Return the node or rank to which most slow links lead, if it is slow itself."""
    links: dict[str | int, list[bool]] = defaultdict(list)
    for pair, is_slow in slow.items():
        for one in {unit(rank) for rank in pair}:
            links[one].append(is_slow)
    blamed = {
        one: sum(all_) / len(all_)
        for one, all_ in links.items()
        if sum(all_) >= BLAMED_MIN and sum(all_) >= BLAMED_SHARE * len(all_) and len(links) > 1
    }
    return max(blamed, key=lambda one: (blamed[one], len(links[one]))) if blamed else None


def nodes_to_exclude(faults: Sequence[PreflightFault]) -> tuple[str, ...]:
    """Return the hosts that are at fault by themselves."""
    return tuple(sorted({host for fault in faults if not fault.is_between for host in fault.hosts}))


def _fault(
    check: Check, ranks: Sequence[NodeChecks], detail: str, ratio: float | None, *, is_between: bool = False
) -> PreflightFault:
    hosts = tuple(dict.fromkeys(one.host for one in ranks))
    numbers = tuple(one.rank for one in ranks)
    return PreflightFault(check=check, ranks=numbers, hosts=hosts, detail=detail, ratio=ratio, is_between=is_between)
