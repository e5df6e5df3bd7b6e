"""Selects the next trial, if any, and learns from the outcome of each.

It combines what is left to try (`GeometricSearch`, `JointMoves`), what that may gain (`GainModel`) and what may still
be lost (`ExplorationBudget`).  The policy only decides when a trial may begin.

The next trial is the candidate that should bring most over what it costs (`forecast`), of those that are worth their
trial and fit into the budget.  The first rule stops a job whose default is best from being explored without end; the
second bounds the cost of wrong forecasts.

Pure.  Left out: when a trial begins (the policy), how it is judged (`ab_trial`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pacecar.config import TuneConfig

from ..experiment.ab_trial import SETTLE_STEPS, AbortCause, AbTrial, TrialEnd
from ..experiment.exploration_budget import PRIOR_LOSS_RATIO, SWITCH_STEPS, ExplorationBudget
from ..forecast.bucket_model import distinct_buckets
from ..forecast.forecast import Forecast, expected_gain, expected_loss, horizon_steps, proof_pairs
from ..forecast.gain_model import GainModel, joint_name
from ..observation import JobFacts, KnobSpace, NodeView, Observation, bounded
from . import phrases
from .decision_records import Outcome
from .geometric_search import (
    WINNABLE_RATIO_MIN,
    Candidate,
    Changes,
    GeometricSearch,
    best_advice,
    is_choice,
    memory_shortage,
    octaves,
)
from .joint_moves import SUITED, JointMoves

__all__ = ["CandidateChoice", "CandidateSelection", "known_gain"]

WINDOWS_WISE = 3
WAIT_FOR_WINDOWS_STEPS = 200
"""Wait for this many windows before a trial with an uncertain forecast, but only in the first WAIT_FOR_WINDOWS_STEPS
steps, because windows have a budget of their own.  In a single window one late rank can distort a bucket's cost."""


UNSURE_ERROR = 0.1
"""Relative error of the pace of a candidate that was given up before two pairs."""

TIE_SHARE = 0.99
"""Of a knob's candidates that should bring this share of the best one's, the nearest is tried."""

WAITING = "waiting for windows to tell more"


@dataclass(frozen=True, slots=True)
class CandidateChoice:
    """The next trial; or why there is none, and what the budget lacks if that is the reason."""

    candidate: Candidate | None
    why_not: str = ""
    missing_ns: float | None = None
    untried: int = 0


def pair_steps(window_steps: int) -> int:
    """Return the steps of a pair: one stretch of two windows, with the steps that settle before it.

    Two stretches, one of each setting, hold two pairs.  A clear verdict needs this many steps of the candidate, plus
    those until the next switch.
    """
    return 2 * window_steps + SETTLE_STEPS


def known_gain(forecast: Forecast | None) -> float | None:
    """Return the expected gain; None without a forecast or with only a lower bound."""
    return None if forecast is None or forecast.is_floor else forecast.gain_ratio


class CandidateSelection:
    """Chooses trials and learns from their ends."""

    def __init__(self, config: TuneConfig, facts: JobFacts, spaces: Sequence[KnobSpace]) -> None:
        self._config = config
        self.model = GainModel(facts)
        self.spaces: list[KnobSpace] = []
        for space in filter(None, (bounded(space, config) for space in spaces)):
            if space.knob == "bucket_bytes":
                has_own_first = all(other.knob != "first_bucket_bytes" for other in spaces)
                first = facts.first_bucket_bytes if has_own_first and space.value == facts.bucket_bytes else None
                space = distinct_buckets(space, facts.gradient_bytes, first)
            if len(space.domain) > 1:
                self.spaces.append(space)
        self._search = GeometricSearch(self.spaces)
        self._joint = JointMoves(self.spaces)
        self._unproven: dict[Changes, tuple[float, ...]] = {}
        self._node: NodeView | None = None

    def note_node(self, node: NodeView | None) -> None:
        """Take the state of the node, None if unknown."""
        self._node = node

    def candidates(self, kept: dict[str, int]) -> tuple[list[Candidate], list[str]]:
        """Return what could be tried from `kept`, moves of one knob before joint ones, and why others were left out."""
        found, left_out = self._single_moves(kept)
        best = max([0.0, *(known_gain(one.forecast) or 0.0 for one in found)])
        dead_band = self._config.dead_band
        joint = self._joint.candidates(kept, self._firsts(kept, found), self.model, best=best, dead_band=dead_band)
        # What needs another knob is not tried on a guess before that knob was tried alone.
        alone = {one.changes[0] for one in found}
        return found + [one for one in joint if one.forecast is not None or alone.isdisjoint(one.changes)], left_out

    def _firsts(self, kept: dict[str, int], found: Sequence[Candidate]) -> dict[str, list[int]]:
        """Return the values whose best buckets are worth a look: what could be tried alone, and what was."""
        winnable, firsts = self.model.winnable_ratio, {}
        if winnable is None or winnable < WINNABLE_RATIO_MIN:
            return {}
        for knob in (space.knob for space in self.spaces if space.knob in SUITED):
            here, is_short = kept[knob], memory_shortage(knob, node=self._node) is not None
            values = {*self._search.tried(knob), *(one.value for one in found if one.knob == knob)} - {here}
            firsts[knob] = sorted(value for value in values if value < here or not is_short)
        return firsts

    def _single_moves(self, kept: dict[str, int]) -> tuple[list[Candidate], list[str]]:
        model = self.model
        return self._search.candidates(kept, model.expect, model.winnable_ratio, self._node)

    def is_clear(self, kept: dict[str, int], typical_ns: float) -> bool:
        """Return whether the model is sure that some trial gains: then less noise need be measured first."""
        self.model.history.note_pace(kept, typical_ns)
        found, _ = self.candidates(kept)
        return _is_clear(found, self._config.dead_band)

    def choose(
        self,
        kept: dict[str, int],
        budget: ExplorationBudget,
        *,
        typical_ns: float,
        pair_noise: float,
        window_steps: int,
        latency: int,
        steps: int,
    ) -> CandidateChoice:
        """Return the best trial that is worth its cost and fits the budget, after `steps` steps of the job."""
        trial_steps = pair_steps(window_steps) + latency
        self.model.history.note_pace(kept, typical_ns)
        found, left_out = self.candidates(kept)
        is_young = steps < WAIT_FOR_WINDOWS_STEPS and 0 < self.model.history.timed_windows(kept) < WINDOWS_WISE
        if is_young and not _is_clear(found, self._config.dead_band):
            found, left_out = [c for c in found if c.forecast is None or c.forecast.is_floor], [WAITING, *left_out]
        worth: dict[Candidate, float] = {}
        for candidate in found:
            change = phrases.changes(kept, candidate.changes)
            net_steps, forecast = self._net_steps(candidate, trial_steps, steps), candidate.forecast
            if forecast is None or forecast.is_floor:  # always worth it: the prior only says which comes first
                worth[candidate] = net_steps
                continue
            pairs = proof_pairs(forecast.gain_ratio + forecast.spread_ratio, pair_noise)
            proof_steps = pair_steps(window_steps) * pairs
            if net_steps <= 0:
                left_out.append(phrases.hopeless(change))
            elif proof_steps > horizon_steps(steps):
                left_out.append(phrases.unprovable(change, proof_steps))
            else:
                worth[candidate] = net_steps
        if not worth:
            return CandidateChoice(None, "; ".join(left_out) or "nothing near it is better")
        costs = {candidate: typical_ns * self._cost_steps(candidate, trial_steps) for candidate in worth}
        affordable = [
            candidate
            for candidate, cost in costs.items()
            if cost <= budget.left_ns(typical_ns, is_forecast=known_gain(candidate.forecast) is not None)
        ]
        if not affordable:
            return CandidateChoice(None, missing_ns=min(costs.values()), untried=len(worth))
        best = max(affordable, key=lambda candidate: worth[candidate])
        knobs = dict(best.changes).keys()
        as_good = [
            one for one in affordable if dict(one.changes).keys() == knobs and worth[one] >= TIE_SHARE * worth[best]
        ]
        distances = {one: sum(octaves(value, kept[knob]) for knob, value in one.changes) for one in as_good}
        return CandidateChoice(min(as_good, key=lambda one: distances[one], default=best))

    def is_outdone(self, kept: dict[str, int], candidate: Candidate, trial: AbTrial) -> bool:
        """Return whether an untried candidate promises more than `trial` shows of its own, and in fewer further pairs.

        A trial whose gain is small at this noise would keep the others waiting for a thousand steps.  Its pairs count
        when it is tried again.
        """
        band, pair_noise = self._config.dead_band, trial.error * math.sqrt(trial.pairs)
        shown = expected_gain(trial.mean_saving, trial.error, band)
        pairs_left = proof_pairs(trial.mean_saving, pair_noise) - trial.pairs
        return any(
            other.changes != candidate.changes
            and other.changes not in self._unproven
            and other.forecast is not None
            and not other.forecast.is_floor
            and expected_gain(other.forecast.gain_ratio, other.forecast.spread_ratio, band) > shown
            and proof_pairs(other.forecast.gain_ratio + other.forecast.spread_ratio, pair_noise) < pairs_left
            for other in self.candidates(kept)[0]
        )

    def _cost_steps(self, candidate: Candidate, trial_steps: int) -> float:
        forecast = candidate.forecast
        if forecast is None or forecast.is_floor:
            loss = PRIOR_LOSS_RATIO
        else:
            loss = expected_loss(forecast.gain_ratio, forecast.spread_ratio)
        return 2 * SWITCH_STEPS + trial_steps * loss

    def _net_steps(self, candidate: Candidate, trial_steps: int, steps: int) -> float:
        """Return what a trial should bring over its cost, in steps' worth of time."""
        forecast, gain = candidate.forecast, candidate.rank_gain
        spread = abs(gain) / 2 if forecast is None or forecast.is_floor else forecast.spread_ratio
        worth = expected_gain(gain, spread, self._config.dead_band) * horizon_steps(steps)
        return worth - self._cost_steps(candidate, trial_steps)

    def pairs_max(self, steps: int, window_steps: int) -> int:
        """Return the most pairs of a trial that begins after `steps` steps: half of those that may still come."""
        return horizon_steps(steps) // (2 * pair_steps(window_steps))

    def savings_of(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the pairs of an earlier, undecided trial of the candidate under the present conditions."""
        return self._unproven.get(candidate.changes, ())

    def beaten(self, knob: str, value: int) -> None:
        """Note that the value lost to the one in force."""
        self._search.lost(knob, value)

    def learn(
        self, candidate: Candidate, kept: dict[str, int], end: TrialEnd, outcome: Outcome, trial: AbTrial,
        *, typical_ns: float,
    ) -> None:  # fmt: skip
        """Take the end of the trial of `candidate` against `kept`."""
        knob, value, search, changes = candidate.knob, candidate.value, self._search, candidate.changes
        if end.gain_ratio is not None:
            tried = {**kept, **dict(changes)}
            self.model.history.note_pace(tried, typical_ns * (1 - end.gain_ratio), min(trial.error, UNSURE_ERROR))
            if trial.savings:
                self.model.history.note_saving(kept, tried, trial.mean_saving, trial.error)
            if candidate.forecast is not None and not candidate.forecast.is_floor:
                self.model.history.remember(joint_name(changes), candidate.forecast, end.gain_ratio)
        self._unproven[changes] = trial.savings
        is_undecided = end.cause is AbortCause.UNDECIDED or (
            end.cause is AbortCause.FUTILE and end.may_gain(self._config.dead_band)
        )
        if outcome == "kept":
            self._unproven.clear()
            for choice in filter(is_choice, dict(changes)):
                search.reconsider(choice)
                self._joint.forget()
            for changed in dict(changes):
                search.lost(changed, kept[changed])
            self._joint.close(tuple((changed, kept[changed]) for changed in dict(changes)))
        elif len(changes) > 1:
            if outcome == "barred":
                self._joint.bar(changes)
            else:
                self._joint.close(changes, is_undecided=is_undecided)
        elif outcome == "barred":
            search.bar(knob, value)
        elif is_undecided:
            search.undecided(knob, value)
        elif end.cause is AbortCause.FUTILE:
            search.level(knob, value)
        else:
            search.lost(knob, value)

    def keep_barred(self, before: CandidateSelection) -> None:
        """Rule out what an earlier search of the same job ruled out."""
        self._search = GeometricSearch(self.spaces, before._search.barred)
        self._joint = JointMoves(self.spaces, before._joint.barred)

    def drop(self, knobs: Sequence[str]) -> None:
        """Go on without these knobs, which can no longer be turned; what is barred stays so."""
        self.spaces = [space for space in self.spaces if space.knob not in knobs]
        self.keep_barred(self)
        self.model.forget()

    def retry_undecided(self) -> bool:
        """Let undecided values be tried once more; return whether there were any."""
        had_joint = self._joint.retry_undecided()
        return self._search.retry_undecided() or had_joint

    def reopen(self, windows: Sequence[Observation]) -> None:
        """Forget what was learned, because conditions changed, and learn from these later windows."""
        self._search.forget()
        self._joint.forget()
        self.model.forget()
        for window in windows:
            self.model.learn(window)
        self._unproven.clear()

    def advise(self, kept: dict[str, int], typical_ns: float) -> tuple[list[Candidate], list[str]]:
        """Return what to advise, at most one candidate for each knob, and why the rest is left out."""
        self.model.history.note_pace(kept, typical_ns)
        found, left_out = self._single_moves(kept)
        best = []
        for space in self.spaces:
            near = [candidate for candidate in found if candidate.knob == space.knob]
            one = best_advice(space, near, self._expect(space.knob, kept), kept, self._config.dead_band)
            best += [] if one is None else [one]
        return best, left_out

    def _expect(self, knob: str, kept: dict[str, int]) -> Callable[[int], Forecast | None]:
        return lambda value: self.model.expect(knob, kept, value)


def _is_clear(found: Sequence[Candidate], dead_band: float) -> bool:
    known = (candidate.forecast for candidate in found)
    return any(one is not None and not one.is_floor and one.sure_ratio > dead_band for one in known)
