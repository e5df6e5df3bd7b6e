"""Selects the next trial, if any, and learns from the outcome of each.

`GeometricSearch` knows what is left to try, `GainModel` what it may be worth, `ExplorationBudget` what may still be
lost.  Here they are put together for the policy, which only knows when a trial may begin and what its steps said.

A candidate must be worth its trial (`forecast`) and be paid for out of the budget.  The first keeps a job whose default
is best from being explored because nothing forbids it.  The second bounds what wrong forecasts cost.

Pure.  Left out: when a trial begins (the policy), how it is judged (`ab_trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pacecar.config import TuneConfig

from ..experiment.ab_trial import SETTLE_STEPS, AbortCause, TrialEnd
from ..experiment.exploration_budget import PRIOR_LOSS_RATIO, SWITCH_STEPS, ExplorationBudget
from ..forecast.bucket_timeline import distinct_buckets
from ..forecast.forecast import Forecast, expected_loss, horizon_steps, is_worth_a_trial, proof_pairs
from ..forecast.gain_model import GainModel
from ..observation import JobFacts, KnobSpace, NodeView, Observation, bounded
from . import phrases
from .decision_records import Outcome
from .geometric_search import Candidate, GeometricSearch, best_advice, is_choice

__all__ = ["CandidateChoice", "CandidateSelection", "known_gain"]

WINDOWS_WISE = 3
WAIT_FOR_WINDOWS_STEPS = 200
"""Windows of the setting in force that are waited for before a trial whose gain the model is not sure of, and the steps
of the job up to which they are.  With the first window alone one late rank can distort the cost of a bucket.  Windows
come by a budget of their own, so they are not waited for longer."""


WAITING = "waiting for windows to tell more"


@dataclass(frozen=True, slots=True)
class CandidateChoice:
    """The next trial; without a candidate why there is none, and what the budget lacks if that is why."""

    candidate: Candidate | None
    why_not: str = ""
    missing_ns: float | None = None
    untried: int = 0


def pair_steps(window_steps: int) -> int:
    """Return the steps of a pair: one stretch of two windows, with the steps that settle before it.

    Two stretches, one of each setting, hold two pairs.  For as many steps a candidate is in force before a clear
    verdict, beside those until the next switch comes.
    """
    return 2 * window_steps + SETTLE_STEPS


def known_gain(forecast: Forecast | None) -> float | None:
    """Return the expected gain; None where there is no forecast or only a lower bound."""
    return None if forecast is None or forecast.is_floor else forecast.gain_ratio


class CandidateSelection:
    """Chooses trials and learns from their ends; `savings_of` are the pairs of a trial that proved nothing."""

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
        self._screen = GeometricSearch(self.spaces)
        self._unproven: dict[tuple[str, int], tuple[float, ...]] = {}
        self._node: NodeView | None = None

    def see(self, node: NodeView | None) -> None:
        """Take what is known of the node now; None when nothing is."""
        self._node = node

    def candidates(self, kept: dict[str, int]) -> tuple[list[Candidate], list[str]]:
        """Return what could be tried from `kept`, best first, and the reasons for what was left out."""
        model = self.model
        return self._screen.candidates(kept, model.expect, model.exposed_ratio, self._node, self._config.dead_band)

    def is_clear(self, kept: dict[str, int], typical_ns: float) -> bool:
        """Return whether the model is sure that the first trial gains: then it may begin with less noise measured."""
        self.model.note_pace(kept, typical_ns)
        found, _ = self.candidates(kept)
        return _is_clear(found, self._config.dead_band)

    def choose(
        self,
        kept: dict[str, int],
        purse: ExplorationBudget,
        *,
        typical_ns: float,
        pair_noise: float,
        window_steps: int,
        latency: int,
        steps: int,
    ) -> CandidateChoice:
        """Return the best trial that is worth its cost and within the budget, after `steps` steps of the job."""
        trial_steps = pair_steps(window_steps) + latency
        self.model.note_pace(kept, typical_ns)
        found, left_out = self.candidates(kept)
        is_young = steps < WAIT_FOR_WINDOWS_STEPS and 0 < self.model.windows(kept) < WINDOWS_WISE
        if is_young and not _is_clear(found, self._config.dead_band):
            found, left_out = [c for c in found if c.forecast is None or c.forecast.is_floor], [WAITING, *left_out]
        worth = []
        for candidate in found:
            if self._is_worth(candidate, pair_noise, window_steps, trial_steps, steps):
                worth.append(candidate)
            else:
                change = phrases.change(candidate.knob, kept[candidate.knob], candidate.value)
                left_out.append(f"{change}: not expected to pay for a trial")
        if not worth:
            return CandidateChoice(None, "; ".join(left_out) or "nothing near it is better")
        costs = [typical_ns * self._cost_steps(candidate, trial_steps) for candidate in worth]
        left_ns = purse.left_ns(typical_ns)
        affordable = [candidate for candidate, cost in zip(worth, costs, strict=True) if cost <= left_ns]
        return (
            CandidateChoice(affordable[0])
            if affordable
            else CandidateChoice(None, missing_ns=min(costs), untried=len(worth))
        )

    def _cost_steps(self, candidate: Candidate, trial_steps: int) -> float:
        forecast = candidate.forecast
        if forecast is None or forecast.is_floor:
            loss = PRIOR_LOSS_RATIO
        else:
            loss = expected_loss(forecast.gain_ratio, forecast.spread_ratio)
        return 2 * SWITCH_STEPS + trial_steps * loss

    def _is_worth(
        self, candidate: Candidate, pair_noise: float, window_steps: int, trial_steps: int, steps: int
    ) -> bool:
        forecast, horizon = candidate.forecast, horizon_steps(steps)
        if forecast is None or forecast.is_floor:
            return True
        pairs = proof_pairs(forecast.gain_ratio + forecast.spread_ratio, pair_noise)
        if pair_steps(window_steps) * pairs > horizon:
            return False
        return is_worth_a_trial(
            forecast.gain_ratio,
            forecast.spread_ratio,
            dead_band=self._config.dead_band,
            cost_steps=self._cost_steps(candidate, trial_steps),
            horizon=horizon,
        )

    def pairs_max(self, steps: int, window_steps: int) -> int:
        """Return how many pairs a trial may take that begins after `steps` steps: half of those that may still come."""
        return horizon_steps(steps) // (2 * pair_steps(window_steps))

    def savings_of(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the pairs of an earlier trial of the candidate that ended undecided under the present conditions."""
        return self._unproven.get((candidate.knob, candidate.value), ())

    def beaten(self, knob: str, value: int) -> None:
        """Note that the value has lost to the one in force."""
        self._screen.lost(knob, value)

    def learn(
        self, candidate: Candidate, kept: dict[str, int], end: TrialEnd, outcome: Outcome, savings: tuple[float, ...],
        *, typical_ns: float,
    ) -> None:  # fmt: skip
        """Take the end of a trial of `candidate` against `kept`."""
        knob, value, screen = candidate.knob, candidate.value, self._screen
        if end.gain_ratio is not None:
            self.model.note_pace({**kept, knob: value}, typical_ns * (1 - end.gain_ratio))
            gain = known_gain(candidate.forecast)
            if gain is not None:
                self.model.remember(knob, gain, end.gain_ratio)
        self._unproven[knob, value] = savings
        if outcome == "kept":
            self._unproven.clear()
            screen.lost(knob, kept[knob])
            if is_choice(knob):
                screen.reconsider(knob)
        elif outcome == "barred":
            screen.bar(knob, value)
        elif end.cause is AbortCause.UNDECIDED or (
            end.cause is AbortCause.FUTILE and end.may_gain(self._config.dead_band)
        ):
            screen.undecided(knob, value)
        elif end.cause is AbortCause.FUTILE:
            screen.level(knob, value)
        else:
            screen.lost(knob, value)

    def lose(self, knobs: Sequence[str]) -> None:
        """Go on without these knobs, which cannot be turned any more."""
        self.spaces = [space for space in self.spaces if space.knob not in knobs]
        self._screen = GeometricSearch(self.spaces)
        self.model.forget()

    def look_again(self) -> bool:
        """Let undecided values be tried once more; return whether there were any."""
        return self._screen.look_again()

    def reopen(self, windows: Sequence[Observation]) -> None:
        """Forget what was learnt, because conditions changed, and learn from these windows, which came after that."""
        self._screen.forget()
        self.model.forget()
        for window in windows:
            self.model.learn(window)
        self._unproven.clear()

    def advise(self, kept: dict[str, int], typical_ns: float) -> tuple[list[Candidate], list[str]]:
        """Return what to advise, one for each knob at most, and why not more."""
        self.model.note_pace(kept, typical_ns)
        found, left_out = self.candidates(kept)
        best = []
        for space in self.spaces:
            near = [candidate for candidate in found if candidate.knob == space.knob]
            one = best_advice(space, near, self._expect(space.knob, kept), kept, self._config.dead_band)
            best += [] if one is None else [one]
        return best, left_out

    def _expect(self, knob: str, kept: dict[str, int]) -> Callable[[int], Forecast | None]:
        return lambda value: self.model.expect(knob, kept, value)


def _is_clear(found: Sequence[Candidate], dead_band: float) -> bool:
    first = found[0].forecast if found else None
    return first is not None and not first.is_floor and first.sure_ratio > dead_band
