"""The live ladder: what the totals' difference says, said now and then, and never before anything was calibrated."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pacecar.clock import NS_PER_SECOND
from pacecar.profiler.ranks.exchange.totals import TOTALS_WORDS, LedgerTotals, decode_totals, encode_totals, totals_of
from pacecar.profiler.ranks.what_if import STEPS_MIN, WHAT_IF_SECONDS, JobWhatIf, RankStretch, RankWhatIf, ladder_of
from pacecar.records import LEDGER_HEADINGS, Bound, Ledger, WhatIf
from pacecar.wire import decode_frame, encode_frame
from tests.kit.records import step_record

MS = 1_000_000


def ledger(*, compute=60, exposed=20, data=10, host=10, overlapped=5, scale=MS):
    return Ledger(
        wall_ns=(compute + exposed + data + host) * scale,
        compute_ns=compute * scale,
        exposed_communication_ns=exposed * scale,
        data_wait_ns=data * scale,
        host_bound_ns=host * scale,
        communication_ns=(exposed + overlapped) * scale,
        overlapped_communication_ns=overlapped * scale,
    )


def times(one, count):
    return sum([one] * count, Ledger(wall_ns=0))


def steps_of(one, count, *, source="estimate", age=7, rank=0, calibrated_from=0):
    for step in range(count):
        yield step_record(
            rank, step, one.wall_ns, ended_wall_ns=step * one.wall_ns, ledger=one, source=source,
            calibration_age_steps=age if step >= calibrated_from else None,
            totals=times(one, step + 1), total_steps=step + 1,
        )  # fmt: skip


def rungs_of(said):
    return {rung.name: (rung.step_ns, round(rung.gain_ratio, 6)) for rung in said.rungs}


def test_the_scripts_own_code_between_steps_is_no_launch_gap() -> None:
    """A simulator that the loop calls is host-bound, and no CUDA graph ends it."""
    simulated = structs.replace(ledger(host=140), loop_host_ns=135 * MS)
    said = ladder_of(
        [RankStretch(simulated, 1)], job="rl", of_rank=None, step=1, wall_ns=1, straggler_saved_ns=None, age_steps=0
    )
    assert rungs_of(said)["launch_gaps_gone"][0] == simulated.wall_ns - 5 * MS
    assert rungs_of(said)["all"][0] == simulated.wall_ns - (20 + 10 + 5) * MS
    totals = LedgerTotals(structs.replace(simulated, data_wait_ns=None, wall_ns=simulated.wall_ns - 10 * MS), 3, 2, 1)
    assert decode_totals(encode_totals(totals)) == totals


def test_a_rank_says_its_ladder_every_so_many_seconds_from_the_mean_of_the_steps_since():
    said = []
    ladder = RankWhatIf(said.append, is_job=False)
    for record in steps_of(ledger(), 250):  # 100 ms a step
        ladder.put(record)
    assert [one.step for one in said] == [100, 200]
    assert (said[0].of_rank, said[0].steps, said[0].pace_ns) == (0, 100, 100 * MS)
    assert (said[0].source, said[0].calibration_age_steps) == ("estimate", 7)
    assert rungs_of(said[0]) == {
        "communication_hidden": (80 * MS, 0.2),
        "data_free": (90 * MS, 0.1),
        "launch_gaps_gone": (90 * MS, 0.1),
        "all": (60 * MS, 0.4),
    }
    assert decode_frame(encode_frame(said[0])) == said[0]


def test_a_rank_that_is_the_whole_job_speaks_for_it():
    said = []
    ladder = RankWhatIf(said.append, is_job=True)
    for record in steps_of(ledger(), 102, source="exact"):
        ladder.put(record)
    assert [one.of_rank for one in said] == [None]


def test_nothing_is_said_before_the_first_calibration_and_its_steps_do_not_count():
    said = []
    ladder = RankWhatIf(said.append, is_job=False)
    for record in steps_of(ledger(), 149, calibrated_from=50):
        ladder.put(record)
    assert said == []
    for record in steps_of(ledger(), 152, calibrated_from=50):
        ladder.put(record)
    assert [(one.step, one.steps) for one in said] == [(150, 100)]


def test_steps_of_a_minute_bring_a_ladder_once_there_are_enough():
    said = []
    ladder = RankWhatIf(said.append, is_job=False)
    for record in steps_of(ledger(scale=600 * MS), STEPS_MIN + 2):
        ladder.put(record)
    assert [one.steps for one in said] == [STEPS_MIN]


def heard(ranks, excesses=()):
    said = []
    ladder = JobWhatIf("j", said.append)
    for now, count in ((0, 1), (round(WHAT_IF_SECONDS * NS_PER_SECOND), 101)):
        totals = [None if one is None else LedgerTotals(times(one, count), count, count, 3) for one in ranks]
        ladder.record(totals, now_ns=now, wall_ns=1, excesses_ns=excesses)
    return said


def test_a_job_goes_at_the_pace_of_the_rank_that_is_slowest_after_the_change():
    quick, late = ledger(compute=50, exposed=40, data=0, host=10), ledger(compute=50, exposed=0, data=40, host=10)
    (said,) = heard([quick, late], excesses=[40 * MS])
    assert (said.of_rank, said.pace_ns, said.steps, said.calibration_age_steps) == (None, 100 * MS, 100, 3)
    # Hiding communication wins nothing: the late rank has none.  Its neighbour's communication is waiting for it.
    assert rungs_of(said) == {
        "communication_hidden": (100 * MS, 0.0),
        "data_free": (100 * MS, 0.0),
        "straggler_median": (60 * MS, 0.4),
        "launch_gaps_gone": (90 * MS, 0.1),
        "all": (50 * MS, 0.5),
    }
    assert {rung.name: rung.bound for rung in said.rungs}["straggler_median"] is Bound.NEXT_RANK


def test_waiting_for_a_late_rank_is_no_work_of_the_link():
    """All but the last arrive early and are 'communicating' while they wait; the link needs what the last one sees."""
    (said,) = heard([ledger(compute=10, exposed=80), ledger(compute=60, exposed=30)])
    assert rungs_of(said)["communication_hidden"][0] == 80 * MS, "the slower rank's compute, data and host"
    assert rungs_of(said)["all"][0] == 60 * MS


def test_nobody_late_is_a_rung_of_no_gain_and_an_uncalibrated_rank_no_ladder():
    (said,) = heard([ledger(), ledger()])
    assert rungs_of(said)["straggler_median"] == (100 * MS, 0.0)
    assert heard([ledger(), None]) == []


@st.composite
def stretches(draw):
    parts = {f"{heading}_ns": draw(st.integers(0, 10**9)) for heading in LEDGER_HEADINGS}
    overlapped = draw(st.integers(0, parts["compute_ns"]))
    whole = Ledger(
        wall_ns=sum(parts.values()),
        communication_ns=overlapped + parts["exposed_communication_ns"],
        overlapped_communication_ns=overlapped,
        **parts,
    )
    return RankStretch(whole, draw(st.integers(1, 50)))


@given(st.lists(stretches(), min_size=1, max_size=5), st.none() | st.floats(0, 1e10))
def test_every_rung_is_between_nothing_and_the_pace(ranks, saved):
    said = ladder_of(ranks, job="j", of_rank=None, step=1, wall_ns=1, straggler_saved_ns=saved, age_steps=1)
    if said is None:
        assert all(one.ledger.wall_ns == 0 for one in ranks)
        return
    for rung in said.rungs:
        assert 0 <= rung.step_ns <= said.pace_ns + 1
        assert 0 <= rung.gain_ratio <= 1


@given(stretches(), st.integers(0, 10**6), st.integers(0, 10**4))
def test_totals_survive_their_journey(stretch, step, age):
    totals = LedgerTotals(stretch.ledger, stretch.steps, step, age)
    words = encode_totals(totals)
    assert len(words) == TOTALS_WORDS
    assert decode_totals(words) == totals


def test_totals_that_are_not_known_are_missing_and_broken_ones_refused():
    assert decode_totals(encode_totals(None)) is None
    assert totals_of(None) is None
    (uncalibrated,) = steps_of(ledger(), 1, calibrated_from=1)
    assert totals_of(uncalibrated) is None
    words = encode_totals(LedgerTotals(ledger(), 1, 1, 1))
    with pytest.raises(ValueError, match="sum to"):
        decode_totals([-5, *words[1:]])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        decode_totals(words[1:])


def test_the_ladder_loads_neither_numpy_nor_torch():
    code = (
        "import sys, pacecar.profiler.ledger.what_if_bounds; assert not {'numpy', 'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_ladder_is_frozen_and_small_on_the_wire():
    (said,) = heard([ledger(), ledger()])
    assert isinstance(said, WhatIf)
    assert len(encode_frame(said)) < 1024
