"""A rank whose garbage collector holds the others up is named for it, however rare its collections are."""

from __future__ import annotations

import pytest

from pacecar.profiler.ranks.collection_diagnosis import CollectionDiagnosis
from pacecar.profiler.ranks.exchange.phase_sums_message import PHASES, StepNote, gather_range
from pacecar.profiler.ranks.straggler_detector import StragglerDetector
from tests.profiler.ranks.simulation import simulate

MS = 1_000_000
SLOW_FROM = 200
WAITS, OWN = ("tail",), ("data_wait", "forward", "backward", "optimizer", "checkpoint", "overhead", "rest")


def now_and_then(every, ms, *, on=None):
    """Return what garbage collection adds to steps from SLOW_FROM on, at random, on rank `on` or on all."""

    def collects(rng, step, rank):
        return ms if on in (None, rank) and step >= SLOW_FROM and rng.random() < 1 / every else 0

    return collects


@pytest.mark.parametrize(("every", "ms", "steps"), [(1, 15, 60), (4, 60, 200), (10, 100, 400), (30, 300, 1000)])
def test_a_rank_that_collects_more_than_the_others_is_named_for_that_and_nothing_else(every, ms, steps):
    heard = simulate(every, steps=SLOW_FROM + steps, collects=now_and_then(every, ms, on=2))
    assert {(one.late_rank, one.cause, one.phase) for _, one in heard} == {(2, "gc", "forward")}
    assert not heard[-1][1].ended
    assert 0.5 < heard[0][1].excess_ns / (ms * MS / every) < 1.6


@pytest.mark.slow
@pytest.mark.parametrize(("every", "ms"), [(2, 30), (10, 100), (100, 800)])
def test_where_all_ranks_collect_nobody_is_named(every, ms):
    assert [simulate(seed, steps=1000, collects=now_and_then(every, ms)) for seed in range(3)] == [[], [], []]


def rows(number, collected, *, tail=0, on_device=False, timed=True):
    """Return the rows of four ranks: rank 1 collects for `collected` ms in one of four steps, and the others wait."""
    found = []
    for rank in range(4):
        steps = []
        for step in range(4):
            took = collected * MS if rank == 1 and step == 0 else 0
            phases = {"forward": 10 * MS + took, "backward_tail": 0 if rank == 1 else tail * MS if step == 0 else 0}
            gc_ns = took if timed or rank == 3 else None
            steps.append(StepNote(4 * number + step, 20 * MS + tail * MS * (step == 0), phases, 0, False, gc_ns=gc_ns))
        found.append(gather_range(steps, number=number, on_device=on_device))
    return found


def test_it_is_over_when_the_rank_has_collected_nothing_for_long():
    detector = StragglerDetector("j", 4)
    first = [one for number in range(60) for one in detector.judge(rows(number, 80, tail=80), 1)]
    then = [one for number in range(60, 120) for one in detector.judge(rows(number, 0), 1)]
    assert [(one.late_rank, one.cause, one.ended) for one in first + then] == [(1, "gc", False), (1, "gc", True)]
    assert first[0].excess_ns == pytest.approx(20 * MS, rel=0.01)
    assert "garbage collector takes 20.0 ms a step longer" in first[0].evidence
    assert then[0].step < 4 * 80


@pytest.mark.parametrize(
    ("found", "more"),
    [
        (True, {"tail": 80}),
        (False, {"tail": 0}),
        (True, {"tail": 0, "on_device": True}),
        (False, {"tail": 80, "timed": False}),
    ],
    ids=["the others wait", "nobody waits", "not known on a device", "not timed on three ranks"],
)
def test_the_others_must_wait_for_it_where_that_is_seen(found, more):
    diagnosis = CollectionDiagnosis()
    said = [diagnosis.judge(rows(number, 80, **more), WAITS, OWN) for number in range(60)]
    assert (said[-1] is not None) == found
    assert set(OWN) < set(PHASES)
