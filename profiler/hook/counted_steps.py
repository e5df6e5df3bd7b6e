"""Adds counted (unmeasured) steps to the totals: their own wall time, split in the proportions of a measured step.

Normally these are the proportions of the next measured step, whose record carries the totals.  If the job ends first,
the last measured step is used, and the Goodbye carries the totals.

`step_sampling` decides which steps are only counted; `step_boundary` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pacecar.records import Goodbye, JobHello, Knobs

from ..timing.overhead_budget import OverheadBudget
from ..timing.process_stops import LATE_NS_MIN, Stop, StopDetector
from ..timing.sample_counts import Totals
from ..timing.step_timer import STOPPED
from ..windows.estimate import Calibrations, estimate
from .step_boundary import CountedSums, StepBoundary

__all__ = ["CountedSteps", "Like"]


class Like(NamedTuple):
    """The measured step whose proportions counted steps are given."""

    wall_ns: int
    phases: Mapping[str, int]
    samples: int | None
    knobs: Knobs


class CountedSteps:
    """Adds counted steps to `totals` and their cost to `budget`; the caller holds the records' lock."""

    def __init__(self, totals: Totals, budget: OverheadBudget, calibrations: Calibrations, stops: StopDetector) -> None:
        self._totals = totals
        self._budget = budget
        self._calibrations = calibrations
        self._stop_detector = stops
        self.last: Like | None = None
        """The last measured step."""

    def add(self, passed: CountedSums, like: Like, end_ns: int, price_ns: int) -> list[Stop]:
        """Add the steps up to `end_ns`, each of which costs `price_ns` outside the hooks.

        Return the stops of the process during them.
        """
        passed.cost_ns += passed.steps * price_ns
        self._budget.passed(passed.wall_ns, passed.cost_ns)
        stops = self._stop_detector.stops(end_ns - passed.wall_ns, end_ns) if passed.wall_ns >= LATE_NS_MIN else []
        stopped_ns = sum(stop.end_ns - stop.start_ns for stop in stops)
        phases = {
            name: duration * (passed.wall_ns - stopped_ns) // like.wall_ns if like.wall_ns else 0
            for name, duration in like.phases.items()
            if name not in ("overhead", "checkpoint", STOPPED)
        }
        if stopped_ns:
            phases[STOPPED] = stopped_ns
        ledger = estimate(passed.wall_ns, phases, self._calibrations.find(like.knobs))
        samples, tokens = passed.samples, passed.tokens
        if samples is None and like.samples is not None:
            samples = like.samples * passed.steps
        self._totals.add(ledger, samples, tokens, steps=passed.steps)
        return stops

    def add_rest(self, boundary: StepBoundary, price_ns: int) -> list[Stop]:
        """Add the steps after the last measured one, when the job ends; return the stops of the process during them."""
        passed, boundary.passed = boundary.passed, None
        _, end_ns = boundary.current_step()
        if passed is None or not passed.steps or self.last is None or end_ns is None:
            return []
        return self.add(passed, self.last, end_ns, price_ns)

    def goodbye(self, hello: JobHello, reason: str, wall_ns: int) -> Goodbye:
        """Return the last record, with the totals if there was a step."""
        totals, has_any = self._totals, self._totals.steps > 0
        return Goodbye(
            job=hello.job,
            rank=hello.rank,
            reason=reason,
            wall_ns=wall_ns,
            totals=totals.ledger if has_any else None,
            total_steps=totals.steps if has_any else None,
            total_samples=totals.samples,
            total_tokens=totals.tokens,
            total_overhead_ns=self._budget.cost_ns if has_any else None,
        )
