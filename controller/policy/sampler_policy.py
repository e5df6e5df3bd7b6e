"""Runs a tuner that measures one setting after another on a live job: all of it but the choice of the next one.

    warming -> trial, trial, trial ... -> watching           any of them -> frozen, and back where it was held only

A *sampler* names the next setting and is told its pace.  Everything else is here: requesting it until the ranks have it
in force, measuring, writing decisions and verdicts, going back when held.  The sampler never sees a step.

What these tuners leave out is left out here too, because that is what is compared: no second look at the setting
before, no test whether a difference is luck, no exploration budget, no end to a bad sample, no watching when the search
is over.  Only pacecar's own overhead budget holds here too: a sample waits until it pays for going there and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Literal, Protocol

from pacecar.config import TuneConfig
from pacecar.records import Decision, TunerStatus, Verdict

from ..observation import JobFacts, KnobSpace, Observation, Policy, TuningTurn, absurdity, bounded
from . import phrases
from .decision_records import Record, State

__all__ = ["SamplerPolicy", "SettingSampler"]

WAIT_STEPS_MAX = 128
"""A switch takes 4 to 16 steps to be agreed; one that is not there after so many will not come."""


SAMPLE_SWITCHES = 2
"""To a sample and back."""


class SettingSampler(Protocol):
    """Names settings and is told their pace."""

    windows: int
    """Windows of one sample; its score is their median."""
    window_steps: int
    settle_steps: int
    """Steps after a switch that are not counted; 0 where the original counts them."""

    def begin(self, spaces: Sequence[KnobSpace]) -> None:
        """Learn what can be turned; values of other knobs stay as they are."""
        ...

    def propose(self) -> dict[str, int] | None:
        """Return the setting to measure next; None when the search is over."""
        ...

    def tell(self, values: Mapping[str, int], pace_ns: float) -> bool:
        """Take the pace of the setting proposed last; return False if it was a warm-up and is to be measured again."""
        ...

    @property
    def best(self) -> dict[str, int]:
        """The setting to stay with, by all that was told."""
        ...


class SamplerPolicy(Policy):
    """A policy around a sampler.  Its records contain `name`."""

    def __init__(self, config: TuneConfig, sampler: SettingSampler, *, name: str) -> None:
        self._config = config
        self._sampler = sampler
        self._name = name
        self._job = ""
        self._mode: Literal["advise", "exact"] = "exact"
        self._start: dict[str, int] = {}
        self._proven: dict[str, int] = {}
        self._proven_ns: float | None = None
        self._in_force: dict[str, int] = {}
        self._sample: dict[str, int] | None = None
        self._asked: tuple[dict[str, int], bool] = ({}, False)
        self._open: list[Decision] = []
        self._records: list[Record] = []
        self._said: tuple[State, str] | None = None
        self._paces: list[float] = []
        self._steps = self._since_switch = self._waited = self._trial_steps = 0
        self._trials = 0
        self._decisions = 0
        self._held: str | None = None
        self._before_hold: tuple[State, str] = ("warming", "released before anything was judged")
        self._is_brief = False
        self._dead: str | None = None
        self._has_more = True
        self._last: Observation | None = None

    # --- the Policy protocol ---

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, mode: Literal["advise", "exact"]) -> None:
        """Learn what can be turned; called once, before the first observation."""
        self._job, self._mode = facts.job, mode
        self._start = {space.knob: space.value for space in spaces}
        self._proven = dict(self._start)
        self._asked = (dict(self._start), False)
        self._sampler.begin([space for space in (bounded(space, self._config) for space in spaces) if space])

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Judge no step until released; go back to what is proven unless the hold is brief."""
        self._held, self._is_brief = reason, is_brief
        self._paces = []

    def advance(self, observations: Sequence[Observation]) -> tuple[TuningTurn | None, list[Record]]:
        """Take the steps since the last call; return the requested turn, if any, and records for people."""
        for step in observations:
            self._take(step)
        records, self._records = self._records, []
        return self._wish(), records

    def finish(self, reason: str = "the job ended") -> list[Record]:
        """End: no more steps will come; return verdicts (outcome "abandoned") for what is still open."""
        if self._last is not None:
            self._conclude("abandoned", None, f"{reason} before it was measured", self._last)
        records, self._records = self._records, []
        return records

    # --- one step ---

    def _take(self, step: Observation) -> None:
        broken = self._dead or self._fault(step)
        values = {knob: step.values[knob] for knob in self._start if knob in step.values}
        self._since_switch = self._since_switch + 1 if values == self._in_force else 1
        self._in_force, self._last = values, step
        if broken is not None:
            self._die(broken, step)
            return
        self._steps += 1
        self._trial_steps += 1
        if self._held is not None:
            if not self._is_brief:
                self._say("frozen", self._held, step)
            return
        if self._said is not None and self._said[0] == "frozen":
            self._say(*self._before_hold, step)
        if self._mode == "advise":
            self._say("advising", f"{self._name} can only try settings, so it has no advice", step)
        elif self._steps <= self._config.warmup_steps:
            self._say("warming", f"the first {self._config.warmup_steps} steps are not judged", step)
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
        lost = f"{', '.join(missing)} cannot be turned any more" if missing else None
        return absurdity(step, self._last) or lost

    def _wait(self, step: Observation) -> None:
        self._waited += 1
        if self._waited > WAIT_STEPS_MAX:
            self._die(f"the ranks did not switch within {WAIT_STEPS_MAX} steps", step)

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
            self._say("watching", phrases.UNEARNED, step)
            return
        proposed = self._sampler.propose()
        self._sample = None if proposed is None else {**self._proven, **proposed}
        if self._sample is None:
            self._has_more = False
            self._proven = {**self._proven, **self._sampler.best}
            self._say("watching", f"{self._name} is done: {self._describe(self._proven)}", step)
            return
        changed = {knob: value for knob, value in self._sample.items() if value != self._in_force.get(knob)}
        if not changed:
            return
        self._trials += 1
        self._trial_steps = 0
        for knob, value in changed.items():
            self._decide(knob, value, step)
        self._say("trial", f"sample {self._trials}: {self._describe(self._sample)}", step)

    # --- requests and records ---

    def _wish(self) -> TuningTurn | None:
        if self._mode == "advise" or not self._in_force:
            return None
        is_away = self._dead is not None or (self._held is not None and not self._is_brief)
        wanted = self._proven if is_away or self._sample is None else self._sample
        is_trial = wanted != self._proven
        if wanted == self._in_force and (wanted, is_trial) == self._asked:
            return None
        self._asked = (dict(wanted), is_trial)
        return TuningTurn(decision=self._decisions, values=dict(wanted), is_trial=is_trial)

    def _die(self, reason: str, step: Observation) -> None:
        """Freeze for good: nothing can be tuned from here on."""
        if self._dead is None:
            self._dead, self._sample = reason, None
            self._proven = {knob: value for knob, value in self._proven.items() if knob in step.values}
            self._conclude("abandoned", None, f"tuning froze: {reason}", step)
            self._say("frozen", reason, step)

    def _decide(self, knob: str, value: int, step: Observation) -> None:
        self._decisions += 1
        old = self._in_force[knob]
        self._open.append(
            Decision(
                job=self._job,
                decision=self._decisions,
                kind="trial",
                knob=knob,
                from_value=old,
                to_value=value,
                step=step.step,
                wall_ns=step.wall_ns,
                reason=f"{phrases.change(knob, old, value)}: sample {self._trials} of {self._name}",
                expected_gain_ratio=None,
            )
        )
        self._records.append(self._open[-1])

    def _conclude(
        self,
        outcome: Literal["kept", "rolled_back", "abandoned"],
        gain: float | None,
        detail: str,
        step: Observation,
    ) -> None:
        """Write a verdict for every decision of the open sample."""
        for decision in self._open:
            change = phrases.change(decision.knob, int(decision.from_value), int(decision.to_value))
            self._records.append(
                Verdict(
                    job=self._job,
                    decision=decision.decision,
                    knob=decision.knob,
                    outcome=outcome,
                    step=step.step,
                    wall_ns=step.wall_ns,
                    measured_gain_ratio=gain,
                    gain_low=None,
                    gain_high=None,
                    evidence=None,
                    trial_steps=self._trial_steps,
                    exploration_ns=0,
                    reason=f"{change}: {detail}",
                )
            )
        self._open = []

    def _describe(self, values: Mapping[str, int]) -> str:
        return ", ".join(f"{knob} {phrases.setting(knob, value)}" for knob, value in values.items())

    def _say(self, state: State, detail: str, step: Observation) -> None:
        if state != "frozen":
            self._before_hold = (state, detail)
        if self._said != (state, detail):
            self._said = (state, detail)
            self._records.append(
                TunerStatus(
                    job=self._job,
                    rank=0,
                    state=state,
                    detail=detail,
                    step=step.step,
                    wall_ns=step.wall_ns,
                    exploration_ns=0,
                    trials=self._trials,
                )
            )
