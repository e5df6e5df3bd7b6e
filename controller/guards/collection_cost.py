"""Makes the policy see what garbage collections cost, and takes "gc_interval" back where a rank objects.

A trial compares windows by a location that rare stalls do not move (`sequential_test`), and collections are rare
stalls.  So the guard takes them out of each step's pace and puts their measured means back as a ratio:

    automatic     pace less the stall
    every n-th    pace less the collection, times (usual step + what collections cost now) / (usual step + before)

What they cost before is bounded from below: of a step's collections (on the rank where they took longest) only as much
counts as the step took longer than one without, and of their mean, ERRORS standard errors are left out.  So a few
stalls prove nothing.  What they cost now is bounded from above: every collection counts in full.  Steps after a trial's
switch back do not count for the first, because the collector continues with what the trial left.

So the gain that a trial reports is a lower bound.  Where the job collects nothing long, every pace is passed on as it
came.  Pure but for `objections`, which must not wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from pacecar.knobs import AUTOMATIC_GC

from ..knobs.garbage_collection import CollectionSchedule
from ..observation import JobFacts, KnobSpace, Observation
from .knob_rollback import KnobRollback

__all__ = ["CollectionCost"]

STEPS_MIN = 64
"""Steps under automatic collections before their cost is estimated."""

STEPS_MAX = 1024

USUAL_STEPS = 32
"""Steps whose median says how long a step takes without collections."""

ERRORS = 2.0

KNOWN_SHARE = 0.5
"""The lower bound must be this share of the mean before anything is tried: after some 16 stalls."""

NEGLIGIBLE_RATIO = 0.005
"""A smaller share of the step is not worth waiting for."""

AFTERMATH_STEPS = 64
"""Steps after a switch back to automatic collections that do not count."""


class CollectionCost(KnobRollback):
    """Levels the paces of a job whose collections are tuned.

    `objections` returns, for each rank that objects, the number of the reason.
    """

    knob = "gc_interval"
    home = AUTOMATIC_GC

    def __init__(self, objections: Callable[[], Mapping[int, int]]) -> None:
        super().__init__()
        self._objections = objections
        self._is_measured = False
        self._interval = AUTOMATIC_GC
        self._since = AFTERMATH_STEPS  # steps since the last switch
        self._usual: deque[int] = deque(maxlen=USUAL_STEPS)
        self._stalls: deque[int] = deque(maxlen=STEPS_MAX)
        self._scheduled: dict[int, _ScheduledCost] = {}
        self._last_cost_ns: float | None = None
        self._step_before: int | None = None

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Learn whether the knob can be turned, if only in theory: then its gain can be advised."""
        super().begin(facts, spaces, turns_knobs=turns_knobs)
        self._is_measured = any(space.knob == self.knob for space in spaces)

    def judgeable(self, step: Observation) -> Observation:
        """Return `step` with its pace as above, and with the mean cost of collections per step under its interval."""
        interval = step.values.get(self.knob)
        if not self._is_measured or interval is None or step.collection_ns is None:
            return super().judgeable(step)
        self._is_in_force = interval != AUTOMATIC_GC
        if interval != self._interval:
            self._interval, self._since = interval, 0
        elif self._step_before is not None:
            self._since += step.step - self._step_before
        self._step_before = step.step
        if interval == AUTOMATIC_GC:
            levelled = self._take_automatic(step, step.collection_ns)
        else:
            levelled = self._take_scheduled(step, step.collection_ns, interval)
        return super().judgeable(levelled)

    def automatic_ns(self) -> float | None:
        """Return the least that automatic collections cost per step; None while that is not known."""
        if len(self._stalls) < STEPS_MIN:
            return None
        return max(0.0, fmean(self._stalls) - ERRORS * stdev(self._stalls) / math.sqrt(len(self._stalls)))

    def _take_automatic(self, step: Observation, collection_ns: int) -> Observation:
        if not step.profiled:
            self._usual.append(step.pace_ns - collection_ns)
        usual_ns = median(self._usual) if self._usual else step.pace_ns
        stall_ns = round(min(max(step.pace_ns - usual_ns, 0), collection_ns))
        if not step.profiled and self._since >= AFTERMATH_STEPS:
            self._stalls.append(stall_ns)
        return replace(step, pace_ns=max(1, step.pace_ns - stall_ns), collection_ns=self._known_ns(step.pace_ns))

    def _known_ns(self, pace_ns: int) -> int | None:
        """Return what to forecast from: None while too few stalls were seen for a trial to prove what they cost."""
        cost_ns = self.automatic_ns()
        if cost_ns is None:
            return None
        mean_ns = fmean(self._stalls)
        is_known = cost_ns >= KNOWN_SHARE * mean_ns or mean_ns < NEGLIGIBLE_RATIO * pace_ns
        return round(cost_ns) if is_known else None

    def _take_scheduled(self, step: Observation, collection_ns: int, interval: int) -> Observation:
        scheduled = self._scheduled.setdefault(interval, _ScheduledCost(interval))
        scheduled.pass_step(self._since, collection_ns)
        before_ns, cost_ns = self.automatic_ns(), scheduled.mean_ns()
        self._last_cost_ns = self._last_cost_ns if cost_ns is None else cost_ns
        ratio, stall_ns = 1.0, min(collection_ns, step.pace_ns - 1)
        # Before an interval's first collection it is taken to cost what the last one did.
        if before_ns is not None and self._last_cost_ns is not None:
            usual_ns = max(1.0, median(self._usual))
            ratio = (usual_ns + self._last_cost_ns) / (usual_ns + before_ns)
        return replace(
            step,
            pace_ns=max(1, round((step.pace_ns - stall_ns) * ratio)),
            collection_ns=None if cost_ns is None else round(cost_ns),
        )

    def _watch(self) -> None:
        self._heed(self._objections())


class _ScheduledCost:
    """The mean cost per step of collections at one interval: those seen so far, over the steps before each."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._schedule = CollectionSchedule(interval)
        self._boundaries = 0  # of this stretch
        self._waiting = 0  # steps since its last collection
        self._cost_ns = self._steps = 0

    def pass_step(self, since: int, collection_ns: int) -> None:
        """Take a step, `since` steps after the switch."""
        if since == 0:
            self._schedule, self._boundaries, self._waiting = CollectionSchedule(self._interval), 0, 0
        self._cost_ns += collection_ns
        while self._boundaries <= since:
            self._boundaries += 1
            if self._schedule.is_due():  # at the boundary before a step, so its time is in that step
                if self._boundaries > since:  # of a step that was not observed the cost is not known either
                    self._steps += self._waiting
                self._waiting = 0
            self._waiting += 1

    def mean_ns(self) -> float | None:
        """Return the mean; None before the first collection."""
        return self._cost_ns / self._steps if self._steps else None
