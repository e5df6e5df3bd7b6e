"""A whole tuner with guards and orders: unique numbers, one verdict a trial, nothing unproven stays."""

from __future__ import annotations

from collections import Counter

import pytest

from pacecar.records import Decision, KnobSwitch, Verdict
from tests.controller import replay
from tests.controller.whole_tuner import WholeTuner

CASES = replay.all_cases()


@pytest.mark.slow
@pytest.mark.parametrize("has_orders", [False, True])
@pytest.mark.parametrize("seed", [3, 12, 17, pytest.param(38, marks=pytest.mark.full)])
def test_records_of_a_whole_tuner_belong_together_and_repeat(seed: int, has_orders: bool) -> None:
    case, factors = CASES[seed % len(CASES)], replay.noise(0.02, 500, seed)
    job = WholeTuner(case, seed).run(factors, has_orders=has_orders)
    trials = [record for record in job.records if isinstance(record, Decision)]
    assert trials, "something was tried"
    assert Counter(trial.decision for trial in trials).most_common(1)[0][1] == 1
    verdicts = Counter(
        record.decision
        for record in job.records
        if isinstance(record, Verdict) and not record.reason.startswith("taken back")  # a kept compression, by a guard
    )
    assert {trial.decision: 1 for trial in trials} == dict(verdicts), "one verdict a trial"
    kept = {r.decision for r in job.records if isinstance(r, Verdict) and r.outcome == "kept"}
    last = [record for record in job.records if isinstance(record, KnobSwitch)][-1]
    is_trial = last.decision in {trial.decision for trial in trials} - kept
    assert not (is_trial and job.values[trials[-1].knob] == trials[-1].to_value), "nothing unproven stays"
    again = WholeTuner(case, seed).run(factors, has_orders=has_orders)
    assert again.records == job.records
    assert again.answers == job.answers
