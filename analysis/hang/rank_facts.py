"""Finds ranks that hold others up by themselves, whatever they wait for, and accounts that cannot be true.

- The kernel says that a process has ended or is stopped; or a rank does not answer, or is cut off: that is its host or
  a link, and from here it cannot be told whose.
- A rank *lags*: it has joined a collective that a peer has finished, and has not finished it.  No rank finishes such an
  operation before all have joined, so the others did their part: what lags is the rank's own device, or its link.
  If most members lag it is the link between them, and none is named.
- Two accounts *contradict* each other: one has finished what the other has not joined.  One is of another time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from pacecar.records.hangs import RankAccount

from .group_members import CollectiveGroup, is_synchronizing

__all__ = ["Contradiction", "RankFacts", "contradicting_ranks", "lagging_ranks", "process_facts"]

LAST_CALLS_APART_MAX_NS = 15 * 60 * 10**9
"""A rank whose last call is so far from the others' has a dump of another time, or another clock.  Either way its word
does not prove that it lags."""


class RankFacts(msgspec.Struct, frozen=True):
    """Ranks by what is known of their processes; a rank is in one of the sets at most."""

    gone: frozenset[int]
    stopped: frozenset[int]
    no_answer: frozenset[int]
    cut_off: frozenset[int]

    @property
    def all(self) -> frozenset[int]:
        """The ranks in any of the sets."""
        return self.gone | self.stopped | self.no_answer | self.cut_off


class Contradiction(msgspec.Struct, frozen=True):
    """One rank has finished a collective that another one has not joined."""

    group: CollectiveGroup
    number: int
    behind: int
    ahead: int


def process_facts(accounts: Iterable[RankAccount]) -> RankFacts:
    """Return what the kernel says of the processes (proc_pid_stat(5)), and who did not answer."""
    gone, stopped, no_answer, cut_off = (set[int]() for _ in range(4))
    for account in accounts:
        process = account.process
        if process is not None and (not process.exists or process.state in ("Z", "X")):
            gone.add(account.rank)
        elif process is not None and (process.is_frozen or process.state in ("T", "t")):
            stopped.add(account.rank)
        elif not account.answered:
            (cut_off if account.is_cut_off else no_answer).add(account.rank)
    return RankFacts(frozenset(gone), frozenset(stopped), frozenset(no_answer), frozenset(cut_off))


def lagging_ranks(
    groups: Iterable[CollectiveGroup], accounts: Collection[RankAccount]
) -> dict[int, tuple[CollectiveGroup, int]]:
    """Return for each rank that lags the first group and number in which it does."""
    groups = tuple(groups)
    if not any(True for group in groups for _ in _lags(group, frozenset(group.members))):
        return {}
    last = _last_calls(accounts)
    current = frozenset(one.rank for one in accounts if _is_of_their_time(one.rank, last, len(accounts)))
    found: dict[int, tuple[CollectiveGroup, int]] = {}
    for group in groups:
        lags = dict(_lags(group, current))
        if 2 * len(lags) <= len(group.members):
            for rank, number in lags.items():
                found.setdefault(rank, (group, number))
    return found


def _last_calls(accounts: Collection[RankAccount]) -> dict[int, int]:
    """Return when each rank made its last call, before its account where all say when that was."""
    last: dict[int, int] = {}
    for account in accounts:
        created = [call.created_ns for group in account.groups for call in group.calls if call.created_ns is not None]
        if created:
            last[account.rank] = max(created)
    if all(account.wall_ns is not None for account in accounts):
        return {one.rank: last[one.rank] - (one.wall_ns or 0) for one in accounts if one.rank in last}
    return last


def _is_of_their_time(rank: int, last: Mapping[int, int], accounts: int) -> bool:
    """Return whether the last call of the rank is near those of half of the others."""
    own = last.get(rank)
    near = 0 if own is None else sum(abs(at - own) <= LAST_CALLS_APART_MAX_NS for at in last.values()) - 1
    return 2 * near >= accounts - 1


def _lags(group: CollectiveGroup, current: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranks of `current` that have not finished what another one of them has, and the number."""
    members = {rank: member for rank, member in group.members.items() if rank in current}
    finished = max((m.finished for m in members.values() if m.finished is not None), default=0)
    for rank, member in members.items():
        number = member.waits_in
        call = None if number is None else member.calls.get(number)
        if number is not None and number <= finished and call is not None and is_synchronizing(call):
            yield rank, number


def contradicting_ranks(groups: Iterable[CollectiveGroup]) -> dict[int, Contradiction]:
    """Return the ranks whose accounts cannot be of the same time as those of their peers.

    Those that contradict most others are taken out until the rest agrees; of two that contradict each other, both.
    """
    found: dict[int, dict[int, Contradiction]] = {}
    for group in groups:
        for one in _contradictions(group):
            found.setdefault(one.behind, {}).setdefault(one.ahead, one)
            found.setdefault(one.ahead, {}).setdefault(one.behind, one)
    wrong: dict[int, Contradiction] = {}
    while most := max(map(len, found.values()), default=0):
        worst = {rank: next(iter(peers.values())) for rank, peers in found.items() if len(peers) == most}
        wrong |= worst
        rest = {rank: peers for rank, peers in found.items() if rank not in worst}
        found = {rank: {peer: peers[peer] for peer in peers.keys() - worst.keys()} for rank, peers in rest.items()}
    return wrong


def _contradictions(group: CollectiveGroup) -> Iterator[Contradiction]:
    members = [m for m in group.members.values() if m.joined is not None and m.finished is not None]
    most = max((m.finished or 0 for m in members), default=0)
    for behind in members:
        if (behind.joined or 0) < most:
            for ahead in members:
                if (number := _needed(group, behind.joined or 0, ahead.finished or 0)) is not None:
                    yield Contradiction(group, number, behind.rank, ahead.rank)


def _needed(group: CollectiveGroup, joined: int, finished: int) -> int | None:
    """Return the first collective after `joined`, up to `finished`, that may need all ranks; some roots do not wait."""
    for number in range(joined + 1, finished + 1):
        call = group.call(number)
        if call is None or is_synchronizing(call):
            return number
    return None
