"""Turns finished steps into what the agreement needs at once, and into the observations that a policy sees later.

The hook writes a step's record late, on threads that wake anyway.  So a step is passed on with what the agreement needs
at once, and its record is asked for only where a policy will see it (rank 0).  Where measuring every step would cost
more than the budget allows, most are only counted: they have a pace and no record, and a policy sees just that.

An Observation needs three things that come at different times: the step, the job's pace in it and its record.  Steps
that lack one of them wait in an `ObservationBacklog`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.records import BackwardWindow, StepRecord

from ..observation import KnobSpace, Observation
from .protocol import LONG_STEP_NS, PERIOD, JobPace

__all__ = ["MeasuredSteps", "ObservationBacklog", "ObservationListener"]

RECORDS_MAX = 32 * PERIOD
"""Own steps kept until the other ranks' paces of that step come in."""

PACED_MAX = 4 * PERIOD
"""Steps of a calm job whose pace is known and that may wait for their record.

With more, and wherever something is tried, the training thread writes it: what is 16 steps late makes a trial longer.
"""

COUNTED_RATIO_MAX = 3
"""A counted step so many times longer than the one before contained something else: an evaluation not announced."""


class MeasuredSteps(Protocol):
    """A finished step as the hook passes it on; its record is written when it is asked for."""

    @property
    def step(self) -> int:
        """Its number."""
        ...

    @property
    def wall_ns(self) -> int:
        """Its wall time."""
        ...

    @property
    def pace_ns(self) -> int:
        """The same without what only some of the steps pay for being measured."""
        ...

    @property
    def disturbed(self) -> bool:
        """Whether its pace says nothing about the job's settings."""
        ...

    @property
    def source(self) -> Literal["exact", "estimate"]:
        """What its ledger comes from."""
        ...

    @property
    def record(self) -> StepRecord | None:
        """Its record, None before it was written."""
        ...

    @property
    def backward(self) -> BackwardWindow | None:
        """Its last backward and that backward's all-reduces; None where no window recorded them."""
        ...

    @property
    def is_held(self) -> bool:
        """Its window, or that of a step before it, is not read yet: a record that is asked for now is an estimate."""
        ...

    def settled(self) -> StepRecord:
        """Return its record, written now if it was not yet."""
        ...


class ObservationListener:
    """Selects which of the steps that were only counted are observed, beside all that were measured.

    To observe a step takes the tuner DECIDE_NS (job.tuner_wiring), which is nothing beside a long step.  For a shorter
    one (from `counted_ns_min` on) that is worth it in a trial, which would otherwise last the longer the fewer steps
    are measured.  While all ranks are calm the measured ones tell enough.
    """

    def __init__(self, counted_ns_min: int = LONG_STEP_NS) -> None:
        self.counted_ns_min = counted_ns_min
        self._last_ns: int | None = None  # of the last step observed since the switch

    def pace_ns(self, step: MeasuredSteps | CountedStep, *, are_all_calm: bool) -> int | None:
        """Return the pace of `step`, None if it is not observed."""
        if isinstance(step, CountedStep):
            is_long = step.wall_ns >= (LONG_STEP_NS if are_all_calm else min(self.counted_ns_min, LONG_STEP_NS))
            if not is_long or (self._last_ns is not None and step.wall_ns > COUNTED_RATIO_MAX * self._last_ns):
                return None
        self._last_ns = step.wall_ns
        return step.wall_ns if isinstance(step, CountedStep) else step.pace_ns

    def switched(self) -> None:
        """Reset the last step's length: other settings are in force."""
        self._last_ns = None


class ObservationBacklog:
    """The steps of rank 0 that its policy has not seen yet."""

    def __init__(self) -> None:
        self._steps: dict[int, MeasuredSteps | CountedStep] = {}
        self._paced: deque[tuple[MeasuredSteps | CountedStep, JobPace]] = deque()
        self._observations: list[Observation] = []
        self._early: MeasuredSteps | None = None  # the last exact step before the policy begins: it forecasts from it
        self._last: MeasuredSteps | None = None  # before that, too: a window may be read a step late
        self._is_begun = False
        self._begun_after = -1  # what came before the early exact step is not observed after it

    def remember(self, step: MeasuredSteps | CountedStep) -> None:
        """Keep a step until its pace comes."""
        self._steps[step.step] = step
        if not self._is_begun:
            self._look_back()
            self._last = None if isinstance(step, CountedStep) else step
        while len(self._steps) > RECORDS_MAX:
            del self._steps[next(iter(self._steps))]

    def begin(self, live: Sequence[KnobSpace]) -> None:
        """Observe from now on, and the last exact step before."""
        self._is_begun = True
        self._look_back()
        early, self._early = self._early, None
        record = early.settled() if early is not None else None
        if record is not None and all(space.knob in record.knobs.values for space in live):
            self._begun_after = record.step
            pace = JobPace(record.step, record.wall_ns, profiled=True)
            self._observations.append(_observe(record, pace, live, early.backward if early is not None else None))

    def _look_back(self) -> None:
        if self._last is not None and self._last.source == "exact":
            self._early = self._last
        self._last = None

    def pair(self, paces: Sequence[JobPace], live: Sequence[KnobSpace], *, is_calm: bool) -> None:
        """Take the job's paces, and observe the steps whose record is there."""
        for pace in paces:
            step = self._steps.pop(pace.step, None)
            if step is not None and self._is_begun and step.step > self._begun_after:
                self._paced.append((step, pace))
        # Other threads write records a few times a second, for much less than it costs here.
        may_wait = PACED_MAX if is_calm else 0
        while self._paced and _may_be_told(self._paced[0][0], is_pressing=len(self._paced) > may_wait):
            step, pace = self._paced.popleft()
            if isinstance(step, CountedStep):
                self._observations.append(_observe_pace(step, pace, live))
            else:
                self._observations.append(_observe(step.settled(), pace, live, step.backward))

    def drain(self) -> list[Observation]:
        """Return what was observed since the last call."""
        observations, self._observations = self._observations, []
        return observations


def _may_be_told(step: MeasuredSteps | CountedStep, *, is_pressing: bool) -> bool:
    """Return whether all is there that will ever be; where it `is_pressing` whether its record may be written now."""
    if isinstance(step, CountedStep) or step.record is not None:
        return True
    return is_pressing and not step.is_held


def _observe_pace(step: CountedStep, pace: JobPace, live: Sequence[KnobSpace]) -> Observation:
    """Return a counted step as a policy sees it."""
    values = step.knobs.values
    return Observation(
        step=step.step,
        wall_ns=step.ended_wall_ns,
        values={space.knob: int(values[space.knob]) for space in live},
        pace_ns=pace.pace_ns,
        profiled=pace.profiled,
    )


def _observe(
    record: StepRecord, pace: JobPace, live: Sequence[KnobSpace], backward: BackwardWindow | None
) -> Observation:
    """Return `record` as a policy sees it: the job's pace, and the values of the `live` knobs."""
    values = record.knobs.values
    return Observation(
        step=record.step,
        wall_ns=record.ended_wall_ns,
        values={space.knob: int(values[space.knob]) for space in live},
        pace_ns=pace.pace_ns,
        profiled=pace.profiled,
        ledger=record.ledger,
        exact=record.source == "exact",
        forward_ns=record.forward_ns,
        backward_ns=record.backward_ns,
        optimizer_ns=record.optimizer_ns,
        data_wait_ns=record.data_wait_ns,
        micro_batches=record.micro_batches,
        backward=backward,
    )
