"""Tries the setting that an earlier run kept, before any search: the remembered knobs against the script's own.

Do not simply begin with the remembered values: the link may be shared today, the driver new, or the entry from another
machine, and then the job is slow from its first step without a sign.  They are a candidate like any other, tried
A B B A, and all together, because together is how they were proven.  They come first because a measurement beats any
forecast.

`TuningPolicy` runs this trial and then searches from `kept`.  Pure: no clock, no torch.
"""

from __future__ import annotations

import math
from typing import Literal

from pacecar.config import TuneConfig

from ..experiment.ab_trial import PAIRS_MAX, AbortCause, AbTrial, TrialEnd
from ..experiment.exploration_budget import TRIAL_SWITCHES, ExplorationBudget
from ..observation import Observation, RememberedSetting, TunerState
from . import phrases
from .decision_records import DecisionRecords, outcome_of
from .pace_tracker import NULL_PAIRS_MIN, TrackedPace

__all__ = ["LATENCY_STEPS_PRIOR", "TYPICAL_STEPS_MIN", "RememberedTrial"]

LATENCY_STEPS_PRIOR = 12
"""Steps from a request to its effect before it was measured (control periods of 4: gather, propose, vote)."""

TYPICAL_STEPS_MIN = 4
"""Steps under a setting before its typical pace is used."""


class RememberedTrial:
    """One trial of `remembered` against `kept`; `kept` holds the values to go on from when it `is_over`.

    It charges the policy's `budget` and writes to its `records`.  `disproved` says why the setting does not hold here;
    None if it holds or the trial did not finish.
    """

    def __init__(
        self,
        config: TuneConfig,
        remembered: RememberedSetting,
        kept: dict[str, int],
        records: DecisionRecords,
        budget: ExplorationBudget,
    ) -> None:
        self._config = config
        self._remembered = remembered
        self._records = records
        self._budget = budget
        self._pace = TrackedPace()
        self._trial: AbTrial | None = None
        self._numbers: list[int] = []
        self._last: Observation | None = None
        self._steps = 0
        self._hold: str | None = None
        self.in_force: dict[str, int] = {}
        self.kept = kept
        self.is_over = False
        self.disproved: str | None = None

    @property
    def wanted(self) -> tuple[dict[str, int], bool]:
        """The values to be in force now, and whether they are on trial."""
        return (self.kept, False) if self._trial is None else (self._trial.wanted, True)

    def hold(self, reason: str | None, *, is_brief: bool) -> None:
        """Judge no step for a while; a hold that is not brief ends the trial and leaves it to a later run."""
        self._hold = reason
        if self._trial is not None and self._last is not None:
            if reason is not None and not is_brief:
                self.abandon(f"tuning froze: {reason}")
            else:
                self._trial.interrupt(self._last.step)

    def advise(self, step: Observation) -> None:
        """Record what would be tried, where nothing may be turned."""
        self._decide("advise", step)
        self.is_over = True

    def observe(self, step: Observation) -> None:
        """Take one step."""
        self._last = step
        values = {knob: step.values[knob] for knob in self.kept if knob in step.values}
        if len(values) < len(self.kept) or not (math.isfinite(step.pace_ns) and step.pace_ns > 0):
            self._end_early(values)
            return
        if values != self.in_force:
            self._budget.close_stretch()
        self.in_force = values
        self._budget.pass_step(step.pace_ns)
        if self._hold is not None:
            self._pace.interrupt()
            if self._trial is not None:
                self._trial.interrupt(step.step)
        elif self._trial is not None:
            self._follow(self._trial, step)
        else:
            self._warm_up(step)

    def abandon(self, reason: str, cause: AbortCause = AbortCause.CUT_SHORT) -> None:
        """End the trial, if it has begun, without a verdict on the setting."""
        if self._trial is not None and self._last is not None:
            evidence = self._trial.evidence
            gain = None if evidence is None else evidence.gain_ratio
            self._conclude(self._trial, TrialEnd(cause, evidence, gain, reason), self._last)

    def _warm_up(self, step: Observation) -> None:
        self._steps += 1
        if self.in_force != self.kept or max(self._steps, step.step) <= self._config.warmup_steps:
            self._pace.interrupt()
        else:
            self._pace.observe(step.pace_ns, profiled=step.profiled)
        is_settled = self._pace.settled_steps + LATENCY_STEPS_PRIOR >= self._pace.window_steps
        if len(self._pace.nulls) < NULL_PAIRS_MIN or not is_settled or self._pace.recent_steps < TYPICAL_STEPS_MIN:
            self._report("warming", f"before trying what is remembered: {self._remembered.origin}", step)
            return
        if not step.can_pay_for(TRIAL_SWITCHES):
            self._report("warming", phrases.UNEARNED, step)
            return
        self._trial = AbTrial(
            self.kept,
            {**self.kept, **self._remembered.knobs},
            self._pace.of_incumbent(),
            dead_band=self._config.dead_band,
            false_accept_rate=self._config.false_accept_rate,
        )
        self._records.trials += 1
        self._decide("trial", step)
        self._report("trial", self._progress(self._trial), step)

    def _follow(self, trial: AbTrial, step: Observation) -> None:
        if self.in_force != self.kept and not step.profiled:
            self._budget.charge(step.pace_ns - self._pace.mean_ns)
        end = trial.observe(step)
        is_spent = self._budget.left_ns(step.pace_ns, is_forecast=False) < 0
        if end is None and is_spent and not trial.looks_better:
            end = trial.give_up("the exploration budget is spent")
        if end is None:
            self._report("trial", self._progress(trial), step)
        else:
            self._conclude(trial, end, step)

    def _end_early(self, values: dict[str, int]) -> None:
        """End the trial: a knob can no longer be turned, or the pace is absurd; the search handles that."""
        is_cause = any(knob in self._remembered.knobs for knob in self.kept.keys() - values.keys())
        detail = "the ranks could not apply it" if is_cause else "what was measured cannot be true"
        self.abandon(detail, AbortCause.TAKEN_BACK if is_cause else AbortCause.CUT_SHORT)
        self.kept = {knob: self.kept[knob] for knob in values} if values else self.kept
        self.is_over = True

    def _decide(self, kind: Literal["trial", "advise"], step: Observation) -> None:
        reason = f"{self._change()}: {self._remembered.origin}"
        self._numbers = [
            self._records.decide(
                kind, knob, self.kept[knob], value, step, reason=reason, expected_gain_ratio=self._remembered.gain_ratio
            )
            for knob, value in sorted(self._remembered.knobs.items())
        ]

    def _conclude(self, trial: AbTrial, end: TrialEnd, step: Observation) -> None:
        self._trial, self.is_over = None, True
        outcome = outcome_of(end.cause)
        measured = "" if end.gain_ratio is None else f" {phrases.saving(end.gain_ratio)},"
        detail = f"{self._change()}:{measured} {end.detail}; remembered: {self._remembered.gain_ratio * 100:.1f} %"
        for index, (number, knob) in enumerate(zip(self._numbers, sorted(self._remembered.knobs), strict=True)):
            self._records.conclude(
                number,
                knob,
                outcome,
                step,
                gain_ratio=end.gain_ratio,
                evidence=end.evidence,
                trial_steps=trial.steps,
                # One trial, several verdicts: the first carries the cost of all.
                exploration_ns=round(self._budget.balance_ns) if index == 0 else 0,
                reason=detail,
            )
        if outcome == "kept":
            self.kept = {**self.kept, **self._remembered.knobs}
        elif outcome in ("rolled_back", "barred"):
            self.disproved = detail
        self._report("screening", f"{outcome.replace('_', ' ')}: {detail}", step)

    def _change(self) -> str:
        return phrases.changes(self.kept, sorted(self._remembered.knobs.items()))

    def _progress(self, trial: AbTrial) -> str:
        return f"{self._change()}: remembered, pair {min(trial.pairs + 1, PAIRS_MAX)} of at most {PAIRS_MAX}"

    def _report(self, state: TunerState, detail: str, step: Observation) -> None:
        self._records.report(state, detail, self._budget.spent_ns, step)
