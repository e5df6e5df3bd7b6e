"""Joins the accounts of a job into process groups: what each member has called and finished.

A collective is *joined* by a rank that has called it, and *finished* when the rank's own call is.  What counts:

- a counter, where torch has one; but not in a group with sends and receives, which NCCL counts in the same counter;
- the calls.  Among themselves the calls of one group finish in order, so an unfinished one bounds the counter.

Without any word of what is finished (gloo before torch 2.9), a rank that is ahead of another has not finished what the
other has not joined.  That is wrong only of operations like a broadcast, whose root need not wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pacecar.records.hangs import CollectiveCall, GroupState, RankAccount

__all__ = ["CollectiveGroup", "GroupMember", "PeerCall", "is_synchronizing", "join_groups", "plain_operation"]

_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")

_SYNCHRONIZING = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "barrier")
"""Operations that no rank finishes before all have joined.  The root of a broadcast finishes on its own, as does
whoever only gives to a reduce or gather."""


class PeerCall(msgspec.Struct, frozen=True):
    """An unfinished send or receive; `peer` is a rank of the job, None if torch does not tell."""

    peer: int | None
    is_send: bool
    call: CollectiveCall


class GroupMember(msgspec.Struct, frozen=True):
    """What one rank says of one group.  `joined` and `finished` are the latest numbers; None is unknown."""

    rank: int
    joined: int | None
    finished: int | None
    calls: Mapping[int, CollectiveCall]
    peer_calls: tuple[PeerCall, ...] = ()

    @property
    def waits_in(self) -> int | None:
        """The first collective that it has joined and not finished."""
        if self.joined is None or self.finished is None or self.joined <= self.finished:
            return None
        return self.finished + 1


class CollectiveGroup(msgspec.Struct, frozen=True):
    """One process group.  `ranks` are all its ranks if `knows_ranks`; else those that speak of it, or all."""

    name: str
    description: str
    ranks: tuple[int, ...]
    knows_ranks: bool
    members: Mapping[int, GroupMember]

    @property
    def label(self) -> str:
        """What people call it."""
        return self.description if self.description not in ("", self.name) else self.name

    def call(self, number: int) -> CollectiveCall | None:
        """Return any member's call of that number."""
        return next((m.calls[number] for m in self.members.values() if number in m.calls), None)

    def call_of(self, rank: int, number: int) -> CollectiveCall | None:
        """Return the rank's call of that number, or else another member's."""
        member = self.members.get(rank)
        return member.calls.get(number) if member is not None and number in member.calls else self.call(number)


def join_groups(accounts: Iterable[RankAccount], world_size: int) -> list[CollectiveGroup]:
    """Return the groups of all accounts, in order of their names."""
    states: dict[tuple[str, tuple[int, ...]], dict[int, GroupState]] = {}
    for account in accounts:
        for state in account.groups:
            states.setdefault((state.name, state.ranks), {})[account.rank] = state
    return [_group(name, ranks, states[name, ranks], world_size) for name, ranks in sorted(states)]


def plain_operation(call: CollectiveCall) -> str:
    """Return "all_reduce" of "nccl:all_reduce"."""
    return call.operation.rpartition(":")[2] or call.operation


def is_synchronizing(call: CollectiveCall) -> bool:
    """Return whether no rank finishes this before all have joined."""
    return not call.is_p2p and any(name in call.operation for name in _SYNCHRONIZING)


def _group(name: str, ranks: tuple[int, ...], states: Mapping[int, GroupState], world_size: int) -> CollectiveGroup:
    description = next((state.description for state in states.values() if state.description), "")
    is_whole = description == "default_pg"  # torch's name of the group that init_process_group makes
    everyone = ranks or (tuple(range(world_size)) if is_whole else tuple(sorted(states)))
    has_p2p = any(call.is_p2p for state in states.values() for call in state.calls)
    members = {rank: _member(rank, state, everyone, has_p2p) for rank, state in states.items()}
    if not has_p2p:
        lowest = min((m.joined for m in members.values() if m.joined is not None), default=0)
        members = {rank: _bounded(member, lowest) for rank, member in members.items()}
    return CollectiveGroup(name, description, everyone, bool(ranks), members)


def _member(rank: int, state: GroupState, ranks: Sequence[int], has_p2p: bool) -> GroupMember:
    collectives = {call.number: call for call in state.calls if not call.is_p2p}
    peers = _peer_calls(rank, state, ranks)
    counts = not has_p2p or bool(state.calls)
    joined = state.enqueued if counts else None
    finished = state.completed if counts else None
    if collectives:
        joined = max(joined or 0, *collectives)
        done = [number for number, call in collectives.items() if call.is_finished]
        waiting = [number for number, call in collectives.items() if not call.is_finished]
        bounds = [*done, *([min(waiting) - 1] if waiting else []), *([] if finished is None else [finished])]
        finished = max(bounds, default=None)
    return GroupMember(rank, joined, finished, collectives, peers)


def _bounded(member: GroupMember, lowest: int) -> GroupMember:
    """Return the member; if nothing tells what it has finished, that is what all have joined."""
    if member.finished is not None or member.joined is None:
        return member
    return msgspec.structs.replace(member, finished=lowest)


def _peer_calls(rank: int, state: GroupState, ranks: Sequence[int]) -> tuple[PeerCall, ...]:
    """Return the unfinished sends and receives, without the entry of a batch whose parts are there."""
    calls = [_peer_call(rank, call, ranks) for call in state.calls if call.is_p2p and not call.is_finished]
    told = {one.call.number for one in calls if one.peer is not None}
    return tuple(one for one in calls if one.peer is not None or one.call.number not in told)


def _peer_call(rank: int, call: CollectiveCall, ranks: Sequence[int]) -> PeerCall:
    """Return a send or receive with its peer; torch writes "send 0->3" and "recv 3<-0", by place in the group."""
    if (found := _PEERS.search(call.operation)) is None:
        return PeerCall(None, "send" in call.operation, call)
    place = int(found.group(3))
    peer = ranks[place] if place < len(ranks) and ranks[place] != rank else None
    return PeerCall(peer, found.group(1) == "send", call)
