"""Takes gradient compression back, on all ranks, when loss or gradient norm diverge.

A policy keeps what is faster, even if it breaks the training.  So this guard has the last word about the knob
"compression".  When `divergence_detector` raises the alarm, all ranks turn to "none" as soon as they agree (5 to 8
steps, like every switch; not a trial, so a freeze keeps it).  The policy then no longer sees the knob, as if a rank
could not turn it: its open trial ends, and it goes on with the other knobs.

Each signal names the compression of its step, so steps that were not measured are watched too.  Compression stays off
for the rest of the run: a second divergence would cost more than compression saves.

Pure but for `signals`, which must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from pacecar.records import Decision, Verdict

from ..knobs.ddp.compression import NONE, choice_of
from ..observation import Guard, JobFacts, KnobSpace, Observation, Proposal, Record
from .divergence_detector import DivergenceAlarm, DivergenceDetector, DivergenceSignals

__all__ = ["KNOB", "CompressionRollback"]

KNOB = "compression"


class CompressionRollback(Guard):
    """Takes compression back when `signals` leave their band."""

    def __init__(self, signals: Callable[[], Sequence[DivergenceSignals]]) -> None:
        self._signals = signals
        self._divergence = DivergenceDetector()
        self._alarm: DivergenceAlarm | None = None
        self._is_in_force = False
        self._is_recorded = False
        self._is_live = False
        self._job = ""
        self._decision = 0
        self._switch_decision = 0
        self._tried_at: int | None = None  # the step of its open trial
        self._last: Observation | None = None

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Learn whether compression can be turned."""
        self._job = facts.job
        self._is_live = turns_knobs and any(space.knob == KNOB for space in spaces)

    def is_calm(self) -> bool:
        """Return False while compression is in force: a diverging step costs more than a vote."""
        return not self._is_in_force

    def must_act(self) -> bool:
        """Judge the signals since the last call; return whether compression must go."""
        if self._is_live:
            self._judge_signals()
        return self._alarm is not None and self._is_in_force

    def judgeable(self, step: Observation) -> Observation:
        """Return `step` without compression once it was taken back."""
        self._last = step
        return step if self._alarm is None else replace(step, values=_without(step.values))

    def take_back(self, proposal: Proposal | None, records: list[Record]) -> tuple[Proposal | None, list[Record]]:
        """After an alarm turn compression off for good; record why once, in place of the policy's verdict."""
        self._follow(records)
        if self._alarm is None:
            return proposal, records
        records = self._with_reason(records, self._alarm)
        if self._is_in_force:
            # Not a trial, so that a freeze does not undo it; a trial of the policy has to wait.
            others = {} if proposal is None or proposal.is_trial else proposal.values
            proposal = Proposal(self._switch_decision or self._decision, {**others, KNOB: NONE}, is_trial=False)
        elif proposal is not None:
            proposal = replace(proposal, values={**proposal.values, KNOB: NONE})
        return proposal, records

    def _judge_signals(self) -> None:
        """Judge the losses and gradient norms since the last call."""
        for signals in self._signals():
            self._is_in_force = signals.choice != choice_of(NONE)
            if self._alarm is None:
                self._alarm = self._divergence.observe(signals)

    def _follow(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Decision):
                self._decision = record.decision
                if record.knob == KNOB:
                    self._switch_decision, self._tried_at = record.decision, record.step
            elif isinstance(record, Verdict) and record.knob == KNOB:
                self._tried_at = None

    def _with_reason(self, records: Sequence[Record], alarm: DivergenceAlarm) -> list[Record]:
        """Replace the policy's verdict on compression by one with the reason for the rollback."""
        own = [record for record in records if isinstance(record, Verdict) and record.knob == KNOB]
        others = [record for record in records if record not in own]
        if self._is_recorded:
            return others
        self._is_recorded = True
        if not own:
            return [*self._verdict(alarm), *others]
        return [replace_fields(own[-1], outcome="rolled_back", step=alarm.step, reason=_reason(alarm)), *others]

    def _verdict(self, alarm: DivergenceAlarm) -> list[Record]:
        if self._last is None:
            return []
        verdict = Verdict(
            job=self._job,
            decision=self._switch_decision,
            knob=KNOB,
            outcome="rolled_back",
            step=alarm.step,
            wall_ns=self._last.wall_ns,
            measured_gain_ratio=None,
            gain_low=None,
            gain_high=None,
            evidence=None,
            trial_steps=0 if self._tried_at is None else max(0, alarm.step - self._tried_at),
            exploration_ns=0,
            reason=_reason(alarm),
        )
        return [verdict]


def _reason(alarm: DivergenceAlarm) -> str:
    return f"taken back: {alarm.reason}"


def _without(values: dict[str, int]) -> dict[str, int]:
    return {knob: value for knob, value in values.items() if knob != KNOB}
