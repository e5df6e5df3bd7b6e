"""What the estimate would have said is asked before the window is learned from; its distance is a share of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pacecar.profiler.timing.step_timer import TimedStep
from pacecar.profiler.windows.estimate import Calibrations
from pacecar.profiler.windows.estimate_check import RECENT_STEPS, EstimateChecker
from pacecar.profiler.windows.window_reader import Measurement
from pacecar.records import LEDGER_HEADINGS, EstimateCheck, Knobs, Ledger
from tests.kit.records import job_hello

HELLO = job_hello(rank=3, world_size=4)


def timed(forward=60, tail=30, wall=100, micro_batches=1):
    phases = {"forward": forward, "backward_tail": tail}
    return TimedStep(start_ns=0, end_ns=wall, phases=phases, marks={}, micro_batches=micro_batches, overhead_ns=0)


def measured(compute=60, exposed=30, host=10):
    """The forward computes, the tail communicates, the rest is the host's."""
    phases = {
        "forward": Ledger(wall_ns=60, compute_ns=compute, host_bound_ns=60 - compute),
        "backward_tail": Ledger(wall_ns=exposed, exposed_communication_ns=exposed, communication_ns=exposed),
        "rest": Ledger(wall_ns=host, host_bound_ns=host),
    }
    total = Ledger(wall_ns=0)
    for ledger in phases.values():
        total = total + ledger
    total = structs.replace(total, loop_host_ns=host)
    return Measurement(ledger=total, phases=phases, row_count=9)


@pytest.fixture
def checker():
    return EstimateChecker(HELLO, Calibrations())


def test_the_first_window_has_nothing_to_be_checked_against(checker):
    assert checker.learn(5, Knobs(), timed(), measured(), 9) is None


def test_a_window_is_compared_with_what_was_known_before_it(checker):
    checker.learn(5, Knobs(), timed(), measured(), 9)
    check = checker.learn(12, Knobs(), timed(), measured(compute=40), 10)
    assert (check.job, check.rank, check.step, check.calibration_age_steps, check.windows) == ("j", 3, 12, 7, 1)
    assert check.exact == measured(compute=40).ledger
    assert check.estimate == measured(compute=60).ledger
    assert check.is_own_setting
    assert check.error_ratio == pytest.approx(0.2)
    assert check.heading_errors_ns == dict.fromkeys(LEDGER_HEADINGS, 0) | {"compute": 20, "host_bound": -20}


def test_an_estimate_by_another_settings_windows_says_so(checker):
    checker.learn(5, Knobs(0, {"k": 1}), timed(), measured(), 9)
    assert not checker.learn(6, Knobs(1, {"k": 2}), timed(), measured(), 9).is_own_setting


def test_a_phase_that_the_profiler_stretched_bounds_the_bias(checker):
    for _ in range(9):
        checker.undisturbed(timed(), Knobs())
    checker.learn(5, Knobs(), timed(), measured(), 9)
    slowed = timed(forward=80, tail=20, wall=110)
    check = checker.learn(9, Knobs(), slowed, measured(exposed=40), 9)
    assert check.slowdown_ns == 20, "what a shorter tail gained is nobody's excuse"
    assert check.bias_limit_ratio == pytest.approx(20 / 110)


def test_usual_is_of_the_same_knobs_and_as_many_micro_batches(checker):
    for _ in range(9):
        checker.undisturbed(timed(micro_batches=2), Knobs())
    checker.learn(5, Knobs(), timed(), measured(), 9)
    assert checker.learn(6, Knobs(), timed(micro_batches=1), measured(), 9).bias_limit_ratio is None
    assert checker.learn(7, Knobs(), timed(micro_batches=2), measured(), 9).bias_limit_ratio == 0.0
    checker.undisturbed(timed(micro_batches=2), Knobs(1))
    assert checker.learn(8, Knobs(1), timed(micro_batches=2), measured(), 9).bias_limit_ratio is None


def test_what_is_kept_is_bounded(checker):
    for _ in range(10 * RECENT_STEPS):
        checker.undisturbed(timed(), Knobs())
    assert len(checker._recent) == RECENT_STEPS


parts = st.lists(st.integers(0, 10**9), min_size=len(LEDGER_HEADINGS), max_size=len(LEDGER_HEADINGS))


@pytest.mark.slow
@given(parts, parts)
def test_the_error_is_a_distance_between_none_and_all_of_the_step(one, other):
    def ledger(values, wall):
        values = [value * wall // max(1, sum(values)) for value in values]
        values[-1] += wall - sum(values)
        named = dict(zip((f"{heading}_ns" for heading in LEDGER_HEADINGS), values, strict=True))
        return Ledger(wall_ns=wall, communication_ns=named["exposed_communication_ns"], **named)

    a, b = ledger(one, 10**6), ledger(other, 10**6)

    def check(exact, estimate):
        return EstimateCheck(job="j", rank=0, step=1, ended_wall_ns=0, exact=exact, estimate=estimate,
                             calibration_age_steps=1, is_own_setting=True, windows=1)  # fmt: skip

    assert check(a, a).error_ratio == 0.0
    assert check(a, b).error_ratio == check(b, a).error_ratio <= 1.0
    assert sum(check(a, b).heading_errors_ns.values()) == 0


@pytest.mark.slow
def test_a_running_job_checks_its_estimate_at_every_window_after_the_first(job, sink, attach):
    hook = attach(job)
    job.run(40)
    hook.close()
    exact = [r.step for r in sink.steps if r.source == "exact"]
    checks = [r for r in sink.records if isinstance(r, EstimateCheck)]
    assert len(exact) > 3
    assert [check.step for check in checks] == exact[1:]
    by_step = {r.step: r for r in sink.steps}
    for check in checks:
        assert check.exact == by_step[check.step].ledger
        assert check.estimate.wall_ns == check.exact.wall_ns
        assert 0.0 <= check.error_ratio <= 1.0
    assert checks[-1].windows > 1
