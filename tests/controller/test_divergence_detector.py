"""The divergence guard raises no false alarms, sees a rise in time, and takes compression back for good."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

from pacecar.controller.guards.compression_rollback import CompressionRollback
from pacecar.controller.guards.divergence_detector import (
    LEVEL_STEPS,
    NONFINITE_MAX,
    DivergenceAlarm,
    DivergenceDetector,
    DivergenceSignals,
)
from pacecar.controller.guards.loss_monitor import PENDING_MAX, LossMonitor
from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Proposal
from tests.kit import records
from tests.kit.selection import reduced

Noise = Callable[[random.Random], float]


def normal(rng: random.Random) -> float:
    return rng.gauss(0, 1)


def heavy(rng: random.Random) -> float:
    """Student's t with 3 degrees of freedom."""
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)


def run(
    seed: int, steps: int, noise: Noise = normal, *, jump: float = 0.0, at: int = 0, falls: bool = True
) -> int | None:
    """A loss with 5 % noise, compressed from step 100 on, that rises by `jump` times its noise; steps to the alarm."""
    rng, guard = random.Random(seed), DivergenceDetector()
    for step in range(steps + 100):
        level = -0.5 * math.log1p(step / 500) if falls else 0.0
        level += 0.05 * jump if jump and step >= 100 + at else 0.0
        loss = math.exp(level + 0.05 * noise(rng))
        norm = math.exp(0.3 * rng.gauss(0, 1) + 0.3 * math.sin(step / 2000))
        if guard.observe(DivergenceSignals(step, loss, norm, "none" if step < 100 else "bf16")) is not None:
            return step - 99 - at
    return None


@pytest.mark.slow
@pytest.mark.parametrize("noise", [normal, heavy])
@pytest.mark.parametrize("falls", [True, False])
def test_compressed_steps_raise_no_false_alarm(noise: Noise, falls: bool) -> None:
    assert {run(seed, 2000, noise, falls=falls) for seed in range(reduced(10))} == {None}


@pytest.mark.parametrize(("jump", "within"), [(10, 6), (5, 10), (3, 40)])
def test_a_rise_is_found_within_the_stated_steps(jump: float, within: int) -> None:
    found = [run(seed, 300, jump=jump, at=100, falls=False) for seed in range(40)]
    assert all(steps is not None for steps in found)
    assert sorted(s for s in found if s is not None)[37] <= within, "38 of 40"


def test_a_single_wild_step_is_no_alarm() -> None:
    guard = DivergenceDetector()
    for step in range(400):
        loss = 50.0 if step % 40 == 39 else 1.0 + 0.05 * math.sin(step * 1.7)
        assert guard.observe(DivergenceSignals(step, loss, None, "none" if step < 100 else "fp16")) is None


def test_a_loss_that_is_not_finite_is_an_alarm_at_once_and_names_it() -> None:
    guard = DivergenceDetector()
    assert guard.observe(DivergenceSignals(1, math.nan, None)) is None, "without compression it is not our doing"
    alarm = guard.observe(DivergenceSignals(2, math.nan, None, "fp16"))
    assert alarm == DivergenceAlarm("the loss", 2, "the loss is nan under fp16")


def test_a_scaler_s_single_infinite_norms_are_none_but_three_on_end_are() -> None:
    guard = DivergenceDetector()
    norms = [1.0, math.inf, 1.0, math.inf, math.inf, 1.0] + [math.inf] * NONFINITE_MAX
    alarms = [guard.observe(DivergenceSignals(step, None, norm, "fp16")) for step, norm in enumerate(norms)]
    assert [a is not None for a in alarms] == [False] * 8 + [True]


def test_losses_around_zero_and_below_are_judged_too() -> None:
    rng, guard = random.Random(0), DivergenceDetector()
    for step in range(200):
        assert (
            guard.observe(DivergenceSignals(step, -2 + rng.gauss(0, 0.1), None, "none" if step < 100 else "bf16"))
            is None
        )
    assert any(
        guard.observe(DivergenceSignals(step, 0.5 + rng.gauss(0, 0.1), None, "bf16")) for step in range(200, 210)
    )


def test_a_job_that_begins_compressed_is_judged_by_its_first_compressed_steps() -> None:
    rng, guard = random.Random(0), DivergenceDetector()
    for step in range(2 * LEVEL_STEPS):
        assert guard.observe(DivergenceSignals(step, 1 + rng.gauss(0, 0.02), None, "bf16")) is None
    assert any(guard.observe(DivergenceSignals(step, 2.0, None, "bf16")) for step in range(200, 206))


def test_top_k_may_change_the_norm_and_bf16_may_not() -> None:
    def alarm(choice: str) -> bool:
        guard = DivergenceDetector()
        found = [
            guard.observe(DivergenceSignals(s, None, 1.0 if s < 100 else 6.0, "none" if s < 100 else choice))
            for s in range(140)
        ]
        return any(found)

    assert alarm("bf16")
    assert not alarm("topk")


# --- the guard ------------------------------------------------------------------------------------

DECIDED = records.decision(7, knob="compression", from_value=0, to_value=1)

BARRED = records.verdict(
    7, knob="compression", outcome="barred", measured_gain_ratio=0.4, gain_low=0.3, gain_high=0.5, evidence=3.0,
    trial_steps=19, exploration_ns=-5, reason="the ranks could not apply it",
)  # fmt: skip


class Guarded:
    """The guard, asked as the tuner asks it; its policy decided to try compression in the first step."""

    def __init__(self, *, turns_knobs: bool = True) -> None:
        self.pending: list[DivergenceSignals] = []
        self.guard = CompressionRollback(self._take)
        spaces = [KnobSpace("compression", 0, (0, 1)), KnobSpace("bucket_bytes", 4, (4, 8))]
        self.guard.begin(JobFacts("j", 2), spaces, turns_knobs=turns_knobs)
        self.step(1, 0, records=[DECIDED])

    def _take(self) -> list[DivergenceSignals]:
        taken, self.pending = self.pending, []
        return taken

    def signal(self, *signal: Any) -> bool:
        """Return whether the guard must act on a signal."""
        self.pending.append(DivergenceSignals(*signal))
        return self.guard.must_act()

    def step(
        self, step: int, compression: int, turn: Proposal | None = None, records: Sequence[Any] = ()
    ) -> tuple[Proposal | None, list[Any]]:
        """Return what becomes of what the policy requests and records after a step."""
        self.seen = self.guard.judgeable(
            Observation(step, step, {"compression": compression, "bucket_bytes": 4}, 100)
        ).values
        return self.guard.take_back(turn, list(records))


def test_without_an_alarm_requests_and_records_stay_as_they_are() -> None:
    guarded = Guarded()
    wanted = Proposal(7, {"compression": 1, "bucket_bytes": 4}, is_trial=True)
    assert not guarded.signal(1, 1.0, 1.0)
    turn, records = guarded.step(1, 0, wanted, [DECIDED])
    assert turn is wanted
    assert records == [DECIDED]
    assert guarded.seen == {"compression": 0, "bucket_bytes": 4}


def test_an_alarm_takes_compression_back_for_good_and_the_policy_goes_on_without_it() -> None:
    guarded = Guarded()
    other = Proposal(8, {"bucket_bytes": 8}, is_trial=True)
    assert guarded.signal(2, math.inf, None, "fp16")
    turn, records = guarded.step(2, 1, other)
    assert turn == Proposal(7, {"compression": 0}, is_trial=False), (
        "kept, so that a freeze does not undo it; the trial waits"
    )
    (verdict,) = records
    assert (verdict.decision, verdict.knob, verdict.outcome) == (7, "compression", "rolled_back")
    assert verdict.reason == "taken back: the loss is inf under fp16"
    assert guarded.seen == {"bucket_bytes": 4}
    assert not guarded.signal(3, 1.0, None, "none")
    turn, records = guarded.step(3, 0, other)
    assert turn == Proposal(8, {"bucket_bytes": 8, "compression": 0}, is_trial=True)
    assert records == [], "it is said once"


def test_one_verdict_says_why_compression_went_with_what_its_trial_had_measured() -> None:
    """The policy only sees that the knob is gone, and would say that the ranks could not apply it."""
    guarded = Guarded()
    assert guarded.signal(3, math.inf, None, "fp16")
    _, (verdict,) = guarded.step(2, 1, records=[BARRED])
    assert (verdict.outcome, verdict.step, verdict.reason) == (
        "rolled_back",
        3,
        "taken back: the loss is inf under fp16",
    )
    assert (verdict.trial_steps, verdict.measured_gain_ratio, verdict.exploration_ns) == (19, 0.4, -5)


def test_what_the_policy_says_of_the_knob_later_is_not_said_again() -> None:
    guarded = Guarded()
    assert guarded.signal(5, math.nan, None, "bf16")
    _, (verdict,) = guarded.guard.take_back(None, [])
    assert verdict.trial_steps == 4
    _, records = guarded.step(6, 0, records=[BARRED, structs.replace(BARRED, knob="bucket_bytes")])
    assert [record.knob for record in records] == ["bucket_bytes"]
    assert guarded.guard.take_back(None, [structs.replace(BARRED, outcome="abandoned")])[1] == []


def test_an_alarm_acts_where_no_step_is_observed_any_more() -> None:
    """The hook may have turned itself off; loss and gradients are seen all the same."""
    guarded = Guarded()
    assert guarded.signal(2, math.nan, None, "bf16")
    turn, records = guarded.guard.take_back(None, [])
    assert turn == Proposal(7, {"compression": 0})
    assert len(records) == 1
    assert not guarded.signal(3, 1.0, None, "none")


def test_in_advice_nothing_is_watched() -> None:
    assert not Guarded(turns_knobs=False).signal(2, math.nan, None, "bf16")


# --- what the guard sees with -----------------------------------------------------------------------


def stepped(choice: str = "none") -> tuple[nn.Module, LossMonitor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, LossMonitor(model, lambda: choice)


def test_losses_of_micro_batches_add_up_by_their_weights_and_the_norm_is_the_gradients() -> None:
    model, vigil = stepped("bf16")
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    vigil.loss(torch.tensor(1.0), weight=0.25)
    vigil.loss(torch.tensor([3.0, 5.0]), weight=0.75)
    vigil.boundary(41)
    vigil.boundary(None)
    numel = sum(p.numel() for p in model.parameters())
    first, second = vigil.arrived()
    assert first == DivergenceSignals(41, 3.25, pytest.approx(2 * math.sqrt(numel)), "bf16")
    assert (second.step, second.loss) == (42, None)
    assert vigil.arrived() == []


def test_zero_is_a_measurement_and_no_gradient_is_none() -> None:
    model, vigil = stepped()
    vigil.loss(0.0)
    vigil.boundary(1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    vigil.boundary(2)
    assert [(s.loss, s.norm) for s in vigil.arrived()] == [(0.0, None), (None, 0.0)]


def test_what_nobody_takes_is_bounded() -> None:
    _, vigil = stepped()
    for step in range(3 * PENDING_MAX):
        vigil.boundary(step)
    assert [s.step for s in vigil.arrived()] == list(range(2 * PENDING_MAX, 3 * PENDING_MAX))


def test_a_loss_that_is_no_number_breaks_the_vigil_and_not_the_job(caplog: pytest.LogCaptureFixture) -> None:
    _, vigil = stepped()
    with caplog.at_level(logging.WARNING):
        vigil.loss("three")  # type: ignore[arg-type]
    assert "ValueError" in caplog.text
    vigil.loss(1.0)
    vigil.boundary(1)
    with pytest.raises(RuntimeError, match="cannot be read"):  # it freezes the tuner, which takes compression back
        vigil.arrived()
