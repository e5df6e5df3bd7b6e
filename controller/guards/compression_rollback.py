"""Takes gradient compression back, on all ranks, when loss or gradient norm diverge: a policy around the policy.

A policy keeps what is faster.  That is no reason to keep what breaks the training.  So this policy wraps the other one
and has the last word about the knob "compression".  When `divergence_detector` raises the alarm, all ranks turn to
"none" as soon as they agree (5 to 8 steps, like every switch; not a trial, so a freeze keeps it).  The knob is then
gone from what the policy sees, like a knob that a rank cannot turn any more: its open trial ends, and it goes on with
the other knobs.

Each signal names the compression that its step ran under, so steps that were not measured are watched all the same.
Compression is not given back in this run: a second divergence would cost more than compression saves.

Pure but for `signals`, which must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from msgspec.structs import replace as replace_fields

from pacecar.records import Decision, Verdict

from ..knobs.ddp.compression import NONE, choice_of
from ..observation import JobFacts, KnobSpace, Observation, Policy, PolicyLayer, TuningTurn
from ..policy.decision_records import Record
from .divergence_detector import DivergenceAlarm, DivergenceDetector, DivergenceSignals

__all__ = ["KNOB", "CompressionRollback"]

KNOB = "compression"


class CompressionRollback(PolicyLayer):
    """Runs `policy` and takes compression back when `signals` leave their band; see the module's docstring."""

    def __init__(self, policy: Policy, signals: Callable[[], Sequence[DivergenceSignals]]) -> None:
        super().__init__(policy)
        self._signals = signals
        self._divergence = DivergenceDetector()
        self._alarm: DivergenceAlarm | None = None
        self._is_in_force = False
        self._is_said = False
        self._is_live = False
        self._job = ""
        self._decision = 0
        self._turned = 0
        self._tried_at: int | None = None  # the step at which its trial was opened, while it is open
        self._last: Observation | None = None

    @property
    def alarm(self) -> DivergenceAlarm | None:
        """Why compression was taken back, or None."""
        return self._alarm

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, mode: Literal["advise", "exact"]) -> None:
        """Learn what can be turned."""
        self._job = facts.job
        self._is_live = mode == "exact" and any(space.knob == KNOB for space in spaces)
        self._policy.begin(facts, spaces, mode=mode)

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Pass on: step times are not judged meanwhile; loss and gradients are, as long as steps come."""
        self._policy.hold(reason, is_brief=is_brief)

    def is_calm(self) -> bool:
        """Pass on; False while compression is in force: a step that diverges costs more than a vote."""
        return not self._is_in_force and self._policy.is_calm()

    def finish(self, reason: str = "the job ended") -> list[Record]:
        """Pass on, without a second verdict on compression."""
        records = self._policy.finish(reason)
        return records if self._alarm is None else self._retold(records, self._alarm)

    def is_urgent(self) -> bool:
        """Return whether compression must go; needs no observations, as there may be none any more."""
        if self._is_live:
            self._watch()
        return self._alarm is not None and self._is_in_force

    def advance(self, observations: Sequence[Observation]) -> tuple[TuningTurn | None, list[Record]]:
        """Let the policy judge the steps, without compression once that was taken back."""
        must_go = self.is_urgent()
        turn: TuningTurn | None = None
        records: list[Record] = []
        if observations:
            self._last = observations[-1]
            if self._alarm is not None:
                observations = [replace(o, values=_without(o.values)) for o in observations]
            turn, records = self._policy.advance(observations)
            self._note(records)
        if self._alarm is None:
            return turn, records
        records = self._retold(records, self._alarm)
        if must_go:
            # Kept, not tried, so that a freeze does not undo it: a trial that the policy requests has to wait.
            others = {} if turn is None or turn.is_trial else turn.values
            turn = TuningTurn(self._turned or self._decision, {**others, KNOB: NONE}, is_trial=False)
        elif turn is not None:
            turn = replace(turn, values={**turn.values, KNOB: NONE})
        return turn, records

    def _watch(self) -> None:
        """Judge the losses and gradient norms since the last call."""
        for signals in self._signals():
            self._is_in_force = signals.choice != choice_of(NONE)
            if self._alarm is None:
                self._alarm = self._divergence.observe(signals)

    def _note(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Decision):
                self._decision = record.decision
                if record.knob == KNOB:
                    self._turned, self._tried_at = record.decision, record.step
            elif isinstance(record, Verdict) and record.knob == KNOB:
                self._tried_at = None

    def _retold(self, records: Sequence[Record], alarm: DivergenceAlarm) -> list[Record]:
        """Give one verdict with the reason for the rollback, in place of the policy's own on compression."""
        told = [record for record in records if isinstance(record, Verdict) and record.knob == KNOB]
        others = [record for record in records if record not in told]
        if self._is_said:
            return others
        self._is_said = True
        if not told:
            return [*self._verdict(alarm), *others]
        return [replace_fields(told[-1], outcome="rolled_back", step=alarm.step, reason=_reason(alarm)), *others]

    def _verdict(self, alarm: DivergenceAlarm) -> list[Record]:
        if self._last is None:
            return []
        verdict = Verdict(
            job=self._job,
            decision=self._turned,
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
