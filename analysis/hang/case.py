"""Sorts out what the accounts of a job say, for the judgement to be made on it.

Accounts that contradict their peers are set aside, causes are found, and all waiting is followed to its ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from pacecar.records.hangs import HangKind, RankAccount

from .group_members import CollectiveGroup, join_groups
from .mismatches import Mismatch, find_mismatch
from .rank_facts import Contradiction, RankFacts, contradicting_ranks, lagging_ranks, process_facts
from .turns import Turns, find_turns
from .wait_graph import Wait, WaitGraph, build_wait_graph

__all__ = [
    "QUIET_PHASES",
    "HangCase",
    "HangFinding",
    "common_place",
    "is_in_communication",
    "open_case",
    "training_frames",
    "would_record_waits",
]


_COMMUNICATION = re.compile(r"(?:distributed_c10d|_functional_collectives|rendezvous)\.py\b")
"""A frame of torch that waits for other ranks."""

QUIET_PHASES = ("data_wait", "checkpoint")
"""Phases of a step in which a rank waits for something other than ranks (`records.PHASES_OF_JOBS`)."""


class HangCase(msgspec.Struct, frozen=True):
    """Everything that is known, sorted out."""

    accounts: Mapping[int, RankAccount]
    world_size: int
    groups: tuple[CollectiveGroup, ...]
    facts: RankFacts
    contradicted: Mapping[int, Contradiction]
    lags: Mapping[int, tuple[CollectiveGroup, int]]
    turns: Turns
    mismatches: tuple[Mismatch, ...]
    graph: WaitGraph

    @property
    def told(self) -> frozenset[int]:
        """The ranks of whose groups something is known."""
        return frozenset(rank for group in self.groups for rank in group.members)

    @property
    def waiting(self) -> frozenset[int]:
        """The ranks that wait in a call."""
        return frozenset(wait.rank for wait in self.graph.waits)

    @property
    def records_peer_calls(self) -> bool:
        """Whether torch records sends and receives here, or there are none.

        Gloo's recorder does not, others do; but gloo counts them, with the collectives.
        """
        groups = [group for account in self.accounts.values() for group in account.groups]
        calls = [call for group in groups for call in group.calls]
        has_none = bool(calls) and all(group.operations == (group.enqueued or 0) for group in groups)
        has_all = all(one.groups for one in self.accounts.values() if one.answered)
        return (has_none and has_all) or any(
            call.is_p2p or (":" in call.operation and not call.operation.startswith("gloo:")) for call in calls
        )


class HangFinding(msgspec.Struct, frozen=True):
    """An end of the waiting, or of kind `unknown` why it cannot be told.

    With `is_pair` one of two ranks is to blame.
    """

    kind: HangKind
    ranks: frozenset[int]
    sentence: str
    wait: Wait | None = None
    is_pair: bool = False


def open_case(accounts: Iterable[RankAccount], world_size: int) -> HangCase:
    """Return the case of a job; `accounts` may lack ranks, and of two of one rank the later counts."""
    by_rank = dict(sorted({account.rank: account for account in accounts}.items()))
    facts = process_facts(by_rank.values())
    groups = join_groups(by_rank.values(), world_size)
    contradicted = contradicting_ranks(groups)
    if contradicted:
        groups = join_groups((one for one in by_rank.values() if one.rank not in contradicted), world_size)
    lags = lagging_ranks(groups, by_rank.values())
    turns = find_turns(one for one in by_rank.values() if one.rank not in contradicted)
    mismatches = tuple(found for group in groups if (found := find_mismatch(group, turns)) is not None)
    blamed = {rank for one in mismatches for rank in one.blamed}
    graph = build_wait_graph(groups, world_size, facts.all | lags.keys() | blamed)
    return HangCase(by_rank, world_size, tuple(groups), facts, contradicted, lags, turns, mismatches, graph)


def common_place(case: HangCase, ranks: Iterable[int]) -> str | None:
    """Return where all the ranks are, outside communication; None if there is no such place.

    That is a phase of the step without collectives, or else the innermost frame.  A frame tells only where torch would
    have recorded a send or receive: waiting for one looks like any other line of the script.
    """
    accounts = [case.accounts[rank] for rank in ranks if rank in case.accounts]
    if any(map(is_in_communication, accounts)):
        return None
    frames = {(training_frames(one) or (None,))[0] for one in accounts}
    frame = frames.pop() if len(frames) == 1 else None
    phases = {one.phase for one in accounts}
    if len(phases) == 1 and (phase := phases.pop()) in QUIET_PHASES:
        return frame or phase
    return frame if case.records_peer_calls else None


def would_record_waits(case: HangCase) -> bool:
    """Return whether a rank that waits for another one would show it: in a call that torch records, or by its stack."""
    accounts = {rank: one for rank, one in case.accounts.items() if one.answered}
    is_seen = all(training_frames(one) and not is_in_communication(one) for one in accounts.values())
    return bool(accounts) and is_seen and case.records_peer_calls and case.told >= accounts.keys()


def is_in_communication(account: RankAccount) -> bool:
    """Return whether the stack of the rank's training thread is inside torch.distributed."""
    return any(_COMMUNICATION.search(frame) for frame in training_frames(account))


def training_frames(account: RankAccount) -> tuple[str, ...]:
    """Return the stack of the rank's training thread, innermost frame first; empty if there is none."""
    return next((stack.frames for stack in account.stacks if stack.is_training and stack.frames), ())
