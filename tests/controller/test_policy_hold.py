"""A held policy judges nothing, leaves nothing half tried, and goes on when it is released."""

from __future__ import annotations

import pytest

from pacecar.config import TuneConfig
from pacecar.controller.experiment.ab_trial import DROP_STEPS, SETTLE_STEPS
from pacecar.controller.observation import JobFacts, KnobSpace, Observation
from pacecar.controller.policy.change_detector import CALM_STEPS, STALL_STEPS
from pacecar.controller.policy.tuning_policy import TuningPolicy
from pacecar.records import Decision, Ledger, TunerStatus, Verdict

MIB = 2**20
BUCKET = KnobSpace("bucket_bytes", 32 * MIB, (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB))
NS = 200_000_000


class Job:
    """A job of which 16 MiB are 20 % faster; obeys at once."""

    def __init__(self, **settings: object) -> None:
        self.policy = TuningPolicy(TuneConfig(exploration_budget=0.05, **settings))  # type: ignore[arg-type]
        self.policy.begin(JobFacts(job="job", world_size=2), [BUCKET], turns_knobs=True)
        self.values = {"bucket_bytes": 32 * MIB}
        self.step = 0
        self.records: list[Decision | Verdict | TunerStatus] = []
        self.history: list[int] = []

    def run(self, steps: int, slow: float = 1.0, ledger: Ledger | None = None) -> Job:
        for _ in range(steps):
            self.step += 1
            self.history.append(self.values["bucket_bytes"])
            share = 0.8 if self.values["bucket_bytes"] == 16 * MIB else 1.0
            pace = int(NS * share * slow * (1 + 0.01 * (self.step % 5)))
            turn, said = self.policy.advance(
                [Observation(self.step, self.step, dict(self.values), pace, ledger=ledger, exact=False)]
            )
            self.records += said
            if turn is not None:
                self.values = dict(turn.values)
        return self

    def run_to_trial(self) -> Job:
        while not any(isinstance(record, Decision) for record in self.records):
            self.run(1)
        return self.run(4)

    @property
    def verdicts(self) -> list[Verdict]:
        return [record for record in self.records if isinstance(record, Verdict)]

    @property
    def status(self) -> TunerStatus:
        return [record for record in self.records if isinstance(record, TunerStatus)][-1]


def test_a_straggler_takes_the_trial_back_and_tuning_goes_on_after_it() -> None:
    job = Job().run_to_trial()
    assert job.values == {"bucket_bytes": 16 * MIB}
    job.policy.hold("rank 3 is late: throttled")
    job.run(40, slow=1.5)
    assert (job.status.state, job.status.detail) == ("frozen", "rank 3 is late: throttled")
    assert [v.outcome for v in job.verdicts] == ["abandoned"]
    assert set(job.history[-38:]) == {32 * MIB}, "the knob is back and nothing is tried"
    job.policy.hold(None)
    job.run(200)
    assert job.values == {"bucket_bytes": 16 * MIB}
    assert "kept" in {v.outcome for v in job.verdicts}


def test_a_brief_hold_keeps_the_trial_and_judges_none_of_its_steps() -> None:
    job = Job().run_to_trial()
    job.policy.hold("evaluation", is_brief=True)
    job.run(30, slow=5.0)
    job.policy.hold(None)
    job.run(120)
    assert "frozen" not in {r.state for r in job.records if isinstance(r, TunerStatus)}
    assert [v.outcome for v in job.verdicts][:1] == ["kept"]
    assert job.verdicts[0].measured_gain_ratio == pytest.approx(0.2, abs=0.03)


def test_a_stall_freezes_and_thaws_when_it_is_over() -> None:
    job = Job().run(60)
    job.run(STALL_STEPS + 2, slow=40)
    assert job.status.state == "frozen"
    assert "a rank is failing" in job.status.detail
    job.run(CALM_STEPS - 1)
    assert job.status.state == "frozen"
    job.run(200)
    assert job.values == {"bucket_bytes": 16 * MIB}


def test_a_hold_does_not_thaw_what_froze_for_good() -> None:
    job = Job().run(30)
    job.policy.advance([Observation(job.step + 1, 1, dict(job.values), -5)])
    job.step += 1
    job.policy.hold("rank 3 is late")
    job.run(5)
    job.policy.hold(None)
    job.run(100)
    assert not job.verdicts
    assert set(job.history[-100:]) == {32 * MIB}


def test_steps_that_wrote_a_checkpoint_are_not_judged() -> None:
    job = Job().run_to_trial()
    while job.values != {"bucket_bytes": 16 * MIB} or job.history[-1] != 16 * MIB:
        job.run(1)
    job.run(SETTLE_STEPS)
    saved = Ledger(wall_ns=10 * NS, compute_ns=NS, checkpoint_ns=9 * NS)
    for _ in range(DROP_STEPS + 1):
        job.run(1, slow=10.0, ledger=saved)
    job.run(150)
    assert [v.outcome for v in job.verdicts][:1] == ["kept"], job.verdicts[0].reason


@pytest.mark.parametrize("slow", [1.8, 3.0])
def test_a_clearly_bad_candidate_is_given_up_within_two_judged_steps(slow: float) -> None:
    job = Job()
    while not any(isinstance(record, Decision) for record in job.records):
        job.run(1)
    steps = 0
    while not job.verdicts:
        away = job.values != {"bucket_bytes": 32 * MIB}
        job.run(1, slow=slow if away else 1.0)
        steps += job.history[-1] != 32 * MIB
    assert job.verdicts[0].outcome == "rolled_back"
    assert steps <= DROP_STEPS + 1
