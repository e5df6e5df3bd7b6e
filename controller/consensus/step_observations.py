"""Turns finished steps into what the agreement needs at once, and into the observations that a policy sees later.

The hook writes a step's record late, on threads that wake anyway.  So a step is passed on with what the agreement
needs, and its record is requested only where a policy will see it (rank 0).  If measuring every step would exceed the
overhead budget, most steps are only counted: they have a pace and no record, and a policy sees just the pace.

An observation needs three things that arrive at different times: the step, the job's pace in it, and its record.  Steps
that lack one of them wait in an `ObservationBacklog`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.hook.step_records import FinishedStep
from pacecar.records import BackwardWindow, StepRecord

from ..observation import KnobSpace, Observation
from .protocol import LONG_STEP_NS, PERIOD, JobPace

__all__ = ["ObservationBacklog", "ObservationListener"]

RECORDS_MAX = 32 * PERIOD
"""Own steps kept until the other ranks' paces of the same step arrive."""

PACED_MAX = 4 * PERIOD
"""Steps of a calm job with a known pace that may wait for their record.

With more, or during a trial, the training thread writes the record: waiting 16 steps would prolong the trial.
"""

COUNTED_RATIO_MAX = 3
"""A counted step this many times longer than the one before included something else, such as an unannounced evaluation.
"""


class ObservationListener:
    """Selects which of the counted steps are observed, in addition to all measured ones.

    Observing a step costs the tuner DECIDE_NS (job.tuner_wiring), which is negligible for a long step.  For a shorter
    one (from `counted_ns_min` on) it is worthwhile during a trial, which would last longer with fewer steps.  While all
    ranks are calm, the measured steps are enough.
    """

    def __init__(self, counted_ns_min: int = LONG_STEP_NS) -> None:
        self.counted_ns_min = counted_ns_min
        self._last_ns: int | None = None  # of the last step observed since the switch

    def pace_ns(self, step: FinishedStep | CountedStep, *, are_all_calm: bool, collection_ns: int = 0) -> int | None:
        """Return the pace of `step`, None if it is not observed; `collection_ns` of it were garbage collections."""
        if isinstance(step, CountedStep):
            is_long = step.wall_ns >= (LONG_STEP_NS if are_all_calm else min(self.counted_ns_min, LONG_STEP_NS))
            usual_ns = step.wall_ns - collection_ns
            if not is_long or (self._last_ns is not None and usual_ns > COUNTED_RATIO_MAX * self._last_ns):
                return None
        self._last_ns = step.wall_ns - collection_ns
        return step.wall_ns if isinstance(step, CountedStep) else step.pace_ns

    def switched(self) -> None:
        """Forget the last step's length: other settings are in force."""
        self._last_ns = None


class ObservationBacklog:
    """The steps of rank 0 that its policy has not seen yet."""

    def __init__(self) -> None:
        self._steps: dict[int, FinishedStep | CountedStep] = {}
        self._paced: deque[tuple[FinishedStep | CountedStep, JobPace]] = deque()
        self._observations: list[Observation] = []
        self._early: FinishedStep | None = None  # the last exact step before the policy begins, which forecasts from it
        self._last: FinishedStep | None = None  # the step before: a window may be read a step late
        self._is_begun = False
        self._begun_after = -1  # steps before the early exact one are not observed after it

    def remember(self, step: FinishedStep | CountedStep) -> None:
        """Keep a step until its pace arrives."""
        self._steps[step.step] = step
        if not self._is_begun:
            self._look_back()
            self._last = None if isinstance(step, CountedStep) else step
        while len(self._steps) > RECORDS_MAX:
            del self._steps[next(iter(self._steps))]

    def begin(self, live: Sequence[KnobSpace]) -> None:
        """Observe from now on, and also the last exact step before."""
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
        """Take the job's paces, and observe the steps whose records are there."""
        for pace in paces:
            step = self._steps.pop(pace.step, None)
            if step is not None and self._is_begun and step.step > self._begun_after:
                self._paced.append((step, pace))
        # Other threads write records a few times a second, much more cheaply than this thread.
        may_wait = PACED_MAX if is_calm else 0
        while self._paced and _can_observe(self._paced[0][0], is_pressing=len(self._paced) > may_wait):
            step, pace = self._paced.popleft()
            if isinstance(step, CountedStep):
                self._observations.append(_observe_pace(step, pace, live))
            else:
                self._observations.append(_observe(step.settled(), pace, live, step.backward))

    def drain(self) -> list[Observation]:
        """Return what was observed since the last call."""
        observations, self._observations = self._observations, []
        return observations


def _can_observe(step: FinishedStep | CountedStep, *, is_pressing: bool) -> bool:
    """Return whether the step is complete; if `is_pressing`, whether its record may be written now."""
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
        collection_ns=pace.collection_ns,
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
        collection_ns=pace.collection_ns,
        ledger=record.ledger,
        exact=record.source == "exact",
        forward_ns=record.forward_ns,
        backward_ns=record.backward_ns,
        optimizer_ns=record.optimizer_ns,
        data_wait_ns=record.data_wait_ns,
        micro_batches=record.micro_batches,
        backward=backward,
    )
