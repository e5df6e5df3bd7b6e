"""The live ladder: what the totals' difference says, said now and then, and never before anything was calibrated."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pacecar.clock import NS_PER_SECOND
from pacecar.profiler.ranks.exchange.totals import TOTALS_WORDS, LedgerTotals, decode_totals, encode_totals, totals_of
from pacecar.profiler.ranks.what_if import STEPS_MIN, WHAT_IF_SECONDS, RankWhatIf, WhatIfSchedule, what_if_of
from pacecar.records import (
    LEDGER_HEADINGS,
    Bound,
    Cause,
    CollectiveSum,
    CollectiveWindow,
    Ledger,
    Rung,
    Straggler,
    WhatIf,
)
from pacecar.wire import decode_frame, encode_frame
from tests.kit.records import step_record

MS = 1_000_000
SENT = CollectiveSum(operation="send", count=1, duration_ns=1)


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


def since_none(of, steps):
    """Return a rank's totals before any step, and after `steps` steps whose ledgers sum to `of`."""
    return LedgerTotals(Ledger(wall_ns=0), 0, 0, 0), LedgerTotals(of, steps, steps, 0)


def rungs_of(said):
    return {rung.name: (rung.step_ns, round(rung.gain_ratio, 6)) for rung in said.rungs}


def test_the_scripts_own_code_between_steps_is_no_launch_gap() -> None:
    """A simulator that the loop calls is host-bound, and no CUDA graph ends it."""
    simulated = structs.replace(ledger(host=140), loop_host_ns=135 * MS)
    said = what_if_of([since_none(simulated, 1)], job="rl", of_rank=None, step=1, wall_ns=1, age_steps=0)
    assert rungs_of(said)["at_most_launch_gaps_gone"][0] == simulated.wall_ns - 5 * MS
    assert rungs_of(said)["at_most_all"][0] == simulated.wall_ns - (20 + 10 + 5) * MS
    totals = LedgerTotals(structs.replace(simulated, data_wait_ns=None, wall_ns=simulated.wall_ns - 10 * MS), 3, 2, 1)
    assert decode_totals(encode_totals(totals)) == totals


def test_a_rank_says_its_ladder_every_so_many_seconds_from_the_mean_of_the_steps_since():
    said = []
    ladder = RankWhatIf("j", 0, said.append, is_job=False)
    for record in steps_of(ledger(), 250):  # 100 ms a step
        ladder.put(record)
    assert [one.step for one in said] == [100, 200]
    assert (said[0].of_rank, said[0].steps, said[0].pace_ns) == (0, 100, 100 * MS)
    assert (said[0].source, said[0].calibration_age_steps) == ("estimate", 7)
    assert rungs_of(said[0]) == {
        "at_most_communication_hidden": (80 * MS, 0.2),
        "at_most_data_free": (90 * MS, 0.1),
        "at_most_launch_gaps_gone": (90 * MS, 0.1),
        "at_most_all": (60 * MS, 0.4),
    }
    assert decode_frame(encode_frame(said[0])) == said[0]


def test_a_rank_that_is_the_whole_job_speaks_for_it():
    said = []
    ladder = RankWhatIf("j", 0, said.append, is_job=True)
    for record in steps_of(ledger(), 102, source="exact"):
        ladder.put(record)
    assert [one.of_rank for one in said] == [None]


def test_nothing_is_said_before_the_first_calibration_and_its_steps_do_not_count():
    said = []
    ladder = RankWhatIf("j", 0, said.append, is_job=False)
    for record in steps_of(ledger(), 149, calibrated_from=50):
        ladder.put(record)
    assert said == []
    for record in steps_of(ledger(), 152, calibrated_from=50):
        ladder.put(record)
    assert [(one.step, one.steps) for one in said] == [(150, 100)]


def test_steps_of_a_minute_bring_a_ladder_once_there_are_enough():
    said = []
    ladder = RankWhatIf("j", 0, said.append, is_job=False)
    for record in steps_of(ledger(scale=600 * MS), STEPS_MIN + 2):
        ladder.put(record)
    assert [one.steps for one in said] == [STEPS_MIN]


def late(excess, cause=Cause.DATA_WAIT):
    return Straggler(
        job="j",
        late_rank=0,
        cause=cause,
        phase="backward",
        since_step=1,
        step=2,
        wall_ns=1,
        excess_ns=excess,
        evidence="",
    )


def heard(ranks, *stragglers, is_pipeline=False):
    said = []
    ladder = WhatIfSchedule("j", None, said.append, lambda: is_pipeline)
    for now, count in ((0, 1), (round(WHAT_IF_SECONDS * NS_PER_SECOND), 101)):
        totals = [None if one is None else LedgerTotals(times(one, count), count, count, 3) for one in ranks]
        ladder.record(totals, now_ns=now, wall_ns=1, stragglers=stragglers)
    return said


def test_a_job_goes_at_the_pace_of_the_rank_that_is_slowest_after_the_change():
    quick, slow = ledger(compute=50, exposed=40, data=0, host=10), ledger(compute=50, exposed=0, data=40, host=10)
    (said,) = heard([quick, slow], late(40 * MS))
    assert (said.of_rank, said.pace_ns, said.steps, said.calibration_age_steps) == (None, 100 * MS, 100, 3)
    # Hiding communication wins nothing: the late rank has none.  Its neighbour's communication is waiting for it.
    assert rungs_of(said) == {
        "at_most_communication_hidden": (100 * MS, 0.0),
        "at_most_data_free": (60 * MS, 0.4),  # then it waits no longer
        "at_most_straggler_median": (60 * MS, 0.4),
        "at_most_launch_gaps_gone": (90 * MS, 0.1),
        "at_most_all": (50 * MS, 0.5),
    }
    assert {rung.name: rung.bound for rung in said.rungs}["at_most_straggler_median"] is Bound.NEXT_RANK


@pytest.mark.parametrize(
    ("cause", "step"), [(Cause.DATA_WAIT, 60 * MS), (Cause.COMPUTE, 30 * MS), (Cause.CHECKPOINT, 30 * MS)]
)
def test_all_takes_the_excess_of_a_straggler_away_once(cause, step):
    """A wait for data is one of its headings; slow compute and a checkpoint are not."""
    slow, quick = ledger(compute=60, exposed=5, data=35, host=0), ledger(compute=30, exposed=70, data=0, host=0)
    (said,) = heard([slow, quick], late(35 * MS, cause))
    assert rungs_of(said)["at_most_all"][0] == step


def test_waiting_for_a_late_rank_is_no_work_of_the_link():
    """All but the last arrive early and are 'communicating' while they wait; the link needs what the last one sees."""
    (said,) = heard([ledger(compute=10, exposed=80), ledger(compute=60, exposed=30)])
    assert rungs_of(said)["at_most_communication_hidden"][0] == 80 * MS, "the slower rank's compute, data and host"
    assert rungs_of(said)["at_most_all"][0] == 60 * MS


def test_nobody_late_is_a_rung_of_no_gain_and_an_uncalibrated_rank_no_ladder():
    (said,) = heard([ledger(), ledger()])
    assert rungs_of(said)["at_most_straggler_median"] == (100 * MS, 0.0)
    assert heard([ledger(), None]) == []


def test_the_age_of_the_bounds_counts_from_the_step_that_they_name():
    """What rank 1 sent is 40 steps ahead: its window was 47 steps before its own latest step, 7 before this one."""
    said = []
    ladder = WhatIfSchedule("j", None, said.append, lambda: False)
    for now, count in ((0, 1), (round(WHAT_IF_SECONDS * NS_PER_SECOND), 101)):
        ranks = [(count, 3), (count + 40, 47)]
        totals = [LedgerTotals(times(ledger(), count), count, step, age) for step, age in ranks]
        ladder.record(totals, now_ns=now, wall_ns=1)
    assert [(one.step, one.calibration_age_steps) for one in said] == [(101, 7)]


def test_a_pipeline_has_no_bound_for_communication():
    """Its ranks communicate while they wait for the work of others, which no faster link shortens."""
    (said,) = heard([ledger(), ledger()], is_pipeline=True)
    assert list(rungs_of(said)) == ["at_most_data_free", "at_most_straggler_median", "at_most_launch_gaps_gone"]
    of_rank = []
    rank = RankWhatIf("j", 0, of_rank.append, is_job=False)
    rank.put(CollectiveWindow(job="j", rank=0, step=0, ended_wall_ns=1, sums=(SENT,)))
    for record in steps_of(ledger(), 102):
        rank.put(record)
    assert list(rungs_of(of_rank[0])) == ["at_most_data_free", "at_most_launch_gaps_gone"]


def test_bounds_of_older_recordings_and_hooks_get_their_present_names():
    old = b'{"name":"data_free","step_ns":1,"gain_ratio":0.5,"bound":"rest"}'
    assert msgspec.json.decode(old, type=Rung).name == "at_most_data_free"


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
    return since_none(whole, draw(st.integers(1, 50)))


@pytest.mark.slow
@given(
    st.lists(stretches(), min_size=1, max_size=5),
    st.none() | st.lists(st.builds(late, st.integers(0, 10**10), st.sampled_from(Cause)), max_size=3),
    st.booleans(),
)
def test_every_rung_is_between_nothing_and_the_pace(ranks, stragglers, is_pipeline):
    said = what_if_of(
        ranks, job="j", of_rank=None, step=1, wall_ns=1, age_steps=1, stragglers=stragglers, is_pipeline=is_pipeline
    )
    if said is None:
        assert all(after.ledger.wall_ns == 0 for _, after in ranks)
        return
    for rung in said.rungs:
        assert 0 <= rung.step_ns <= said.pace_ns + 1
        assert 0 <= rung.gain_ratio <= 1


@pytest.mark.slow
@given(stretches(), st.integers(0, 10**6), st.integers(0, 10**4))
def test_totals_survive_their_journey(stretch, step, age):
    totals = stretch[1]._replace(step=step, age_steps=age)
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


@pytest.mark.slow
def test_the_ladder_loads_neither_numpy_nor_torch():
    code = "import sys, pacecar.ledger.what_if_bounds; assert not {'numpy', 'torch', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_ladder_is_frozen_and_small_on_the_wire():
    (said,) = heard([ledger(), ledger()])
    assert isinstance(said, WhatIf)
    assert len(encode_frame(said)) < 1024
