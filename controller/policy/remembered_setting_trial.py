"""Runs the first trial of a run, where an earlier run left a setting: the remembered knobs against the script's own.

To begin with the remembered values is obvious and wrong: the link may be shared today, the driver new, the entry
another machine's.  Then a job is slow from its first step and nothing says so.  So they are tried like any candidate,
A B B A, all knobs of the entry together, because together is how they were proven.  This trial comes before any search:
a measurement is a better guess than any forecast.

A policy of its own that ends: whoever runs it goes on with another one from the values that were kept.

Pure: no clock, no torch.  Left out: what becomes of the entry (`ordered_policy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pacecar.config import TuneConfig
from pacecar.records import Decision, TunerStatus, Verdict

from ..experiment.ab_trial import PAIRS_MAX, AbortCause, AbTrial, TrialEnd
from ..experiment.exploration_budget import ExplorationBudget
from ..experiment.switch_price import TRIAL_SWITCHES
from ..observation import JobFacts, KnobSpace, Observation, Policy, TuningTurn, bounded
from . import phrases
from .decision_records import Outcome, Record, State, outcome_of
from .detectors.pace_tracker import NULL_PAIRS_MIN, TrackedPace

__all__ = ["RememberedSettingTrial"]

LATENCY_STEPS = 12
"""Steps from a request to its effect, before any was measured (control periods of 4: gather, propose, vote)."""

TYPICAL_STEPS_MIN = 4
"""Steps before the typical pace is used."""


class RememberedSettingTrial(Policy):
    """Tries `knobs`, which once saved `gain_ratio`; `told` says where that was measured.

    When `is_over`: `kept` are the values to go on from, `outcome` is the trial's, None if there was none, and `detail`
    its reason.
    """

    def __init__(self, config: TuneConfig, knobs: Mapping[str, int], gain_ratio: float, told: str) -> None:
        self._config = config
        self._knobs = dict(knobs)
        self._gain_ratio = gain_ratio
        self._told = told
        self._facts = JobFacts(job="", world_size=1)
        self._mode: Literal["advise", "exact"] = "exact"
        self._aim: dict[str, int] = {}
        self._in_force: dict[str, int] = {}
        self._asked: tuple[dict[str, int], bool] = ({}, False)
        self._pace = TrackedPace()
        self._budget = ExplorationBudget(config.exploration_budget)
        self._trial: AbTrial | None = None
        self._last: Observation | None = None
        self._records: list[Record] = []
        self._said: tuple[State, str] | None = None
        self._steps = 0
        self._is_held = False
        self.kept: dict[str, int] = {}
        self.outcome: Outcome | None = None
        self.detail = ""
        self.is_over = False

    @property
    def spent_ns(self) -> float:
        """Time lost to exploring so far."""
        return self._budget.spent_ns

    # --- the Policy protocol ---

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, mode: Literal["advise", "exact"]) -> None:
        """Learn what can be turned; remembered values that are not possible here are left out."""
        self._facts, self._mode = facts, mode
        self.kept = {space.knob: space.value for space in spaces}
        self._asked = (dict(self.kept), False)
        possible = {space.knob: space.domain for space in (bounded(space, self._config) for space in spaces) if space}
        self._aim = {k: v for k, v in self._knobs.items() if v in possible.get(k, ()) and v != self.kept[k]}
        self.is_over = not self._aim

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Judge no step for a while; a hold that is not brief ends the trial, and leaves it to a later run."""
        self._is_held = reason is not None
        if self._trial is not None and self._last is not None:
            if reason is not None and not is_brief:
                self._abandon(f"tuning froze: {reason}")
            else:
                self._trial.interrupt(self._last.step)

    def advance(self, observations: Sequence[Observation]) -> tuple[TuningTurn | None, list[Record]]:
        """Take the steps since the last call; return the requested turn, if any, and records for people."""
        for step in observations:
            if not self.is_over:
                self._take(step)
        records, self._records = self._records, []
        return self._wish(), records

    def finish(self, reason: str = "the job ended") -> list[Record]:
        """End: no more steps will come; return verdicts (outcome "abandoned") for what is still open."""
        self._abandon(f"{reason} before it was decided")
        records, self._records = self._records, []
        return records

    # --- steps ---

    def _take(self, step: Observation) -> None:
        self._last = step
        if self._mode == "advise":
            self._decide(step, "advise")
            self.is_over = True
            return
        values = {knob: step.values[knob] for knob in self.kept if knob in step.values}
        if len(values) < len(self.kept) or not (math.isfinite(step.pace_ns) and step.pace_ns > 0):
            self._lose(values)
            return
        if values != self._in_force:
            self._budget.close_stretch()
        self._in_force = values
        self._budget.pass_step(step.pace_ns)
        if self._is_held:
            self._pace.interrupt()
            if self._trial is not None:
                self._trial.interrupt(step.step)
        elif self._trial is not None:
            self._follow(self._trial, step)
        else:
            self._warm_up(step)

    def _warm_up(self, step: Observation) -> None:
        self._steps += 1
        if self._in_force != self.kept or max(self._steps, step.step) <= self._config.warmup_steps:
            self._pace.interrupt()
        else:
            self._pace.observe(step.pace_ns, profiled=step.profiled)
        is_settled = self._pace.settled_steps + LATENCY_STEPS >= self._pace.window_steps
        if len(self._pace.nulls) < NULL_PAIRS_MIN or not is_settled or self._pace.recent_steps < TYPICAL_STEPS_MIN:
            self._say("warming", f"before trying what is remembered: {self._told}", step)
            return
        if not step.can_pay_for(TRIAL_SWITCHES):
            self._say("warming", phrases.UNEARNED, step)
            return
        self._trial = AbTrial(
            self.kept,
            {**self.kept, **self._aim},
            self._pace.of_incumbent(),
            dead_band=self._config.dead_band,
            false_accept_rate=self._config.false_accept_rate,
        )
        self._decide(step, "trial")
        self._say("trial", self._progress(self._trial), step)

    def _follow(self, trial: AbTrial, step: Observation) -> None:
        if self._in_force != self.kept and not step.profiled:
            self._budget.charge(step.pace_ns - self._pace.mean_ns)
        end = trial.observe(step)
        if end is None:
            self._say("trial", self._progress(trial), step)
            return
        self._conclude(trial, end, step)

    def _lose(self, values: dict[str, int]) -> None:
        """End the trial: a knob cannot be turned any more, or the pace is absurd; the next policy handles that."""
        lost = sorted(self.kept.keys() - values.keys())
        is_cause = any(knob in self._aim for knob in lost)
        detail = "the ranks could not apply it" if is_cause else "what was measured cannot be true"
        self._abandon(detail, AbortCause.TAKEN_BACK if is_cause else AbortCause.CUT_SHORT)
        self.kept = {knob: self.kept[knob] for knob in values} if values else self.kept
        self._asked = (dict(self.kept), True)
        self.is_over = True

    # --- records ---

    def _decide(self, step: Observation, kind: Literal["trial", "advise"]) -> None:
        for number, (knob, value) in enumerate(sorted(self._aim.items()), start=1):
            self._records.append(
                Decision(
                    job=self._facts.job,
                    decision=number,
                    kind=kind,
                    knob=knob,
                    from_value=self.kept[knob],
                    to_value=value,
                    step=step.step,
                    wall_ns=step.wall_ns,
                    reason=f"{self._change()}: {self._told}",
                    expected_gain_ratio=self._gain_ratio,
                )
            )

    def _conclude(self, trial: AbTrial, end: TrialEnd, step: Observation) -> None:
        self._trial, self.is_over = None, True
        self.outcome = outcome_of(end.cause)
        evidence = end.evidence
        measured = "" if end.gain_ratio is None else f" {phrases.saving(end.gain_ratio)},"
        self.detail = f"{self._change()}:{measured} {end.detail}; remembered: {self._gain_ratio * 100:.1f} %"
        for number, knob in enumerate(sorted(self._aim), start=1):
            self._records.append(
                Verdict(
                    job=self._facts.job,
                    decision=number,
                    knob=knob,
                    outcome=self.outcome,
                    step=step.step,
                    wall_ns=step.wall_ns,
                    measured_gain_ratio=end.gain_ratio,
                    gain_low=None if evidence is None else evidence.gain_low,
                    gain_high=None if evidence is None else evidence.gain_high,
                    evidence=None if evidence is None else evidence.e_value,
                    trial_steps=trial.steps,
                    # One trial, several verdicts: the first carries the cost of all.
                    exploration_ns=round(self._budget.balance_ns) if number == 1 else 0,
                    reason=self.detail,
                )
            )
        if self.outcome == "kept":
            self.kept = {**self.kept, **self._aim}
        self._say("screening", f"{self.outcome.replace('_', ' ')}: {self.detail}", step)

    def _abandon(self, reason: str, cause: AbortCause = AbortCause.CUT_SHORT) -> None:
        trial, step = self._trial, self._last
        if trial is not None and step is not None:
            evidence = trial.evidence
            gain = None if evidence is None else evidence.gain_ratio
            self._conclude(trial, TrialEnd(cause, evidence, gain, reason), step)

    def _change(self) -> str:
        return ", ".join(phrases.change(knob, self.kept[knob], value) for knob, value in sorted(self._aim.items()))

    def _progress(self, trial: AbTrial) -> str:
        return f"{self._change()}: remembered, pair {min(trial.pairs + 1, PAIRS_MAX)} of at most {PAIRS_MAX}"

    def _wish(self) -> TuningTurn | None:
        if self._mode == "advise" or not self._in_force:
            return None
        is_trial = self._trial is not None
        wanted = self.kept if self._trial is None else self._trial.wanted
        if wanted == self._in_force and (wanted, is_trial) == self._asked:
            return None
        self._asked = (dict(wanted), is_trial)
        return TuningTurn(decision=len(self._aim), values=dict(wanted), is_trial=is_trial)

    def _say(self, state: State, detail: str, step: Observation) -> None:
        if self._said != (state, detail):
            self._said = (state, detail)
            self._records.append(
                TunerStatus(
                    job=self._facts.job,
                    rank=0,
                    state=state,
                    detail=detail,
                    step=step.step,
                    wall_ns=step.wall_ns,
                    exploration_ns=round(self._budget.spent_ns),
                    trials=int(self._trial is not None or self.outcome is not None),
                )
            )
