"""Turns what the policy does into records (Decision, Verdict, TunerStatus), each with the step that it was seen at.

A status is written only when state or detail changed, so that a run's log stays short enough to read.  The time of a
record is that of the observation it rests on: the policy has no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pacecar.records import Decision, TunerStatus, Verdict

from ..experiment.ab_trial import AbortCause, AbTrial, TrialEnd
from ..observation import Observation
from . import phrases
from .geometric_search import Candidate

__all__ = ["DecisionRecords", "OpenTrial", "Outcome", "Record", "State", "outcome_of"]

Record = Decision | Verdict | TunerStatus
State = Literal["off", "advising", "warming", "screening", "trial", "watching", "frozen"]
Outcome = Literal["kept", "rolled_back", "barred", "abandoned"]


def outcome_of(cause: AbortCause) -> Outcome:
    """Return what becomes of a candidate whose trial ended that way."""
    if cause is AbortCause.ACCEPTED:
        return "kept"
    if cause is AbortCause.TAKEN_BACK:
        return "barred"
    return "abandoned" if cause in (AbortCause.NEVER_CAME, AbortCause.ENDLESS, AbortCause.CUT_SHORT) else "rolled_back"


@dataclass(frozen=True, slots=True)
class OpenTrial:
    """A trial under way; `balance_ns` is the exploration budget's balance when it began."""

    trial: AbTrial
    decision: int
    candidate: Candidate
    old_value: int
    balance_ns: float

    @property
    def detail(self) -> str:
        """The trial's progress, in words."""
        trial, knob, value = self.trial, self.candidate.knob, self.candidate.value
        return phrases.progress(knob, self.old_value, value, trial.pairs, trial.pairs_max, trial.evidence)


class DecisionRecords:
    """Collects the records of one job until they are taken; the caller takes them after every call."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._records: list[Record] = []
        self._said: tuple[State, str] | None = None
        self.decisions = 0
        self.trials = 0

    def drain(self) -> list[Record]:
        """Return what was written since the last call."""
        records, self._records = self._records, []
        return records

    def decide(self, kind: Literal["trial", "advise"], candidate: Candidate, old_value: int, step: Observation) -> int:
        """Write down a decision; return its number."""
        self.decisions += 1
        self.trials += kind == "trial"
        forecast = candidate.forecast
        self._records.append(
            Decision(
                job=self._job,
                decision=self.decisions,
                kind=kind,
                knob=candidate.knob,
                from_value=old_value,
                to_value=candidate.value,
                step=step.step,
                wall_ns=step.wall_ns,
                reason=phrases.trial_reason(candidate.knob, old_value, candidate.value, forecast),
                expected_gain_ratio=None if forecast is None else forecast.gain_ratio,
            )
        )
        return self.decisions

    def conclude(self, opened: OpenTrial, end: TrialEnd, balance_ns: float, step: Observation) -> str:
        """Write down what became of a trial; return the reason."""
        candidate, evidence = opened.candidate, end.evidence
        reason = phrases.verdict_reason(candidate.knob, opened.old_value, candidate.value, end, candidate.forecast)
        self._records.append(
            Verdict(
                job=self._job,
                decision=opened.decision,
                knob=candidate.knob,
                outcome=outcome_of(end.cause),
                step=step.step,
                wall_ns=step.wall_ns,
                measured_gain_ratio=end.gain_ratio,
                gain_low=None if evidence is None else evidence.gain_low,
                gain_high=None if evidence is None else evidence.gain_high,
                evidence=None if evidence is None else evidence.e_value,
                trial_steps=opened.trial.steps,
                exploration_ns=round(balance_ns - opened.balance_ns),
                reason=reason,
            )
        )
        return reason

    def report(self, state: State, detail: str, spent_ns: float, step: Observation) -> None:
        """Write down a status if it differs from the last one."""
        if self._said == (state, detail):
            return
        self._said = (state, detail)
        self._records.append(
            TunerStatus(
                job=self._job,
                rank=0,
                state=state,
                detail=detail,
                step=step.step,
                wall_ns=step.wall_ns,
                exploration_ns=round(spent_ns),
                trials=self.trials,
            )
        )
