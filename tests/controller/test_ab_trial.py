"""Tests one A/B trial: which steps are judged, when it requests switches, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest

from pacecar.controller.experiment.ab_trial import (
    DROP_STEPS,
    LINGER_STEPS,
    PAIRS_MAX,
    SETTLE_STEPS,
    TRIAL_STEPS_MAX,
    WAIT_STEPS_MAX,
    WINDOW_STEPS,
    AbortCause,
    AbTrial,
    CandidatePrior,
    IncumbentPace,
    TrialEnd,
    refill_steps,
)
from pacecar.controller.observation import Observation

OLD, NEW = {"micro_batch": 4}, {"micro_batch": 8}
BASE_NS = 200_000_000
WIGGLE = (1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 1.0)


def _trial(**changes: object) -> AbTrial:
    pace: dict[str, object] = {
        "opening": [math.log(BASE_NS * w) for w in WIGGLE],
        "nulls": (0.004, -0.006, 0.005, -0.003),
        "typical": math.log(BASE_NS),
    }
    rest: dict[str, object] = {"dead_band": 0.01, "false_accept_rate": 0.05, "latency_steps": 6}
    for name, value in changes.items():
        (pace if name in IncumbentPace.__slots__ else rest)[name] = value
    return AbTrial(OLD, NEW, IncumbentPace(**pace), **rest)  # type: ignore[arg-type]


def _step(step: int, values: dict[str, int], pace_ns: float, *, profiled: bool = False) -> Observation:
    return Observation(step=step, wall_ns=step, values=dict(values), pace_ns=int(pace_ns), profiled=profiled)


def _play(
    trial: AbTrial,
    ratio: float,
    *,
    latency: int = 6,
    transient: tuple[float, float] = (1.0, 1.0),
    machine: Callable[[AbTrial, dict[str, int], int], float] = lambda trial, values, since: 1.0,
    profiled: Sequence[int] = (),
) -> tuple[TrialEnd, list[int]]:
    """Obey the trial `latency` steps later; NEW takes `ratio` of OLD's time.  Return its end and each step's value.

    `machine` says how much longer a step takes whatever the setting, `since` steps after a switch; steps of NEW that
    are `profiled` so long after a switch are not judged.
    """
    values, wishes, history = dict(OLD), {}, []
    since = 99
    for step in range(1, TRIAL_STEPS_MAX + 9):
        if (wish := wishes.get(step - latency)) is not None and wish != values:
            values, since = dict(wish), 0
        history.append(values["micro_batch"])
        slow = transient[since] if since < SETTLE_STEPS else 1.0
        pace = BASE_NS * WIGGLE[step % 8] * (ratio if values == NEW else 1.0) * slow * machine(trial, values, since)
        is_profiled = values == NEW and since in profiled
        since += 1
        end = trial.observe(_step(step, values, pace, profiled=is_profiled))
        wishes[step] = trial.wanted
        if end is not None:
            return end, history
    raise AssertionError("the trial did not end")


def test_a_20_percent_gain_is_accepted_within_two_pairs_and_45_steps() -> None:
    end, history = _play(_trial(), 0.8)
    assert end.cause is AbortCause.ACCEPTED
    assert end.gain_ratio == pytest.approx(0.2, abs=0.02)
    assert len(history) <= 45


@pytest.mark.parametrize(
    ("ratio", "cause"), [(1.5, AbortCause.DROPPED), (1.1, AbortCause.WORSE), (1.0, AbortCause.FUTILE)]
)
def test_a_setting_that_is_no_better_is_refused_for_the_right_reason(ratio: float, cause: AbortCause) -> None:
    end, _ = _play(_trial(), ratio)
    assert end.cause is cause


def test_a_burst_on_the_machine_does_not_end_a_trial_whose_pairs_speak_for_the_candidate() -> None:
    # A gain that takes more than two pairs to prove, and a burst of 40 % in the first steps of its third stretch.
    nulls = (0.05, -0.06, 0.04, -0.05)

    def burst(trial: AbTrial, values: dict[str, int], since: int) -> float:
        return 1.4 if values == NEW and trial.pairs == 2 and since < SETTLE_STEPS + 3 else 1.0

    end, _ = _play(_trial(nulls=nulls), 0.93, machine=burst)
    assert end.cause is AbortCause.ACCEPTED

    def at_first(trial: AbTrial, values: dict[str, int], since: int) -> float:
        return 1.4 if values == NEW and not trial.pairs else 1.0

    assert _play(_trial(nulls=nulls), 0.93, machine=at_first)[0].cause is AbortCause.DROPPED, (
        "without a word for it: at once"
    )


def test_what_an_earlier_trial_measured_does_not_keep_a_bad_setting_for_a_window() -> None:
    end, history = _play(_trial(prior=CandidatePrior((0.03, 0.02))), 1.5)
    assert end.cause is AbortCause.DROPPED
    assert history.count(8) == DROP_STEPS


def test_a_machine_that_became_slower_under_the_old_setting_is_not_the_candidates_fault() -> None:
    slow = {"is": False}

    def slower(trial: AbTrial, values: dict[str, int], since: int) -> float:
        slow["is"] = slow["is"] or (trial.pairs >= 1 and values == OLD)
        return 1.3 if slow["is"] else 1.0

    end, _ = _play(_trial(), 1.0, machine=slower)
    assert end.cause not in (AbortCause.DROPPED, AbortCause.ACCEPTED)


@pytest.mark.parametrize(
    ("ratio", "noise", "steps"),
    [(1.5, 0.02, DROP_STEPS), (1.5, 0.2, SETTLE_STEPS + DROP_STEPS), (1.15, 0.01, SETTLE_STEPS + DROP_STEPS)],
)
def test_a_loss_is_left_the_sooner_the_clearer_it_is(ratio: float, noise: float, steps: int) -> None:
    end, history = _play(_trial(step_noise=noise), ratio)
    assert end.cause is AbortCause.DROPPED
    assert history.count(8) == steps
    assert end.gain_ratio == pytest.approx(1 - ratio, abs=0.05)


def test_a_loss_that_noise_could_be_is_judged_by_windows() -> None:
    assert _play(_trial(step_noise=0.05), 1.15)[0].cause is AbortCause.WORSE


@pytest.mark.parametrize("transient", [(30.0, 1.1), (1.5, 1.1), (1.1, 1.05)])
def test_what_a_recompilation_or_a_new_reducer_costs_is_not_the_candidates_loss(transient: tuple[float, float]) -> None:
    assert _play(_trial(step_noise=0.02), 0.8, transient=transient)[0].cause is AbortCause.ACCEPTED
    assert _play(_trial(step_noise=0.02), 1.0, transient=transient)[0].cause is AbortCause.FUTILE


def test_steps_while_new_workers_start_end_no_trial() -> None:
    before, after = ({"loader_workers": count, "loader_prefetch": 2} for count in (2, 3))
    pace = IncumbentPace(opening=[math.log(BASE_NS)] * 8, nulls=(0.004, -0.006), typical=math.log(BASE_NS))
    trial = AbTrial(before, after, pace, dead_band=0.01, false_accept_rate=0.05)
    settling = refill_steps(before, after)
    assert settling > SETTLE_STEPS
    ends = [trial.observe(_step(1 + i, after, BASE_NS * 3)) for i in range(settling + DROP_STEPS)]
    assert ends[:-1] == [None] * (settling + DROP_STEPS - 1)
    assert ends[-1] is not None
    assert ends[-1].cause is AbortCause.DROPPED


def test_where_the_present_setting_spikes_too_two_slow_steps_do_not_drop_a_candidate() -> None:
    trial = _trial(slow_ratio=0.05)
    paces = [1.0, 1.0, 1.5, 1.5, 1.0, 1.0]
    ends = [trial.observe(_step(1 + i, NEW, BASE_NS * pace)) for i, pace in enumerate(paces)]
    assert ends == [None] * len(paces)


def test_settling_steps_are_not_judged() -> None:
    """A switch that makes its first step ten times slower changes no measured gain."""
    quiet, _ = _play(_trial(), 0.9)
    rough, _ = _play(_trial(), 0.9, transient=(10.0, 1.1))
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
    assert ends[-1].cause is AbortCause.NEVER_CAME
    assert ends[:-2] == [None] * (WAIT_STEPS_MAX)


def test_values_that_go_back_unasked_mean_that_the_ranks_took_it_back() -> None:
    trial = _trial()
    for step in range(1, 4):
        assert trial.observe(_step(step, NEW, BASE_NS)) is None
    end = trial.observe(_step(4, OLD, BASE_NS))
    assert end.cause is AbortCause.TAKEN_BACK


def test_one_of_two_knobs_that_goes_back_unasked_ends_the_trial_too() -> None:
    before, both = {"compression": 0, "micro_batch": 4}, {"compression": 1, "micro_batch": 8}
    pace = IncumbentPace(opening=[math.log(BASE_NS)] * 8, nulls=(0.004, -0.006), typical=math.log(BASE_NS))
    trial = AbTrial(before, both, pace, dead_band=0.01, false_accept_rate=0.05)
    ends = [trial.observe(_step(1 + i, both, BASE_NS)) for i in range(3)]
    assert ends == [None] * 3
    end = trial.observe(_step(4, {**both, "micro_batch": 4}, BASE_NS))
    assert end is not None
    assert end.cause is AbortCause.TAKEN_BACK


def test_a_trial_in_which_nothing_can_be_judged_ends_by_itself() -> None:
    trial = _trial()
    ends = (trial.observe(_step(step, NEW, BASE_NS, profiled=True)) for step in range(1, TRIAL_STEPS_MAX + 9))
    end = next(end for end in ends if end is not None)
    assert end.cause is AbortCause.ENDLESS


def test_the_switch_back_is_asked_for_ahead_by_the_latency_that_was_seen() -> None:
    """With 12 steps from wish to effect a stretch under what is worse is hardly longer than with 4."""

    def stretch(latency: int) -> int:
        _, history = _play(_trial(latency_steps=None, nulls=(0.05, -0.06)), 0.97, latency=latency)
        begin = history.index(4, history.index(8))
        return history.index(8, begin) - begin

    assert stretch(12) <= 2 * WINDOW_STEPS + SETTLE_STEPS + 1
    assert stretch(4) <= 2 * WINDOW_STEPS + SETTLE_STEPS + 1


def _short(**changes: object) -> AbTrial:
    """A trial in windows of four steps whose null pairs are so few and so loud that two pairs do not prove it."""
    opening = [math.log(BASE_NS * w) for w in WIGGLE[:4]]
    return _trial(opening=opening, window_steps=4, nulls=(0.05,), latency_steps=4, **changes)


@pytest.mark.parametrize("profiled", [(), (3,), (3, 5), (5, 9)])
def test_a_window_that_every_rank_takes_of_a_better_setting_costs_no_pair(profiled: tuple[int, ...]) -> None:
    plain, _ = _play(_short(), 0.75, latency=4)
    end, history = _play(_short(), 0.75, latency=4, profiled=profiled)
    assert plain.evidence is not None
    assert end.evidence is not None
    assert end.cause is plain.cause is AbortCause.ACCEPTED
    assert end.evidence.pairs == plain.evidence.pairs == 3
    # Each stretch has one pair: the third is complete with the first window of the candidate's second stretch.
    begin = history.index(8)
    assert history[begin:].count(4) <= 2 * 4 + SETTLE_STEPS + 1, "steps under what is worse"


def test_it_lingers_under_what_looks_better_and_not_under_what_looks_worse() -> None:
    def stretches(ratio: float) -> tuple[int, int]:
        _, history = _play(_short(dead_band=0.3), ratio, latency=4)
        begin = history.index(8)
        back = history.index(4, begin)
        return back - begin, history.index(8, back) - back

    new, old = stretches(0.97)
    assert new == old + LINGER_STEPS
    new, old = stretches(1.05)
    assert old == new + LINGER_STEPS


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
    assert end.cause is not AbortCause.ACCEPTED


def test_a_trial_never_takes_more_pairs_than_its_bound() -> None:
    """A gain below the dead band on a noisy machine cannot be proven: the trial gives up."""
    trial = _trial(nulls=(0.08, -0.07, 0.09, -0.08))
    end, _ = _play(trial, 0.993)
    assert end.cause in (AbortCause.UNDECIDED, AbortCause.FUTILE)
    assert trial.pairs <= PAIRS_MAX
