"""Takes a knob back on all ranks after an alarm, for good: the base of guards that overrule the policy.

All ranks turn the knob home as soon as they agree (5 to 8 steps, like every switch; not a trial, so a freeze keeps it).
The policy then no longer sees the knob, as if a rank could not turn it: its open trial ends, and it goes on with the
other knobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from pacecar.knobs import KnobName
from pacecar.records import Decision, Verdict

from ..knobs.actuator import Objection
from ..observation import Guard, JobFacts, KnobSpace, Observation, Proposal, Record

__all__ = ["Alarm", "KnobRollback"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why the knob must go, and the step that showed it."""

    step: int
    reason: str


class KnobRollback(Guard, ABC):
    """Takes `knob` back to `home` once there is an alarm."""

    knob: KnobName
    home: int

    def __init__(self) -> None:
        self._alarm: Alarm | None = None
        self._is_in_force = False
        self._is_recorded = False
        self._is_live = False
        self._job = ""
        self._decision = 0
        self._switch_decision = 0
        self._tried_at: int | None = None  # the step of its open trial
        self._last: Observation | None = None

    @abstractmethod
    def _watch(self) -> None:
        """Set `_alarm` if it is time, and `_is_in_force` if that is known otherwise than from steps."""

    def _heed(self, objections: Mapping[int, int]) -> None:
        """Raise the alarm if a rank objects to this knob; `objections` are their numbers."""
        for rank, number in objections.items():
            objection = Objection(number)
            if objection.knob == self.knob and self._alarm is None and self._last is not None:
                self._alarm = Alarm(self._last.step, f"on rank {rank} {objection.words}")

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Learn whether the knob can be turned."""
        self._job = facts.job
        self._is_live = turns_knobs and any(space.knob == self.knob for space in spaces)

    def must_act(self) -> bool:
        """Return whether the knob must go now."""
        if self._is_live:
            self._watch()
        return self._alarm is not None and self._is_in_force

    def judgeable(self, step: Observation) -> Observation:
        """Return `step` without the knob once it was taken back."""
        self._last = step
        return step if self._alarm is None else replace(step, values=self._without(step.values))

    def take_back(self, proposal: Proposal | None, records: list[Record]) -> tuple[Proposal | None, list[Record]]:
        """After an alarm turn the knob home for good; record why once, in place of the policy's verdict."""
        self._follow(records)
        if self._alarm is None:
            return proposal, records
        records = self._with_reason(records, self._alarm)
        if self._is_in_force:
            # Not a trial, so that a freeze does not undo it; a trial of the policy has to wait.
            others = {} if proposal is None or proposal.is_trial else proposal.values
            values = {**others, self.knob: self.home}
            proposal = Proposal(self._switch_decision or self._decision, values, is_trial=False)
        elif proposal is not None:
            proposal = replace(proposal, values={**proposal.values, self.knob: self.home})
        return proposal, records

    def _follow(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Decision):
                self._decision = record.decision
                if record.knob == self.knob:
                    self._switch_decision, self._tried_at = record.decision, record.step
            elif isinstance(record, Verdict) and record.knob == self.knob:
                self._tried_at = None

    def _with_reason(self, records: Sequence[Record], alarm: Alarm) -> list[Record]:
        """Replace the policy's verdict on the knob by one with the reason for the rollback."""
        own = [record for record in records if isinstance(record, Verdict) and record.knob == self.knob]
        others = [record for record in records if record not in own]
        if self._is_recorded:
            return others
        self._is_recorded = True
        if not own:
            return [*self._verdict(alarm), *others]
        return [replace_fields(own[-1], outcome="rolled_back", step=alarm.step, reason=_reason(alarm)), *others]

    def _verdict(self, alarm: Alarm) -> list[Record]:
        if self._last is None:
            return []
        verdict = Verdict(
            job=self._job,
            decision=self._switch_decision,
            knob=self.knob,
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

    def _without(self, values: dict[str, int]) -> dict[str, int]:
        return {knob: value for knob, value in values.items() if knob != self.knob}


def _reason(alarm: Alarm) -> str:
    return f"taken back: {alarm.reason}"
