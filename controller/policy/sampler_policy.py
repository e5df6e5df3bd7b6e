"""Tunes by measuring one setting after another, as other tuners do; a *sampler* chooses the next one.

    warming -> trial, trial, trial ... -> watching           any of them -> frozen, and back after a hold

The sampler names a setting and is told its pace; it never sees a step.  Everything else is here: requesting the setting
until the ranks have it in force, measuring, recording decisions and verdicts, going back when held.

These tuners are here to be compared with, so what they lack is lacking here too: no second look at the previous
setting, no test for luck, no exploration budget, no early end to a bad sample, no watching after the search.  Only
pacecar's overhead budget holds here too: a sample waits until it can pay for going there and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Protocol

from pacecar.config import TuneConfig

from ..observation import JobFacts, KnobSpace, Observation, Policy, Proposal, Record, TunerState, absurdity, bounded
from . import phrases
from .decision_records import DecisionRecords, Outcome

__all__ = ["SamplerPolicy", "SettingSampler"]

WAIT_STEPS_MAX = 128
"""Agreeing on a switch takes 4 to 16 steps; one that has not come after this many will not come."""


SAMPLE_SWITCHES = 2
"""One to the sample, one back."""


class SettingSampler(Protocol):
    """Chooses settings by the pace of earlier ones."""

    windows: int
    """Windows of one sample; its score is their median."""
    window_steps: int
    settle_steps: int
    """Steps after a switch that are not counted; 0 if the original counts them."""

    def begin(self, spaces: Sequence[KnobSpace]) -> None:
        """Start over with these knobs; other knobs stay as they are."""
        ...

    def propose(self) -> dict[str, int] | None:
        """Return the setting to measure next; None when the search is over."""
        ...

    def tell(self, values: Mapping[str, int], pace_ns: float) -> bool:
        """Take the pace of the setting proposed last; return False to measure it again after a warm-up."""
        ...

    @property
    def best(self) -> dict[str, int]:
        """The best setting so far."""
        ...


class SamplerPolicy(Policy):
    """A policy around `sampler`, called `name` in its records."""

    def __init__(self, config: TuneConfig, sampler: SettingSampler, *, name: str) -> None:
        self._config = config
        self._sampler = sampler
        self._name = name
        self._records = DecisionRecords()
        self._turns_knobs = True
        self._held: str | None = None
        self._is_brief = False
        self._start_over(())

    def _start_over(self, spaces: Sequence[KnobSpace]) -> None:
        self._records.start_over(0.0)
        self._start = {space.knob: space.value for space in spaces}
        self._proven = dict(self._start)
        self._proven_ns: float | None = None
        self._in_force: dict[str, int] = {}
        self._sample: dict[str, int] | None = None
        self._requested: tuple[dict[str, int], bool] = (dict(self._start), False)
        self._open: list[tuple[int, str, str]] = []  # decision, knob, the change in words
        self._status: tuple[TunerState, str] | None = None
        self._paces: list[float] = []
        self._steps = self._since_switch = self._waited = self._trial_steps = 0
        self._before_hold: tuple[TunerState, str] = ("warming", "released before anything was judged")
        self._failure: str | None = None
        self._has_more = True
        self._last: Observation | None = None

    # --- the Policy protocol ---

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Begin, or start over, with these knobs."""
        self._records.job, self._turns_knobs = facts.job, turns_knobs
        self._start_over(spaces)
        self._sampler.begin([space for space in (bounded(space, self._config) for space in spaces) if space])

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Judge no step until released; go back to what is proven unless the hold is brief."""
        self._held, self._is_brief = reason, is_brief
        self._paces = []

    def advance(self, observations: Sequence[Observation]) -> tuple[Proposal | None, list[Record]]:
        """Take the steps since the last call; return what it proposes, if anything, and records for people."""
        for step in observations:
            self._observe(step)
        return self._propose(), self._records.drain()

    def number(self) -> int:
        """Return the next decision's number, for an order."""
        self._records.decisions += 1
        return self._records.decisions

    def finish(self, reason: str = "the job ended") -> list[Record]:
        """End: no more steps will come; return verdicts (outcome "abandoned") for what is still open."""
        if self._last is not None:
            self._conclude("abandoned", None, f"{reason} before it was measured", self._last)
        return self._records.drain()

    # --- one step ---

    def _observe(self, step: Observation) -> None:
        broken = self._failure or self._fault(step)
        values = {knob: step.values[knob] for knob in self._start if knob in step.values}
        self._since_switch = self._since_switch + 1 if values == self._in_force else 1
        self._in_force, self._last = values, step
        if broken is not None:
            self._fail(broken, step)
            return
        self._steps += 1
        self._trial_steps += 1
        if self._held is not None:
            if not self._is_brief:
                self._report("frozen", self._held, step)
            return
        if self._status is not None and self._status[0] == "frozen":
            self._report(*self._before_hold, step)
        if not self._turns_knobs:
            self._report("advising", f"{self._name} can only try settings, so it has no advice", step)
        elif self._steps <= self._config.warmup_steps:
            self._report("warming", f"the first {self._config.warmup_steps} steps are not judged", step)
        elif self._sample is not None:
            self._measure(self._sample, step)
        elif self._in_force != self._proven:
            self._wait(step)
        elif self._has_more:
            self._next(step)
        else:
            self._waited = 0

    def _fault(self, step: Observation) -> str | None:
        missing = [knob for knob in self._start if knob not in step.values]
        lost = f"{', '.join(missing)} can no longer be turned" if missing else None
        return absurdity(step, self._last) or lost

    def _wait(self, step: Observation) -> None:
        self._waited += 1
        if self._waited > WAIT_STEPS_MAX:
            self._fail(f"the ranks did not switch within {WAIT_STEPS_MAX} steps", step)

    def _measure(self, sample: Mapping[str, int], step: Observation) -> None:
        """Count the step for the open sample if the sample's values are in force."""
        if self._in_force != sample:
            self._paces = []
            self._wait(step)
            return
        self._waited = 0
        if self._since_switch > self._sampler.settle_steps and not step.profiled:
            self._paces.append(step.pace_ns)
        length = self._sampler.window_steps
        if len(self._paces) < length * self._sampler.windows:
            return
        pace = median(fmean(self._paces[i : i + length]) for i in range(0, len(self._paces), length))
        if not self._sampler.tell(sample, pace):
            self._paces = []
            return
        self._judge(dict(sample), pace, step)
        self._next(step)

    def _judge(self, sample: dict[str, int], pace_ns: float, step: Observation) -> None:
        gain = None if self._proven_ns is None else 1 - pace_ns / self._proven_ns
        best = {**self._proven, **self._sampler.best}
        if best == sample:
            self._proven, self._proven_ns = sample, pace_ns
        self._conclude("kept" if best == sample else "rolled_back", gain, f"{pace_ns / 1e6:.1f} ms a step", step)

    def _next(self, step: Observation) -> None:
        """Open the next sample, or stay with the best."""
        self._paces, self._waited, self._sample = [], 0, None
        if not step.can_pay_for(SAMPLE_SWITCHES):
            self._report("watching", phrases.UNEARNED, step)
            return
        proposed = self._sampler.propose()
        self._sample = None if proposed is None else {**self._proven, **proposed}
        if self._sample is None:
            self._has_more = False
            self._proven = {**self._proven, **self._sampler.best}
            self._report("watching", f"{self._name} is done: {self._describe(self._proven)}", step)
            return
        changed = {knob: value for knob, value in self._sample.items() if value != self._in_force.get(knob)}
        if not changed:
            return
        self._records.trials += 1
        self._trial_steps = 0
        for knob, value in changed.items():
            self._decide(knob, value, step)
        self._report("trial", f"sample {self._records.trials}: {self._describe(self._sample)}", step)

    # --- requests and records ---

    def _propose(self) -> Proposal | None:
        if not self._turns_knobs or not self._in_force:
            return None
        is_away = self._failure is not None or (self._held is not None and not self._is_brief)
        wanted = self._proven if is_away or self._sample is None else self._sample
        is_trial = wanted != self._proven
        if wanted == self._in_force and (wanted, is_trial) == self._requested:
            return None
        self._requested = (dict(wanted), is_trial)
        return Proposal(decision=self._records.decisions, values=dict(wanted), is_trial=is_trial)

    def _fail(self, reason: str, step: Observation) -> None:
        """Freeze for good: nothing can be tuned from here on."""
        if self._failure is None:
            self._failure, self._sample = reason, None
            self._proven = {knob: value for knob, value in self._proven.items() if knob in step.values}
            self._conclude("abandoned", None, f"tuning froze: {reason}", step)
            self._report("frozen", reason, step)

    def _decide(self, knob: str, value: int, step: Observation) -> None:
        old = self._in_force[knob]
        change = phrases.change(knob, old, value)
        reason = f"{change}: sample {self._records.trials} of {self._name}"
        number = self._records.decide("trial", knob, old, value, step, reason=reason, expected_gain_ratio=None)
        self._open.append((number, knob, change))

    def _conclude(self, outcome: Outcome, gain: float | None, detail: str, step: Observation) -> None:
        """Record a verdict on every decision of the open sample."""
        for number, knob, change in self._open:
            self._records.conclude(
                number,
                knob,
                outcome,
                step,
                gain_ratio=gain,
                trial_steps=self._trial_steps,
                reason=f"{change}: {detail}",
            )
        self._open = []

    def _describe(self, values: Mapping[str, int]) -> str:
        return ", ".join(f"{knob} {phrases.setting(knob, value)}" for knob, value in values.items())

    def _report(self, state: TunerState, detail: str, step: Observation) -> None:
        self._status = (state, detail)
        if state != "frozen":
            self._before_hold = self._status
        self._records.report(state, detail, 0.0, step)
