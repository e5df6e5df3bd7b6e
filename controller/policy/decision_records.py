"""Collects a policy's records (Decision, Verdict, TunerStatus), each stamped with the step that it rests on.

A status is written only when its state or detail changed, so that a run's log stays short.  A record has the time of
its observation, because a policy has no clock.
"""

from __future__ import annotations

from typing import Literal

from pacecar.records import Decision, TunerStatus, Verdict

from ..experiment.ab_trial import AbortCause
from ..experiment.sequential_test import SequentialTest
from ..observation import Observation, Record, TunerState

__all__ = ["DecisionRecords", "Outcome", "outcome_of"]

Outcome = Literal["kept", "rolled_back", "barred", "abandoned"]


def outcome_of(cause: AbortCause) -> Outcome:
    """Return what becomes of a candidate whose trial ended for `cause`."""
    if cause is AbortCause.ACCEPTED:
        return "kept"
    if cause is AbortCause.TAKEN_BACK:
        return "barred"
    return "abandoned" if cause in (AbortCause.NEVER_CAME, AbortCause.ENDLESS, AbortCause.CUT_SHORT) else "rolled_back"


class DecisionRecords:
    """The records of one policy until `drain`.  Numbers and totals go on when the policy starts over."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._reported: tuple[TunerState, str] | None = None
        self.job = ""
        self.decisions = 0
        """The number of the last decision."""
        self.trials = 0
        self.spent_before_ns = 0
        """Time lost to exploring before the policy started over last."""

    def start_over(self, spent_ns: float) -> None:
        """Begin again with the next status; `spent_ns` was lost since the last start."""
        self.spent_before_ns += round(spent_ns)
        self._reported = None

    def drain(self) -> list[Record]:
        """Return what was written since the last call."""
        records, self._records = self._records, []
        return records

    def decide(
        self,
        kind: Literal["trial", "advise"],
        knob: str,
        from_value: int,
        to_value: int,
        step: Observation,
        *,
        reason: str,
        expected_gain_ratio: float | None,
        expected_gain_error: float | None = None,
        expected_share_ratio: float | None = None,
    ) -> int:
        """Record a decision; return its number."""
        self.decisions += 1
        self._records.append(
            Decision(
                job=self.job,
                decision=self.decisions,
                kind=kind,
                knob=knob,
                from_value=from_value,
                to_value=to_value,
                step=step.step,
                wall_ns=step.wall_ns,
                reason=reason,
                expected_gain_ratio=expected_gain_ratio,
                expected_gain_error=expected_gain_error,
                expected_share_ratio=expected_share_ratio,
            )
        )
        return self.decisions

    def conclude(
        self,
        decision: int,
        knob: str,
        outcome: Outcome,
        step: Observation,
        *,
        gain_ratio: float | None,
        evidence: SequentialTest | None = None,
        trial_steps: int,
        exploration_ns: int = 0,
        reason: str,
    ) -> None:
        """Record what became of a decision."""
        self._records.append(
            Verdict(
                job=self.job,
                decision=decision,
                knob=knob,
                outcome=outcome,
                step=step.step,
                wall_ns=step.wall_ns,
                measured_gain_ratio=gain_ratio,
                gain_low=None if evidence is None else evidence.gain_low,
                gain_high=None if evidence is None else evidence.gain_high,
                evidence=None if evidence is None else evidence.e_value,
                trial_steps=trial_steps,
                exploration_ns=exploration_ns,
                reason=reason,
            )
        )

    def report(self, state: TunerState, detail: str, spent_ns: float, step: Observation) -> None:
        """Record a status if it differs from the last one; `spent_ns` was lost since the last start."""
        if self._reported == (state, detail):
            return
        self._reported = (state, detail)
        self._records.append(
            TunerStatus(
                job=self.job,
                rank=0,
                state=state,
                detail=detail,
                step=step.step,
                wall_ns=step.wall_ns,
                exploration_ns=self.spent_before_ns + round(spent_ns),
                trials=self.trials,
            )
        )
