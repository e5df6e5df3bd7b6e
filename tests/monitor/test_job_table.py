"""The job table keeps the latest records of each rank, in bounded memory, and forgets jobs in time.

What one of every record becomes on the page is in test_golden.
"""

from contextlib import suppress
from typing import get_args, get_type_hints

import msgspec
import pytest

from pacecar.monitor.export.job_samples import TUNER_STATES, job_samples
from pacecar.monitor.histogram import BOUNDS_NS
from pacecar.monitor.jobs.state import DaemonState
from pacecar.monitor.jobs.tracked_job import RECENT_MAX, TALLIES_MAX
from pacecar.records import (
    DeviceMemory,
    EstimateCheck,
    Goodbye,
    Ledger,
    TunerStatus,
    Vitals,
)
from pacecar.records.job_identity import JobKey
from pacecar.wire import FrameError, Refusal
from tests.kit import records
from tests.kit.own_samples import values_of
from tests.monitor.conftest import told

SECOND = 1_000_000_000


@pytest.fixture
def board(clock):
    return DaemonState(clock, jobs_max=2, ranks_max=3, job_forget_seconds=60)


def series(board):
    return {(s.metric.removeprefix("pacecar_"), *told(s)): s.value for s in job_samples(board.jobs())}


def decision(number, knob="bucket_bytes", gain=0.1):
    return records.decision(number, job="run-7", knob=knob, expected_gain_ratio=gain)


def verdict(number, outcome="kept", gain=0.08):
    return records.verdict(number, job="run-7", outcome=outcome, measured_gain_ratio=gain)


def test_a_knob_whose_value_is_a_word_has_no_series(board, make_hello, make_step):
    board.record(make_step(), hello=make_hello(), uid=1, owner=1)
    assert {key[3] for key in series(board) if key[0] == "knob_value"} == {"bucket_bytes"}


def test_a_ledger_that_is_not_calibrated_says_so_and_why_and_a_calibrated_one_says_nothing(
    board, make_hello, make_step
):
    board.record(make_step(), hello=make_hello(), uid=1, owner=1)
    names = {key[0] for key in series(board)}
    assert names.isdisjoint({"job_ledger_uncalibrated", "job_window_predicted_seconds"})
    step = make_step(calibration_age_steps=None, uncalibrated="price", window_price_ns=0)
    board.record(step, hello=make_hello(), uid=1, owner=1)
    read = series(board)
    assert read[("job_ledger_uncalibrated", "run-7", "0", "price")] == 1
    assert read[("job_window_predicted_seconds", "run-7", "0")] == 0


def test_what_the_hook_could_not_measure_is_absent_and_zero_is_not(board, make_hello, make_step):
    hello = make_hello()
    step = make_step(
        total_samples=None, total_tokens=0, micro_batches=None, calibration_age_steps=None, forward_ns=None,
        optimizer_ns=0, total_steps=0,
    )  # fmt: skip
    board.record(step, hello=hello, uid=1, owner=1)
    read = series(board)
    names = {key[0] for key in read}
    assert names.isdisjoint({"job_samples_total", "job_micro_batches", "job_ledger_calibration_age_steps"})
    assert read[("job_tokens_total", "run-7", "0")] == 0
    assert read[("job_steps_total", "run-7", "0")] == 0
    assert read[("job_step_phase_duration_seconds", "run-7", "0", "optimizer")] == 0
    assert ("job_step_phase_duration_seconds", "run-7", "0", "forward") not in read


def vitals(**changes):
    given = {
        "job": "run-7", "rank": 0, "step": 41, "ended_wall_ns": 1, "steps": 20, "wall_ns": 4_000_000_000,
        "samples": None, "tokens": None,
    }  # fmt: skip
    return Vitals(**(given | changes))


def vitals_series(board, make_hello, record):
    hello = make_hello()
    board.record(record, hello=hello, uid=1, owner=1)
    return {name: value for (name, *_), value in series(board).items() if name.startswith(VITAL)}


VITAL = ("job_flops", "job_step_flops", "job_model", "job_device", "job_mfu", "job_memory", "job_checkpoint")


def test_vitals_that_are_unknown_are_absent_and_zero_is_not(board, make_hello):
    assert vitals_series(board, make_hello, vitals(flops_reason="a custom operator")) == {
        "job_checkpoints_total": 0,
        "job_checkpoint_seconds_total": 0,
    }
    zero = vitals(
        flops_source="given", step_flops=0, flops=0, flops_steps=1, flops_wall_ns=5, peak_flops_per_second=9,
        memory=DeviceMemory(allocated_bytes=0, reserved_bytes=8, total_allocation_retries=0),
    )  # fmt: skip
    read = vitals_series(board, make_hello, zero)
    assert (read["job_step_flops"], read["job_model_flops_per_second"], read["job_mfu_ratio"]) == (0, 0.0, 0.0)
    assert (read["job_memory_allocated_bytes"], read["job_memory_fragmentation_ratio"]) == (0, 1.0)
    assert read["job_memory_allocation_retries_total"] == 0
    assert "job_memory_out_of_memory_total" not in read


def test_decisions_and_verdicts_are_counted_and_the_last_forecast_is_judged(board, make_hello):
    hello = make_hello()
    for record in (decision(1), decision(2, gain=None), verdict(1), verdict(2, "rolled_back", -0.02)):
        board.record(record, hello=hello, uid=1, owner=1)
    read = {key[0]: value for key, value in series(board).items() if key[2:] == ("bucket_bytes",)}
    assert read == {
        "tuner_expected_gain_ratio": 0.1,
        "tuner_measured_gain_ratio": -0.02,
        "tuner_forecast_error_ratio": pytest.approx(0.02),  # the first one's: the second had no forecast
    }
    counts = {key[2:]: value for key, value in series(board).items() if len(key) == 4 and key[0].startswith("tuner_")}
    assert counts == {("bucket_bytes", "trial"): 2, ("bucket_bytes", "kept"): 1, ("bucket_bytes", "rolled_back"): 1}


def test_every_state_that_a_tuner_may_send_has_its_series():
    assert get_args(get_type_hints(TunerStatus)["state"]) == TUNER_STATES


def test_a_silent_job_is_forgotten_with_its_series_and_comes_back_with_its_next_record(
    board, clock, make_hello, make_step
):
    hello = make_hello()
    board.record(hello, hello=hello, uid=1, owner=1)
    clock.advance(59 * SECOND)
    assert series(board)
    board.record(make_step(), hello=hello, uid=1, owner=1)
    clock.advance(59 * SECOND)
    assert series(board)[("job_last_record_age_seconds", "run-7", "0")] == 59 * SECOND
    clock.advance(SECOND)
    assert series(board) == {}
    board.record(make_step(), hello=hello, uid=1, owner=1)
    assert ("job_steps_total", "run-7", "0") in series(board)


def test_the_counters_of_a_job_that_ended_hold_the_steps_after_its_last_record(board, make_hello, make_step):
    hello, step = make_hello(), make_step()
    wall_ns = step.totals.wall_ns + 400
    totals = msgspec.structs.replace(step.totals, wall_ns=wall_ns, compute_ns=step.totals.compute_ns + 400)
    fields = {"job": "run-7", "rank": 0, "reason": "done", "wall_ns": 1}
    for bye in (Goodbye(**fields), Goodbye(**fields, totals=totals, total_steps=50, total_samples=1600)):
        for record in (hello, step, bye):
            board.record(record, hello=hello, uid=1, owner=1)
    read = series(board)
    assert read[("job_steps_total", "run-7", "0")] == 50
    assert read[("job_samples_total", "run-7", "0")] == 1600
    assert read[("job_tokens_total", "run-7", "0")] == step.total_tokens
    assert read[("job_step_wall_seconds_total", "run-7", "0")] == wall_ns
    for few, short_ns in ((1, wall_ns), (99, 1)):
        bye = Goodbye(**fields, totals=Ledger(wall_ns=short_ns, compute_ns=short_ns), total_steps=few)
        board.record(bye, hello=hello, uid=1, owner=1)
        assert series(board)[("job_steps_total", "run-7", "0")] == 50, "a counter never falls"


def refusal_of(board, record, hello, uid=1, owner=9):
    with pytest.raises(FrameError) as caught:
        board.record(record, hello=hello, uid=uid, owner=owner)
    return caught.value.refusal


def test_jobs_and_ranks_are_bounded_and_a_finished_job_makes_room(board, make_hello):
    for job in ("a", "b"):
        hello = make_hello(job=job)
        board.record(hello, hello=hello, uid=1, owner=1)
    late = make_hello(job="c")
    assert refusal_of(board, late, late) is Refusal.LIMIT
    board.record(Goodbye(job="a", rank=0, reason="done", wall_ns=1), hello=make_hello(job="a"), uid=1, owner=1)
    board.record(late, hello=late, uid=1, owner=2)
    assert [job.job for job in board.jobs()] == ["b", "c"]
    second = make_hello(job="c", rank=1)
    board.record(second, hello=second, uid=1, owner=3)
    third = make_hello(job="b", rank=1)
    assert refusal_of(board, third, third) is Refusal.LIMIT


def test_another_users_job_is_not_to_be_spoken_for(board, make_hello, make_step):
    hello = make_hello()
    board.record(hello, hello=hello, uid=1000, owner=1)
    assert refusal_of(board, make_hello(rank=1), make_hello(rank=1), uid=1001) is Refusal.IDENTITY
    assert refusal_of(board, make_step(), hello, uid=1001) is Refusal.IDENTITY


def test_the_newer_connection_speaks_for_a_rank_and_the_older_ones_end_does_not_disconnect_it(
    board, make_hello, make_step
):
    hello = make_hello()
    board.record(hello, hello=hello, uid=1, owner=1)
    board.record(hello, hello=hello, uid=1, owner=2)
    assert refusal_of(board, make_step(), hello, owner=1) is Refusal.IDENTITY
    assert not board.leave(hello, 1)
    assert board.jobs()[0].ranks[0].connected
    assert board.leave(hello, 2)
    assert not board.jobs()[0].ranks[0].connected


def test_a_reconnect_keeps_what_the_rank_said_and_a_new_attach_does_not(board, make_hello, make_step):
    hello = make_hello()
    for record in (hello, make_step(), hello):
        board.record(record, hello=hello, uid=1, owner=1)
    assert board.jobs()[0].ranks[0].step is not None
    again = make_hello(started_wall_ns=1)
    board.record(again, hello=again, uid=1, owner=2)
    assert board.jobs()[0].ranks[0].step is None


def test_decisions_and_their_kinds_are_bounded(board, make_hello):
    hello = make_hello()
    for number in range(TALLIES_MAX + 50):
        board.record(decision(number, knob=f"knob-{number}"), hello=hello, uid=1, owner=1)
    (job,) = board.jobs()
    assert len(job.decisions) == RECENT_MAX
    assert job.decisions[-1].decision == TALLIES_MAX + 49
    assert len(job.decision_tallies) == TALLIES_MAX
    assert len(job.expected_gain) == TALLIES_MAX


def test_an_estimate_that_was_right_has_an_error_of_zero_and_no_bias_where_none_is_known(board, make_hello):
    exact = Ledger(wall_ns=100, compute_ns=60, host_bound_ns=40)
    check = EstimateCheck(
        job="run-7", rank=0, step=41, ended_wall_ns=1, exact=exact, calibration_age_steps=9, is_own_setting=True,
        estimate=exact, windows=1, slowdown_ns=None,
    )  # fmt: skip
    board.record(check, hello=make_hello(), uid=1, owner=1)
    read = series(board)
    assert read[("job_estimate_error_ratio", "run-7", "0")] == 0.0
    assert ("job_estimate_bias_limit_ratio", "run-7", "0") not in read


def ran(seconds, steps):
    wall = round(seconds * SECOND)
    return {"totals": Ledger(wall_ns=wall, unknown_ns=wall), "total_steps": steps, "step": steps - 1}


def test_the_ranks_meet_a_second_ahead_of_the_furthest_at_the_fastest_pace_seen(board, clock, make_hello, make_step):
    hellos = [make_hello(rank=rank) for rank in (0, 1)]
    for owner, (hello, steps) in enumerate(zip(hellos, (98, 101), strict=True)):
        board.record(hello, hello=hello, uid=1, owner=owner)
        step = make_step(rank=hello.rank, wall_ns=5 * SECOND, **ran(steps / 20, steps))  # a checkpoint of 5 s was last
        board.record(step, hello=hello, uid=1, owner=owner)
    assert board.rank_steps(JobKey("run-7", "")) == (100, 122, 50_000_000)
    clock.advance(SECOND // 2)
    assert board.rank_steps(JobKey("run-7", "")).ahead == 132, "half a second of steps have gone by since"
    clock.advance(3600 * SECOND)
    assert board.rank_steps(JobKey("run-7", "")).ahead == 142, (
        "a job that rests for an hour does not meet an hour later"
    )
    board.leave(hellos[1], 1)
    assert board.rank_steps(JobKey("run-7", "")).at == 97, "who is gone meets nobody"


def test_of_a_job_without_steps_no_meeting_is_known(board, make_hello):
    hello = make_hello()
    board.record(hello, hello=hello, uid=1, owner=1)
    assert board.rank_steps(JobKey("run-7", "")) == board.rank_steps(JobKey("nobody", "")) == (None, 0, None)


def test_ranks_that_find_no_room_are_counted_once_each(board, make_hello, make_step):
    """The board of this test has room for 2 jobs and 3 ranks; all of them run."""

    def speak(job, rank, *records):
        hello = make_hello(job=job, rank=rank, world_size=9)
        for record in (hello, *records):
            with suppress(FrameError):
                board.record(record, hello=hello, uid=1, owner=rank)

    speak("a", 0)
    speak("b", 0)
    speak("c", 0, make_step(job="c"), make_step(job="c"))
    speak("a", 1)
    speak("a", 2, make_step(rank=2, job="a"))
    speak("a", 3)
    assert values_of(board, "pacecar_inbox_left_out_total") == {"job": 1, "rank": 2}


def test_the_pace_of_a_job_is_its_latest_step_and_only_while_it_runs(board, clock, make_hello, make_step):
    hellos = [make_hello(rank=rank) for rank in (0, 1)]
    for hello in hellos:
        board.record(hello, hello=hello, uid=1, owner=hello.rank)
    assert board.paces() == [], "no step yet"
    board.record(make_step(), hello=hellos[0], uid=1, owner=0)
    clock.advance(5 * SECOND)
    board.record(make_step(rank=1, wall_ns=9), hello=hellos[1], uid=1, owner=1)
    clock.advance(2 * SECOND)
    assert [tuple(pace) for pace in board.paces()] == [("run-7", 2 * SECOND, 9, 1)]
    for hello in hellos:
        board.leave(hello, hello.rank)
    assert board.paces() == []


def test_steps_of_all_ranks_of_a_job_are_in_one_distribution_and_a_new_launch_begins_anew(board, make_hello, make_step):
    def distribution(launch):
        return series(board).get(("job_step_duration_distribution_seconds", "run-7", launch))

    hellos = [make_hello(rank=rank, launch="a") for rank in (0, 1)]
    for owner, hello in enumerate(hellos):
        board.record(hello, hello=hello, uid=1, owner=owner)
    assert distribution("a") is None
    for owner, wall_ns in ((0, SECOND // 2), (1, SECOND), (1, 3 * SECOND)):
        record = make_step(rank=hellos[owner].rank, wall_ns=wall_ns)
        board.record(record, hello=hellos[owner], uid=1, owner=owner)
    found = distribution("a")
    assert (found.count, found.sum_ns) == (3, 4.5 * SECOND)
    assert dict(zip(BOUNDS_NS, found.below, strict=True))[SECOND] == 2
    for owner, hello in enumerate(hellos):
        board.leave(hello, owner)
    again = make_hello(launch="b", pid=5)
    for record in (again, make_step()):
        board.record(record, hello=again, uid=1, owner=9)
    assert distribution("a") is None
    assert distribution("b").count == 1
