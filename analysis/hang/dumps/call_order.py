"""Finds out whether a rank's latest calls follow the order in which it has made its calls all the time.

Training repeats itself: step after step a rank makes the same calls on the same groups in the same order.  Where two
ranks wait for each other and no majority tells which of them is wrong, this may: the one that departs from its order
while the other keeps its own.

An order counts only if it was kept without exception ORDER_REPEATS times, up to a possible departure at the end.  Only
the beginning of a job may differ (BEGINNING_RATIO), as DistributedDataParallel's first steps do.  A job that evaluates,
logs or accumulates now and then has one long order with all of that, or none.

Gloo does not record sends and receives, but numbers them: what lies between two recorded calls of a group is counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from pacecar.records.hangs import CallOrder, CollectiveCall, Departure

from ..mismatches import signature

__all__ = ["Called", "call_order"]

ORDER_REPEATS = 8
"""How often an order must have been kept."""

BEGINNING_RATIO = 0.25
"""The part of all calls of a job in which it may still differ."""

TAIL_PERIODS = 2
"""How many periods a rank may go on after it has departed; its device may be behind its host."""


class Called(NamedTuple):
    """One call of a rank in the order of its calls; `unrecorded` counts those on its group since the one before."""

    group: str
    call: CollectiveCall
    unrecorded: int = 0


def call_order(
    called: Sequence[Called], *, is_whole: bool, unrecorded_since: Mapping[str, int] = {}
) -> CallOrder | None:
    """Return the order of a rank's calls and where it has departed from it; None if there is no such order.

    `is_whole`: the first of `called` is the job's first.  `unrecorded_since` counts for each group the calls that are
    not recorded and were begun after its last recorded one.
    """
    words_with_sizes = [(one.group, one.unrecorded, *signature(one.call)) for one in called]
    for words in (words_with_sizes, [word[:3] for word in words_with_sizes]):  # sizes may vary with the batch
        beginning = int(BEGINNING_RATIO * len(words)) if is_whole else 0
        found = [_kept(words, period, beginning) for period in range(1, len(words) // ORDER_REPEATS + 1)]
        kept = [each for each in found if each is not None]
        if kept:
            best = min(kept, key=lambda each: (each.departs is not None, each.period))
            return _described(called, words, best, unrecorded_since)
    return None


class _Kept(NamedTuple):
    """Words that repeat after `period` from `begins` on; `departs` is the first that does not."""

    period: int
    begins: int
    departs: int | None


def _kept(words: Sequence[Hashable], period: int, beginning: int) -> _Kept | None:
    begins, departs = 0, None
    for at in range(period, len(words)):
        if words[at] != words[at - period]:
            if at - period < beginning:
                begins = at - period + 1
            else:
                departs = at
                break
    end = len(words) if departs is None else departs
    if end - begins < ORDER_REPEATS * period or len(words) - end > TAIL_PERIODS * period:
        return None
    return _Kept(period, begins, departs)


def _described(
    called: Sequence[Called], words: Sequence[Hashable], kept: _Kept, unrecorded_since: Mapping[str, int]
) -> CallOrder:
    period, end = kept.period, len(words) if kept.departs is None else kept.departs
    order = words[end - period : end]
    departure = None
    if kept.departs is not None:
        one, due = called[end], called[end - period]
        departure = Departure(
            group=one.group, number=None if one.call.is_p2p else one.call.number, operation=one.call.operation,
            due_group=due.group, due_operation=due.call.operation, left_out=_left_out(order, words[end:]),
        )  # fmt: skip
    else:
        usual = called[end - period : end]
        for group, count in unrecorded_since.items():
            if count > _unrecorded_usually(called, usual, group):
                due = usual[0]
                departure = Departure(group=group, due_group=due.group, due_operation=due.call.operation)
    return CallOrder(period=period, repeats=(end - kept.begins) // period, departure=departure)


def _left_out(order: Sequence[Hashable], tail: Sequence[Hashable]) -> int:
    """Return how many calls of the order were left out, if it was kept after them; else 0."""
    period = len(order)
    for left_out in range(1, period):
        if all(word == order[(left_out + at) % period] for at, word in enumerate(tail)):
            return left_out
    return 0


def _unrecorded_usually(called: Sequence[Called], usual: Sequence[Called], group: str) -> float:
    """Return how many unrecorded calls of the group may be under way before its next recorded one."""
    counts = [one.unrecorded for one in usual if one.group == group]
    if counts:
        return counts[0]
    of_group = [one.unrecorded for one in called if one.group == group]
    # Of a group that only sends and receives there is no order.
    return 0 if of_group and not any(of_group) else float("inf")
