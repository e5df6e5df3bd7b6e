"""Implements the default policy: warms up, searches by trials, keeps what is proven, then watches for changes.

    warming -> screening <-> trial
                   |  ^
                   v  | the pace moved, or the budget allows again
                watching                          any of them -> frozen, and back when its cause is over

A tuner that searches once and stops loses what it won when conditions change; one that searches forever pays forever.
This one searches while something untried is worth a trial and there is time left to lose (`candidate_selection`), then
watches.  The setting that an earlier run kept is its first candidate (`remembered_trial`).

The ranks carry out a Proposal some steps later or never, so a step is judged by the values that it had, never by what
was requested.  The latest proposal counts; the tuner ignores one that is already in force.

Pure: no clock, no random numbers, no torch.  The same observations give the same answers.
Frozen for good: absurd numbers, switches that do not come.  For a while: a rank that stalls, and what `hold` says.
Left out: memory headroom (the actuator refuses).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from pacecar.config import TuneConfig

from ..experiment.ab_trial import SETTLE_STEPS, WAIT_STEPS_MAX, AbortCause, AbTrial, CandidatePrior, TrialEnd
from ..experiment.exploration_budget import TRIAL_SWITCHES, ExplorationBudget
from ..experiment.sequential_test import is_broken
from ..observation import JobFacts, KnobSpace, Observation, Policy, Proposal, Record, TunerState, absurdity
from . import phrases
from .candidate_selection import CandidateSelection, known_gain
from .change_detector import STALL_STEPS, ChangeDetector, DetectedChange, StallDetector
from .decision_records import DecisionRecords, outcome_of
from .geometric_search import Candidate
from .pace_tracker import NULL_PAIRS_MIN, TrackedPace
from .remembered_trial import LATENCY_STEPS_PRIOR, TYPICAL_STEPS_MIN, RememberedTrial

__all__ = ["TuningPolicy", "make_policy"]

NEVER_CAME_MAX = 2
"""Freeze after this many trials in a row whose switch never came: the ranks no longer agree."""

ADVICE_MAX = 32
"""Most records of advice in one run: more would not be read."""

SECOND_LOOK_STEPS = 250
"""Steps without a trial before undecided candidates are tried again; doubled each time, so that it ends by itself."""

ROUND_STEPS = 50
"""Predicted steps in a status are rounded up to a multiple of this, and reported again only when off by two of them."""

NULL_PAIRS_SURE = 1
"""Null pairs before a first trial that the model is sure of: it needs a third pair, but begins 18 steps sooner."""


@dataclass(frozen=True, slots=True)
class OpenTrial:
    """A trial under way: `what` is tried, with a decision for each knob.

    `balance_ns` is the exploration budget's balance when it began.
    """

    trial: AbTrial
    decisions: tuple[int, ...]
    candidate: Candidate
    what: str
    balance_ns: float

    @property
    def detail(self) -> str:
        """The trial's progress, in words."""
        return phrases.progress(self.what, self.trial.pairs, self.trial.pairs_max, self.trial.evidence)


class TuningPolicy(Policy):
    """The default policy; see the module's docstring."""

    def __init__(self, config: TuneConfig) -> None:
        self._config = config
        self._records = DecisionRecords()
        self._turns_knobs = True
        self._held: str | None = None
        self._is_brief = False
        self._budget = ExplorationBudget(config.exploration_budget)
        self._remembered: RememberedTrial | None = None
        self._disproved: str | None = None
        self._search(JobFacts(job="", world_size=1), ())

    def _search(self, facts: JobFacts, spaces: Sequence[KnobSpace]) -> None:
        """Begin to search from the values of `spaces`, with nothing learned; records and losses go on."""
        self._facts, self._spaces = facts, tuple(spaces)
        self._records.start_over(self._budget.spent_ns)
        self._state: TunerState = "warming"
        self._kept = {space.knob: space.value for space in spaces}
        self._requested: tuple[dict[str, int], bool] = (dict(self._kept), False)
        self._in_force: dict[str, int] = {}
        self._selection = CandidateSelection(self._config, facts, spaces)
        self._pace = TrackedPace()
        self._changes = ChangeDetector()
        self._budget = ExplorationBudget(self._config.exploration_budget)
        self._open: OpenTrial | None = None
        self._last: Observation | None = None
        self._mean_ns: float | None = None
        self._stalls = StallDetector()
        self._latency_steps: int | None = None
        self._steps = 0
        self._since_switch = 0
        self._steps_off_kept = self._never_came = 0
        self._watching_since = 0
        self._patience_steps = SECOND_LOOK_STEPS
        self._until = 0
        self._advice: dict[str, tuple[int, bool]] = {}
        self._resumes_on: Literal["never", "calm", "release"] = "never"

    @property
    def spent_ns(self) -> float:
        """Time lost to exploring so far."""
        return self._records.spent_before_ns + self._budget.spent_ns

    # --- the Policy protocol ---

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Begin, or start over, with these knobs; a remembered setting is the first candidate."""
        self._turns_knobs, self._records.job = turns_knobs, facts.job
        before = self._selection
        self._search(facts, spaces)
        self._selection.keep_barred(before)
        self._remembered = None
        if facts.remembered is not None:
            self._remembered = RememberedTrial(
                self._config, facts.remembered, dict(self._kept), self._records, self._budget
            )

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Judge no step from the next one on; None releases."""
        self._held, self._is_brief = reason, is_brief
        if self._remembered is not None:
            self._remembered.hold(reason, is_brief=is_brief)

    def advance(self, observations: Sequence[Observation]) -> tuple[Proposal | None, list[Record]]:
        """Take the steps since the last call; return what it proposes, if anything, and records for people."""
        first = self._remembered
        for step in observations:
            if not step.values.keys() <= self._kept.keys():  # of knobs that a person set, which are left alone
                step = replace(step, values={knob: v for knob, v in step.values.items() if knob in self._kept})
            if first is not None:
                self._try_remembered(first, step)
            elif self._held is not None or self._state == "frozen":
                self._skip(step)
            else:
                self._observe(step)
        proposal = self._propose()
        if first is not None and first.is_over:
            self._remembered, self._disproved = None, first.disproved
            left = [replace(space, value=first.kept[space.knob]) for space in self._spaces if space.knob in first.kept]
            self._search(self._facts, left)
        return proposal, self._records.drain()

    def number(self) -> int:
        """Return the next decision's number, for an order."""
        self._records.decisions += 1
        return self._records.decisions

    def disproved(self) -> str | None:
        """Return, once, why the remembered setting does not hold here."""
        reason, self._disproved = self._disproved, None
        return reason

    def finish(self, reason: str = "the job ended") -> list[Record]:
        """End: no more steps will come; return verdicts (outcome "abandoned") for what is still open."""
        if self._remembered is not None:
            self._remembered.abandon(f"{reason} before it was decided")
        if self._open is not None and self._last is not None:
            self._abandon(self._open, f"{reason} before it was decided", self._last)
        return self._records.drain()

    # --- one step ---

    def _try_remembered(self, first: RememberedTrial, step: Observation) -> None:
        if first.is_over:
            return  # the search begins with the next call
        if not self._turns_knobs:
            first.advise(step)
            return
        first.observe(step)
        self._in_force = first.in_force
        if self._held is not None and not self._is_brief:
            self._report("frozen", self._held, step)

    def _skip(self, step: Observation) -> None:
        """Take a step while frozen or held: check only whether that is over."""
        self._in_force = {knob: step.values[knob] for knob in self._kept if knob in step.values}
        if self._last is None or step.step > self._last.step:
            self._last = step
        self._budget.pass_step(step.pace_ns)
        self._pace.interrupt()
        if self._open is not None:
            self._open.trial.interrupt(step.step)
        if self._held is not None:
            if not self._is_brief and self._resumes_on != "release" and self._state != "frozen":
                self._freeze(self._held, step, until="release")
            return
        is_calm = self._stalls.is_over(step)
        if self._resumes_on == "release" or (self._resumes_on == "calm" and is_calm):
            self._resumes_on = "never"
            self._stalls.restart()
            self._report("screening" if self._turns_knobs else "advising", "going on", step)

    def _observe(self, step: Observation) -> None:
        absurd = absurdity(step, self._last)
        if absurd is not None:
            self._freeze(absurd, step)
            return
        failing = self._stalls.count(step)
        if failing is not None:
            self._freeze(failing, step, until="calm")
            return
        if step.ledger is not None and step.ledger.checkpoint_ns > 0:
            step = replace(step, profiled=True)  # its pace is that of the checkpoint, not of the knobs
        missing = [knob for knob in self._kept if knob not in step.values]
        if missing:
            self._drop_knobs(missing, step)
        self._last = step
        self._steps += 1
        self._account(step)
        self._selection.model.learn(step)
        self._selection.note_node(step.node)
        self._changes.keep_window(step)
        if self._open is not None:
            self._follow(self._open, step)
            return
        if self._in_force != self._kept:
            self._pace.interrupt()
            self._steps_off_kept += 1
            if self._steps_off_kept > 2 * WAIT_STEPS_MAX:
                self._freeze(f"the ranks did not come back to {self._describe(self._kept)}", step)
            return
        self._steps_off_kept = 0
        if max(self._steps, step.step) <= self._config.warmup_steps:
            self._report("warming", f"the first {self._config.warmup_steps} steps are not judged", step)
            return
        level = self._pace.observe(step.pace_ns, profiled=step.profiled)
        if self._pace.recent_steps >= self._pace.window_steps:
            self._mean_ns = self._pace.mean_ns
        if level is not None and self._pace.recent_steps >= 2 * STALL_STEPS:  # by then a stall is not the median
            self._stalls.usual_ns = self._pace.typical_ns
        self._decide(level, step)

    def _decide(self, level: float | None, step: Observation) -> None:
        """Take a step of the kept setting with no trial open: check for a change, or begin a trial."""
        nulls = len(self._pace.nulls)
        may_be_sure = level is not None and nulls >= NULL_PAIRS_SURE and self._turns_knobs
        if nulls < NULL_PAIRS_MIN and not (may_be_sure and self._selection.is_clear(self._kept, self._pace.typical_ns)):
            self._report("warming", "measuring the pace and its noise with nothing changed", step)
            return
        change = self._changes.observe(self._kept, level, self._pace, step)
        if change is not None:
            self._reopen(change, step)
        elif level is not None and self._is_patience_over:
            self._retry_undecided(step)
        if not self._turns_knobs:
            if level is not None or self._state != "advising":
                self._advise(step)
            return
        if level is not None or self._state != "watching":
            self._screen_next(step)

    def _account(self, step: Observation) -> None:
        """Charge the exploration budget with what this step lost to a trial."""
        values = {knob: step.values[knob] for knob in self._kept}
        if values != self._in_force:
            if self._in_force:
                self._budget.close_stretch()
            self._in_force, self._since_switch = values, 0
        self._since_switch += 1
        self._budget.pass_step(step.pace_ns)
        is_settling = self._since_switch <= SETTLE_STEPS and self._records.decisions > 0
        if self._mean_ns is None or step.profiled or self._stalls.is_stall(step):
            return  # a stalled rank is not the candidate's fault
        if values != self._kept or is_settling:
            self._budget.charge(step.pace_ns - self._mean_ns)

    # --- screening and trials ---

    def _screen_next(self, step: Observation) -> None:
        """Open the best trial, or report why there is none."""
        if not self._selection.spaces:
            self._report("watching", "no knob can be turned here", step)
            return
        latency = self._latency_steps or LATENCY_STEPS_PRIOR
        pace = self._pace
        if pace.settled_steps + latency < pace.window_steps or pace.recent_steps < TYPICAL_STEPS_MIN:
            self._report("screening", f"letting {self._describe(self._kept)} settle", step)
            return
        if self._changes.awaits_window(step.step):
            self._report("screening", "waiting for a profiled step since the pace changed", step)
            return
        typical_ns = pace.typical_ns
        if not step.can_pay_for(TRIAL_SWITCHES):
            self._keep_watching(phrases.UNEARNED, step)
            return
        choice = self._selection.choose(
            self._kept,
            self._budget,
            typical_ns=typical_ns,
            pair_noise=math.sqrt(2) * pace.window_noise,
            window_steps=pace.window_steps,
            latency=latency,
            steps=self._steps,
        )
        if choice.candidate is not None:
            self._begin_trial(choice.candidate, step)
            return
        if choice.missing_ns is None:
            self._keep_watching(f"{self._describe(self._kept)}: {choice.why_not}", step)
            return
        wait = self._budget.wait_steps(typical_ns, choice.missing_ns)
        if wait is not None and abs(step.step + wait - self._until) > 2 * ROUND_STEPS:
            self._until = -(-(step.step + wait) // ROUND_STEPS) * ROUND_STEPS
        until = "and stays so" if wait is None else f"until about step {self._until}"
        self._keep_watching(f"the exploration budget is spent {until}; {choice.untried} settings untried", step)

    def _begin_trial(self, candidate: Candidate, step: Observation) -> None:
        is_promising = (known_gain(candidate.forecast) or 0.0) > self._config.dead_band
        trial = AbTrial(
            self._kept,
            {**self._kept, **dict(candidate.changes)},
            self._pace.of_incumbent(),
            dead_band=self._config.dead_band,
            false_accept_rate=self._config.false_accept_rate,
            latency_steps=self._latency_steps,
            prior=CandidatePrior(self._selection.savings_of(candidate), is_promising),
            pairs_max=self._selection.pairs_max(self._steps, self._pace.window_steps),
        )
        self._records.trials += 1
        decisions = self._decide_on("trial", candidate, step)
        what = phrases.changes(self._kept, candidate.changes)
        self._open = OpenTrial(trial, decisions, candidate, what, self._budget.balance_ns)
        self._mean_ns = self._pace.mean_ns  # conditions may have changed a moment ago
        self._report("trial", self._open.detail, step)

    def _follow(self, opened: OpenTrial, step: Observation) -> None:
        pairs = opened.trial.pairs
        end = opened.trial.observe(step)
        change = self._changes.pace(opened.trial.take_levels(), self._pace.window_noise, step)
        for log_pace in opened.trial.take_paces():
            self._pace.follow(log_pace)
            self._mean_ns = self._pace.mean_ns  # of the steps between the trial's stretches, not of long ago
            change = change or self._changes.jump(self._pace, step)
        if end is None and change is not None:
            end = opened.trial.give_up("the pace moved meanwhile")
        is_forecast = known_gain(opened.candidate.forecast) is not None
        is_spent = self._budget.left_ns(step.pace_ns, is_forecast=is_forecast) < 0
        if end is None and is_spent and not opened.trial.looks_better:
            end = opened.trial.give_up("the exploration budget is spent")
        has_new_pair = opened.trial.pairs > pairs and opened.trial.is_screened
        if end is None and has_new_pair and self._selection.is_outdone(self._kept, opened.candidate, opened.trial):
            end = opened.trial.give_up("another promises more")
        if end is not None:
            self._close(opened, end, step, change)
        else:
            self._report("trial", opened.detail, step)

    def _close(self, opened: OpenTrial, end: TrialEnd, step: Observation, change: DetectedChange | None) -> None:
        """Keep or drop the candidate, learn from the trial, and search again if conditions changed."""
        candidate, before = opened.candidate, self._kept
        outcome = outcome_of(end.cause)
        if end.cause is not AbortCause.NEVER_CAME:
            self._latency_steps = opened.trial.latency_steps
        self._never_came = self._never_came + 1 if end.cause is AbortCause.NEVER_CAME else 0
        self._pace.add_nulls(opened.trial.nulls_seen)
        self._pace.interrupt()
        has_changed = change is None and is_broken(opened.trial.savings, dead_band=self._config.dead_band)
        if has_changed:
            change = DetectedChange(f"{opened.what} saves more or less than before", ())
        self._selection.learn(candidate, self._kept, end, outcome, opened.trial, typical_ns=self._pace.typical_ns)
        if outcome == "kept":
            self._kept = {**before, **dict(candidate.changes)}
            self._pace.restart(end.gain_ratio)
            self._changes.restart()
            if self._mean_ns is not None and end.gain_ratio is not None:
                self._mean_ns *= 1 - end.gain_ratio
        reason = self._conclude(opened, end, step)
        self._open = None
        if self._never_came >= NEVER_CAME_MAX:
            self._freeze(f"{NEVER_CAME_MAX} switches in a row did not come: the ranks do not agree", step)
            return
        self._report("screening", f"{outcome.replace('_', ' ')}: {reason}", step)
        if change is not None:
            self._pace.restart()
            self._reopen(change, step)
        if has_changed and outcome == "kept":  # proven under the new conditions, so the old value needs no trial
            for knob, _ in candidate.changes:
                self._selection.beaten(knob, before[knob])

    def _drop_knobs(self, knobs: Sequence[str], step: Observation) -> None:
        """Go on without these knobs, which can no longer be turned on all ranks."""
        opened = self._open
        if opened is not None:
            is_cause = not dict(opened.candidate.changes).keys().isdisjoint(knobs)
            detail = "the ranks could not apply it" if is_cause else f"{', '.join(knobs)} was lost meanwhile"
            self._abandon(opened, detail, step, AbortCause.TAKEN_BACK if is_cause else AbortCause.CUT_SHORT)
        for values in (self._kept, self._requested[0], self._in_force):
            for knob in knobs:
                values.pop(knob, None)
        self._selection.drop(knobs)
        self._pace.interrupt()
        self._report("screening", f"{', '.join(knobs)} can no longer be turned", step)

    def _keep_watching(self, detail: str, step: Observation) -> None:
        if self._state != "watching":
            self._watching_since = self._steps
        self._report("watching", detail, step)

    @property
    def _is_patience_over(self) -> bool:
        return self._state == "watching" and self._steps - self._watching_since >= self._patience_steps

    def _retry_undecided(self, step: Observation) -> None:
        """Allow another trial of what looked better without proof: nothing has happened for long."""
        self._patience_steps *= 2
        self._watching_since = self._steps
        if self._selection.retry_undecided():
            self._report("screening", "all quiet: a second look at what was left undecided", step)

    def _reopen(self, change: DetectedChange, step: Observation) -> None:
        """Search again: conditions changed, and what was learned about settings no longer holds."""
        steps = 0
        if change.alarm is not None:
            steps = 2 * self._pace.window_steps * change.alarm.windows
            self._pace.drop_nulls(change.alarm.windows)
            self._pace.resume(self._pace.last(step.step - change.alarm.suspected_at))
        self._selection.reopen(change.windows)
        self._advice.clear()
        self._budget.start_anew(self._mean_ns or step.pace_ns, steps=steps)
        self._patience_steps = SECOND_LOOK_STEPS
        state: TunerState = "screening" if self._turns_knobs else "advising"
        self._report(state, f"{change.what}: searching again", step)

    def wants_window(self) -> bool:
        """Return whether conditions seem to have changed and windows since then are missing."""
        is_away = self._open is not None or self._held is not None or self._state == "frozen"
        return not is_away and self._changes.wants_window()

    # --- advice ---

    def _advise(self, step: Observation) -> None:
        """Record once for each knob what would be tried and what it should save."""
        found, left_out = self._selection.advise(self._kept, self._pace.typical_ns)
        for best in found:
            key = (best.value, best.forecast is not None)
            if self._advice.get(best.knob) != key and self._records.decisions < ADVICE_MAX:
                self._advice[best.knob] = key
                self._decide_on("advise", best, step)
        advised = ", ".join(f"{best.knob} {phrases.setting(best.knob, best.value)}" for best in found)
        detail = f"would try {advised}" if advised else "; ".join(left_out) or "nothing better is expected"
        self._report("advising", detail, step)

    # --- ends, requests and records ---

    def _decide_on(self, kind: Literal["trial", "advise"], candidate: Candidate, step: Observation) -> tuple[int, ...]:
        """Record the decision to try `candidate`, or to advise it, for each of its knobs; return their numbers."""
        forecast = candidate.forecast
        reason = phrases.trial_reason(self._kept, candidate.changes, forecast)
        return tuple(
            self._records.decide(
                kind,
                knob,
                self._kept[knob],
                value,
                step,
                reason=reason,
                expected_gain_ratio=None if forecast is None else forecast.gain_ratio,
                expected_gain_error=None if forecast is None or forecast.is_floor else forecast.spread_ratio,
                expected_share_ratio=share,
            )
            for (knob, value), share in zip_longest(candidate.changes, candidate.shares)
        )

    def _conclude(self, opened: OpenTrial, end: TrialEnd, step: Observation) -> str:
        """Record what became of a trial; return the reason."""
        candidate = opened.candidate
        reason = phrases.verdict_reason(opened.what, end, candidate.forecast)
        if outcome_of(end.cause) == "kept":
            reason += phrases.attribution(candidate.changes, candidate.shares, end.gain_ratio)
        if candidate.knob == "work_share" and outcome_of(end.cause) == "kept" and candidate.forecast is not None:
            reason = f"{reason}; since step {step.step} {candidate.forecast.basis}"
        for index, (decision, (knob, _)) in enumerate(zip(opened.decisions, candidate.changes, strict=True)):
            self._records.conclude(
                decision,
                knob,
                outcome_of(end.cause),
                step,
                gain_ratio=end.gain_ratio,
                evidence=end.evidence,
                trial_steps=opened.trial.steps,
                # One trial, several verdicts: the first carries the cost of all.
                exploration_ns=0 if index else round(self._budget.balance_ns - opened.balance_ns),
                reason=reason,
            )
        return reason

    def _freeze(self, reason: str, step: Observation, *, until: Literal["never", "calm", "release"] = "never") -> None:
        self._resumes_on = until
        self._stalls.restart()
        if self._open is not None:
            self._abandon(self._open, f"tuning froze: {reason}", step)
        self._report("frozen", reason, step)

    def _abandon(
        self, opened: OpenTrial, reason: str, step: Observation, cause: AbortCause = AbortCause.CUT_SHORT
    ) -> None:
        self._open = None
        evidence = opened.trial.evidence
        end = TrialEnd(cause, evidence, None if evidence is None else evidence.gain_ratio, reason)
        self._conclude(opened, end, step)

    def _propose(self) -> Proposal | None:
        """Return what should be in force, unless it is in force and was requested last."""
        if not self._turns_knobs or not self._in_force:
            return None
        if self._remembered is not None:
            wanted, is_trial = self._remembered.wanted
        else:
            wanted, is_trial = (self._kept, False) if self._open is None else (self._open.trial.wanted, True)
        if wanted == self._in_force and (wanted, is_trial) == self._requested:
            return None
        self._requested = (dict(wanted), is_trial)
        return Proposal(decision=self._records.decisions, values=dict(wanted), is_trial=is_trial)

    def _describe(self, values: dict[str, int]) -> str:
        return ", ".join(f"{knob} {phrases.setting(knob, value)}" for knob, value in values.items())

    def _report(self, state: TunerState, detail: str, step: Observation) -> None:
        self._state = state
        self._records.report(state, detail, self._budget.spent_ns, step)


def make_policy(config: TuneConfig) -> Policy:
    """Return a fresh policy of the kind `config.policy`."""
    if config.policy == "pacecar":
        return TuningPolicy(config)
    from .sampler_policy import SamplerPolicy  # most jobs never load these
    from .throughput_doubling import DoublingSampler

    return SamplerPolicy(config, DoublingSampler(), name=config.policy)
