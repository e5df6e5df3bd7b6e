"""The ranks of a large job are compared in subgroups, and rank 0 speaks for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.profiler.ranks.exchange.leader_reports import (
    REPORT_SECONDS,
    SILENCE_SECONDS_MAX,
    LeaderReports,
)
from pacecar.profiler.ranks.exchange.ledger_sums import SUMMED_PHASES, LedgerSums
from pacecar.profiler.ranks.exchange.phase_sums_message import RangeMessageError
from pacecar.profiler.ranks.exchange.step_partition import RangesError, gather_seconds
from pacecar.profiler.ranks.exchange.subgroups import SUBGROUP_RANKS, WHOLE_MAX, subgroup_of
from pacecar.profiler.ranks.exchange.totals import LedgerTotals
from pacecar.records import Cause, Straggler
from tests.kit.records import ledger

S = 1_000_000_000


@pytest.mark.slow
@given(st.integers(1, 4096))
def test_each_rank_is_in_one_subgroup_of_neighbours_of_about_the_same_size(world):
    own = [subgroup_of(rank, world) for rank in range(world)]
    groups = set(own)
    assert sorted(rank for group in groups for rank in group.members) == list(range(world))
    assert all(rank in group.members for rank, group in enumerate(own))
    sizes = {group.ranks for group in groups}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (WHOLE_MAX if world <= WHOLE_MAX else SUBGROUP_RANKS)
    assert {group.leaders for group in groups} == {tuple(sorted(group.first for group in groups))}
    assert {group.leaders[group.number] for group in groups} == {group.first for group in groups}


def test_a_thousand_ranks_gather_within_ten_seconds():
    """A batch is at most twice as long as gathers should be apart (`step_partition`)."""
    assert 2 * gather_seconds(0.01, 1024) <= 10
    assert gather_seconds(0.01, WHOLE_MAX) == pytest.approx(6.33, rel=1e-2)


# --- reports of leaders -------------------------------------------------------------------------


class Seat:
    """A leader's end of a group in this process."""

    def __init__(self, table, place):
        self.table, self.place, self.taken = table, place, 0
        self.is_closed = False

    @property
    def is_busy(self):
        return len(self.table[self.place]) > self.taken

    def post(self, words):
        assert not self.is_busy
        self.table[self.place].append(list(words))

    def receive(self):
        if min(map(len, self.table)) <= self.taken:
            return None
        self.taken += 1
        return [words[self.taken - 1] for words in self.table]

    def close(self):
        self.is_closed = True


def leaders(count, now):
    table = [[] for _ in range(count)]
    return [LeaderReports(Seat(table, place), lambda: now[0], is_first=place == 0) for place in range(count)], table


def sums(ranks=16, step=7):
    return LedgerSums(ranks, step, step + 1, ranks * step, tuple(range(len(SUMMED_PHASES))), (12, 10))


def late(rank, evidence="e"):
    return Straggler(
        job="j", late_rank=rank, cause=Cause.COMPUTE, phase="forward", since_step=1, step=2, wall_ns=3, excess_ns=4,
        evidence=evidence,
    )  # fmt: skip


def test_what_leaders_found_comes_to_rank_0_alone_whole_and_in_order_of_rank():
    now = [0]
    (first, second), _ = leaders(2, now)
    known = LedgerTotals(ledger(100, exposed_communication=20), 5, 9, 0)
    first.add(sums(), [late(1), late(2)])
    second.add(sums(step=8), [late(17)])
    first.post([known, None])
    assert first.receive() == []
    second.post([None, known])
    assert second.receive() == []
    mine, other = first.receive()
    assert (mine.sums, other.sums) == (sums(), sums(step=8))
    assert [mine.ledgers(), other.ledgers()] == [[known, None], [None, known]]
    assert (mine.stragglers, other.stragglers) == ((late(1), late(2)), (late(17),))


def test_stragglers_that_do_not_fit_go_with_the_next_report_and_none_twice():
    now = [0]
    (only,), _ = leaders(1, now)
    found = [late(rank, "e" * 300) for rank in range(20)]
    only.add(sums(), found)
    heard = []
    for _ in range(6):
        only.post([LedgerTotals(ledger(10**15), 10**9, 10**9, 10**6)] * SUBGROUP_RANKS)
        heard += only.receive()[0].stragglers
    assert heard == found


def test_a_report_is_due_in_its_turn_or_at_the_end_and_never_while_one_is_under_way():
    now = [0]
    (only,), _ = leaders(1, now)
    assert only.is_due(at_once=False)
    only.post([])
    assert not only.is_due(at_once=True)
    only.receive()
    assert (only.is_due(at_once=False), only.is_due(at_once=True)) == (False, True)
    now[0] = round(REPORT_SECONDS * S)
    assert only.is_due(at_once=False)


def test_a_subgroup_that_leaves_says_why_to_all_leaders():
    now = [0]
    ranks, _ = leaders(3, now)
    ranks[1].close("rank 20 measures no more")
    for place in (0, 2):
        ranks[place].post([])
    for place in (0, 2):
        with pytest.raises(RangesError, match="rank 20 measures no more"):
            ranks[place].receive()


def test_a_leader_that_is_silent_for_long_ends_the_comparison():
    now = [0]
    (first, _), _ = leaders(2, now)
    first.post([])
    now[0] = round(SILENCE_SECONDS_MAX * S)
    assert first.receive() == []
    now[0] += 1
    with pytest.raises(RangesError, match="did not answer"):
        first.receive()


@pytest.mark.parametrize("spoil", ["version", "length", "payload"])
def test_a_report_that_is_nonsense_is_said(spoil):
    now = [0]
    (first, second), table = leaders(2, now)
    first.post([])
    second.post([])
    words = table[1][0]
    table[1][0] = {"version": [1, *words[1:]], "length": words[:-1], "payload": [*words[:2], 7, *words[3:]]}[spoil]
    with pytest.raises(RangeMessageError):
        first.receive()
