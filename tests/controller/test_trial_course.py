"""The course of a trial: what is judged, what it asks for, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from pacecar.controller.observation import Observation
from pacecar.controller.trial import (
    PAIRS_MAX,
    SETTLE_STEPS,
    TRIAL_STEPS_MAX,
    WAIT_STEPS_MAX,
    WINDOW_STEPS,
    Cause,
    Trial,
    TrialEnd,
)

OLD, NEW = {"micro_batch": 4}, {"micro_batch": 8}
BASE_NS = 200_000_000
WIGGLE = (1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 1.0)


def _trial(**changes: object) -> Trial:
    arguments: dict[str, object] = {
        "incumbent": OLD,
        "candidate": NEW,
        "opening": [math.log(BASE_NS * w) for w in WIGGLE],
        "nulls": (0.004, -0.006, 0.005, -0.003),
        "typical": math.log(BASE_NS),
        "dead_band": 0.01,
        "false_accept_rate": 0.05,
        "latency_steps": 6,
        **changes,
    }
    return Trial(**arguments)  # type: ignore[arg-type]


def _step(step: int, values: dict[str, int], pace_ns: float, *, profiled: bool = False) -> Observation:
    return Observation(step=step, wall_ns=step, values=dict(values), pace_ns=int(pace_ns), profiled=profiled)


def _play(trial: Trial, ratio: float, *, latency: int = 6, transient: float = 1.0) -> tuple[TrialEnd, list[int]]:
    """Obey the trial `latency` steps later; NEW takes `ratio` of OLD's time.  Return its end and each step's value."""
    values, wishes, history = dict(OLD), {}, []
    since = 99
    for step in range(1, TRIAL_STEPS_MAX + 9):
        if (wish := wishes.get(step - latency)) is not None and wish != values:
            values, since = dict(wish), 0
        history.append(values["micro_batch"])
        slow = transient if since < SETTLE_STEPS else 1.0
        since += 1
        pace = BASE_NS * WIGGLE[step % 8] * (ratio if values == NEW else 1.0) * slow
        end = trial.observe(_step(step, values, pace))
        wishes[step] = trial.wanted
        if end is not None:
            return end, history
    raise AssertionError("the trial did not end")


def test_a_20_percent_gain_is_accepted_within_two_pairs_and_45_steps() -> None:
    end, history = _play(_trial(), 0.8)
    assert end.cause is Cause.ACCEPTED
    assert end.gain_ratio == pytest.approx(0.2, abs=0.02)
    assert len(history) <= 45


@pytest.mark.parametrize(("ratio", "cause"), [(1.5, Cause.DROPPED), (1.1, Cause.WORSE), (1.0, Cause.FUTILE)])
def test_a_setting_that_is_no_better_is_refused_for_the_right_reason(ratio: float, cause: Cause) -> None:
    end, _ = _play(_trial(), ratio)
    assert end.cause is cause


def test_a_setting_half_as_slow_again_is_left_after_two_judged_steps() -> None:
    end, history = _play(_trial(), 1.5)
    assert end.cause is Cause.DROPPED
    assert history.count(8) == SETTLE_STEPS + 2


def test_where_the_present_setting_spikes_too_two_slow_steps_do_not_drop_a_candidate() -> None:
    trial = _trial(slow_ratio=0.05)
    paces = [1.0, 1.0, 1.5, 1.5, 1.0, 1.0]
    ends = [trial.observe(_step(1 + i, NEW, BASE_NS * pace)) for i, pace in enumerate(paces)]
    assert ends == [None] * len(paces)


def test_settling_steps_are_not_judged() -> None:
    """A switch that makes its first two steps ten times slower changes no measured gain."""
    quiet, _ = _play(_trial(), 0.9)
    rough, _ = _play(_trial(), 0.9, transient=10.0)
    assert rough.gain_ratio == pytest.approx(quiet.gain_ratio)


def test_profiled_steps_are_not_judged() -> None:
    trial = _trial()
    for step in range(1, 60):
        assert trial.observe(_step(step, NEW, BASE_NS * 9, profiled=True)) is None
    assert trial.pairs == 0


def test_steps_in_foreign_values_are_not_judged() -> None:
    trial = _trial()
    for step in range(1, WAIT_STEPS_MAX):
        assert trial.observe(_step(step, {"micro_batch": 2}, BASE_NS * 9)) is None
    assert trial.pairs == 0


def test_a_switch_that_never_comes_ends_the_trial() -> None:
    trial = _trial()
    ends = [trial.observe(_step(step, OLD, BASE_NS)) for step in range(1, WAIT_STEPS_MAX + 3)]
    assert ends[-1] is not None
    assert ends[-1].cause is Cause.NEVER_CAME
    assert ends[:-2] == [None] * (WAIT_STEPS_MAX)


def test_values_that_go_back_unasked_mean_that_the_ranks_took_it_back() -> None:
    trial = _trial()
    for step in range(1, 4):
        assert trial.observe(_step(step, NEW, BASE_NS)) is None
    end = trial.observe(_step(4, OLD, BASE_NS))
    assert end is not None
    assert end.cause is Cause.TAKEN_BACK


def test_a_trial_in_which_nothing_can_be_judged_ends_by_itself() -> None:
    trial = _trial()
    ends = (trial.observe(_step(step, NEW, BASE_NS, profiled=True)) for step in range(1, TRIAL_STEPS_MAX + 9))
    end = next(end for end in ends if end is not None)
    assert end.cause is Cause.ENDLESS


def test_the_switch_back_is_asked_for_ahead_by_the_latency_that_was_seen() -> None:
    """With 12 steps from wish to effect a stretch is hardly longer than with 4: nobody waits for the agreement."""

    def stretch(latency: int) -> int:
        _, history = _play(_trial(latency_steps=None), 0.97, latency=latency)
        begin = history.index(8)
        return next(i for i in range(begin, len(history)) if history[i] == 4) - begin

    assert stretch(12) <= 2 * WINDOW_STEPS + SETTLE_STEPS + 1
    assert stretch(4) <= 2 * WINDOW_STEPS + SETTLE_STEPS + 1


def test_slow_drift_does_not_pass_for_a_gain() -> None:
    """The job gets 0.2 % faster every step; the candidate is worth nothing."""
    trial = _trial()
    values, wishes = dict(OLD), {}

    def steps() -> Iterator[TrialEnd | None]:
        nonlocal values
        for step in range(1, 400):
            values = wishes.get(step - 6, values)
            pace = BASE_NS * WIGGLE[step % 8] * math.exp(-0.002 * (step + WINDOW_STEPS))
            yield trial.observe(_step(step, values, pace))
            wishes[step] = trial.wanted

    end = next(end for end in steps() if end is not None)
    assert end.cause is not Cause.ACCEPTED


def test_a_trial_never_takes_more_pairs_than_its_bound() -> None:
    """A gain below the dead band on a noisy machine cannot be proven: the trial gives up."""
    trial = _trial(nulls=(0.08, -0.07, 0.09, -0.08))
    end, _ = _play(trial, 0.993)
    assert end.cause in (Cause.UNDECIDED, Cause.FUTILE)
    assert trial.pairs <= PAIRS_MAX
