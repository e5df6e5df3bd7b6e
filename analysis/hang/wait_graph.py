"""Builds the graph of who waits for whom, and finds where all waiting ends.

A rank waits in the first collective of each group that it has joined and not finished, and in each send and receive.
It waits for

- members that have not joined it;
- members that are a cause by themselves: stopped, gone, or in another operation at that number;
- if all have joined, members that are held up in another group: their device, or thread, comes to it later.

A rank that waits for others is a victim, however far behind it is elsewhere.  Waiting ends in the strongly connected
components without an arrow to another one (found as Kosaraju and Sharir do).  A component of several ranks is a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from pacecar.records.hangs import CollectiveCall

from .group_members import CollectiveGroup, GroupMember, PeerCall

__all__ = ["Wait", "WaitGraph", "build_wait_graph"]

Arrows = dict[int, set[int]]


class Wait(msgspec.Struct, frozen=True):
    """One rank waits in one call.  The other ranks have joined it, are absent, or nothing is known of them there."""

    rank: int
    group: CollectiveGroup
    number: int
    call: CollectiveCall | None
    joined: frozenset[int]
    absent: frozenset[int]
    unknown: frozenset[int]

    @property
    def has_all(self) -> bool:
        """Whether all ranks that take part are known to have joined."""
        return not self.absent and not self.unknown


class WaitGraph(msgspec.Struct, frozen=True):
    """All waits, for each rank those that it waits for, and the components in which waiting ends."""

    waits: tuple[Wait, ...]
    arrows: Mapping[int, Collection[int]]
    ends: tuple[frozenset[int], ...]

    def waits_for(self, rank: int) -> list[Wait]:
        """Return the waits in which other ranks wait for `rank` itself."""
        return [
            wait
            for wait in self.waits
            if rank in wait.absent or (rank in self.arrows[wait.rank] and (rank in wait.joined or rank in wait.unknown))
        ]


def build_wait_graph(groups: Iterable[CollectiveGroup], world_size: int, causes: Collection[int]) -> WaitGraph:
    """Return the graph; `causes` hold others up whatever they wait for themselves."""
    groups = tuple(groups)
    waits = tuple(wait for group in groups for wait in _waits(group, range(world_size)))
    arrows: Arrows = {wait.rank: set() for wait in waits}
    for wait in waits:
        if wait.rank not in causes:
            arrows[wait.rank] |= _awaited(wait, causes)
    _hold_up(arrows, [wait for wait in waits if wait.has_all and wait.rank not in causes])
    for other in {other for others in arrows.values() for other in others}:
        arrows.setdefault(other, set())
    ends = [part for part in _components(arrows) if all(arrows[rank] <= part for rank in part)]
    return WaitGraph(waits, arrows, tuple(sorted(ends, key=min)))


def _awaited(wait: Wait, causes: Collection[int]) -> set[int]:
    """Return the ranks that certainly hold up this wait, or else those of whom nothing is known."""
    members = wait.joined | wait.absent | (wait.unknown if wait.group.knows_ranks else frozenset())
    certain = wait.absent | {rank for rank in members if rank in causes}
    return set(certain or wait.unknown)


def _hold_up(arrows: Arrows, waits: Collection[Wait]) -> None:
    """Let ranks whose call has all members wait for members that are held up elsewhere."""
    changed = True
    while changed:
        changed = False
        for wait in waits:
            held_up = {rank for rank in wait.joined if arrows.get(rank)} - arrows[wait.rank]
            arrows[wait.rank] |= held_up
            changed |= bool(held_up)


def _waits(group: CollectiveGroup, everyone: Collection[int]) -> Iterator[Wait]:
    ranks = frozenset(group.ranks if group.knows_ranks else everyone)
    for rank, member in group.members.items():
        if (number := member.waits_in) is not None:
            yield _wait(group, rank, number, ranks - {rank})
        yield from _peer_waits(group, member, ranks)


def _wait(group: CollectiveGroup, rank: int, number: int, others: frozenset[int]) -> Wait:
    latest = {one: member.joined for one, member in group.members.items() if member.joined is not None}
    absent = frozenset(one for one in others if one in latest and latest[one] < number)
    unknown = others - latest.keys()
    return Wait(rank, group, number, group.call_of(rank, number), others - absent - unknown, absent, unknown)


def _peer_waits(group: CollectiveGroup, member: GroupMember, ranks: frozenset[int]) -> Iterator[Wait]:
    """Yield the waits in sends and receives, one for each peer and direction.

    The messages between two ranks arrive in order, so the peer is absent if it has fewer calls pending.
    """
    none: frozenset[int] = frozenset()
    first: dict[tuple[int | None, bool], PeerCall] = {}
    for one in member.peer_calls:
        first.setdefault((one.peer, one.is_send), one)
    for (peer, is_send), one in first.items():
        sides = none, none, ranks - {member.rank}
        if peer is not None:
            one_peer = frozenset((peer,))
            if peer not in group.members:
                sides = none, none, one_peer
            elif _pending(member, peer, is_send) > _pending(group.members[peer], member.rank, not is_send):
                sides = none, one_peer, none
            else:
                sides = one_peer, none, none
        yield Wait(member.rank, group, one.call.number, one.call, *sides)


def _pending(member: GroupMember, peer: int, is_send: bool) -> int:
    return Counter((one.peer, one.is_send) for one in member.peer_calls)[peer, is_send]


def _components(arrows: Mapping[int, Collection[int]]) -> list[frozenset[int]]:
    """Return the strongly connected components."""
    backward: dict[int, list[int]] = {rank: [] for rank in arrows}
    for rank, others in arrows.items():
        for other in others:
            backward[other].append(rank)
    order: list[int] = []
    seen: set[int] = set()
    for rank in arrows:
        order += _postorder(arrows, rank, seen)
    seen.clear()
    return [frozenset(part) for rank in reversed(order) if (part := _postorder(backward, rank, seen))]


def _postorder(arrows: Mapping[int, Collection[int]], start: int, seen: set[int]) -> list[int]:
    """Return the ranks that `start` leads to and that were not seen, each after those that it leads to."""
    if start in seen:
        return []
    seen.add(start)
    order: list[int] = []
    path = [(start, iter(arrows[start]))]
    while path:
        other = next((one for one in path[-1][1] if one not in seen), None)
        if other is None:
            order.append(path.pop()[0])
        else:
            seen.add(other)
            path.append((other, iter(arrows[other])))
    return order
