"""Runs several policies one after the other as if they were one: each is a stage.

Each policy counts its decisions, trials and losses from zero and knows only the knobs that it was given.  What people
read and what ranks are asked for must go on across stages.  So numbers are shifted, losses are added up, and the knobs
that a stage does not have are put into its requests at the values that are kept.

A stage's last proven request is what is *kept*; the next stage begins there.

Pure.  Left out: when a stage ends, and which comes next (`ordered_policy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from pacecar.config import TuneConfig
from pacecar.records import Decision, TunerStatus, Verdict

from ..observation import JobFacts, KnobSpace, Observation, Policy, TuningTurn
from .decision_records import Record
from .tuning_policy import TuningPolicy

__all__ = ["PolicySequence"]


class PolicySequence:
    """The stage that runs, and the numbers of those before it.

    `kept` are the values to come back to, `remaining` the share of step time that is left after all gains that were
    kept (None: none was), `said` the last status of any stage.
    """

    def __init__(self, config: TuneConfig) -> None:
        self._config = config
        self._facts = JobFacts(job="", world_size=1)
        self._mode: Literal["advise", "exact"] = "exact"
        self._spaces: tuple[KnobSpace, ...] = ()
        self._mine: set[str] = set()
        self._base = self._decisions = 0
        self._trials_before = self._spent_before_ns = 0
        self._trials = self._spent_ns = 0
        self._records: list[Record] = []
        self._counted: tuple[int, float | None] | None = None
        self.policy: Policy | None = None
        self.kept: dict[str, int] = {}
        self.remaining: float | None = None
        self.said: TunerStatus | None = None

    def settle(self, facts: JobFacts, spaces: Sequence[KnobSpace], mode: Literal["advise", "exact"]) -> None:
        """Learn what can be turned."""
        self._facts, self._spaces, self._mode = facts, tuple(spaces), mode
        self.kept = {space.knob: space.value for space in spaces}

    def start(self, policy: Policy, *, leave: Iterable[str] = ()) -> None:
        """Let `policy` begin from the kept values; it leaves the knobs `leave` alone."""
        assert self.policy is None, "one stage at a time"
        free = [space for space in self._spaces if space.knob in self.kept and space.knob not in set(leave)]
        if not free:
            policy = TuningPolicy(self._config)  # which reports that no knob can be turned
        self._mine = {space.knob for space in free}
        self._base = self._decisions
        self.policy = policy
        policy.begin(self._facts, [replace(space, value=self.kept[space.knob]) for space in free], mode=self._mode)

    def stop(self, reason: str) -> None:
        """End the stage; its last records come with the next `advance`."""
        policy, self.policy = self.policy, None
        if policy is None:
            return
        self._records += self._shift(policy.finish(reason))
        spent = policy.spent_ns  # a status may be some steps old
        self._spent_before_ns += self._spent_ns if spent is None else round(spent)
        self._trials_before += self._trials
        self._trials = self._spent_ns = 0

    def number(self) -> int:
        """Return a number for a switch that no policy decided."""
        self._decisions += 1
        return self._decisions

    def report(self, detail: str, step: Observation) -> None:
        """Add a status that is no stage's; it comes with the next `advance`."""
        said = TunerStatus(
            job=self._facts.job,
            rank=0,
            state="screening",
            detail=detail,
            step=step.step,
            wall_ns=step.wall_ns,
            exploration_ns=self._spent_before_ns + self._spent_ns,
            trials=self._trials_before + self._trials,
        )
        self.said = said
        self._records.append(said)

    def see(self, step: Observation) -> None:
        """Drop the knobs that are turned no more from what is kept."""
        if any(knob not in step.values for knob in self.kept):
            self.kept = {knob: value for knob, value in self.kept.items() if knob in step.values}

    def advance(self, observations: Sequence[Observation]) -> tuple[TuningTurn | None, list[Record]]:
        """Let the stage take the steps; return its request with all knobs named, and records for people."""
        turn: TuningTurn | None = None
        if self.policy is not None:
            mine = [
                replace(step, values={k: v for k, v in step.values.items() if k in self._mine}) for step in observations
            ]
            turn, said = self.policy.advance(mine)
            self._records += self._shift(said)
            if turn is not None:
                values = {**self.kept, **{k: v for k, v in turn.values.items() if k in self.kept}}
                if not turn.is_trial:
                    self.kept = dict(values)
                turn = replace(turn, decision=self._base + turn.decision, values=values)
        records, self._records = self._records, []
        return turn, records

    def _shift(self, records: Sequence[Record]) -> list[Record]:
        shifted: list[Record] = []
        for record in records:
            if isinstance(record, TunerStatus):
                self._trials, self._spent_ns = record.trials, record.exploration_ns
                record = msgspec.structs.replace(
                    record,
                    trials=self._trials_before + record.trials,
                    exploration_ns=self._spent_before_ns + record.exploration_ns,
                )
                self.said = record
            elif isinstance(record, Decision | Verdict):
                record = msgspec.structs.replace(record, decision=self._base + record.decision)
                self._decisions = max(self._decisions, record.decision)
                self._add_up(record)
            shifted.append(record)
        return shifted

    def _add_up(self, record: Decision | Verdict) -> None:
        if not isinstance(record, Verdict) or record.outcome != "kept" or record.measured_gain_ratio is None:
            return
        if self._counted == (record.step, record.evidence):
            return  # several knobs that one trial proved together
        self._counted = (record.step, record.evidence)
        self.remaining = (1.0 if self.remaining is None else self.remaining) * (1 - record.measured_gain_ratio)
