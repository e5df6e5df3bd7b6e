"""Defines the record that compares the estimate of a step with its exact window, and computes how far off it is.

Before an exact window is used as a calibration, its step is estimated from its timers as if nobody had profiled it, and
both ledgers travel.  Their distance (total variation) is the share of the step that stands under a wrong heading.

Part of `pacecar.records.records`, which is where the rooms import it from.
"""

from __future__ import annotations

import msgspec

from pacecar.records.measurements.ledger import Ledger
from pacecar.records.ranges import Count, Label, Nanoseconds, Rank

__all__ = ["CheckedError", "EstimateCheck"]


class EstimateCheck(msgspec.Struct, frozen=True, kw_only=True, tag="estimate_check"):
    """An exact window of one rank, and what the estimate with the calibration before it says of the same step.

    That calibration ended `calibration_age_steps` earlier; `is_own_setting` says that it was one of these very knobs.
    `slowdown_ns` is by how much the phases of this step exceed the usual ones, what the profiler slowed down above all:
    None when no usual step is known.  `windows` counts the windows that the calibration was made of.
    """

    job: Label
    rank: Rank
    step: Count
    ended_wall_ns: Nanoseconds
    exact: Ledger
    estimate: Ledger
    calibration_age_steps: Count
    is_own_setting: bool
    windows: Count
    slowdown_ns: Nanoseconds | None = None

    @property
    def heading_errors_ns(self) -> dict[str, int]:
        """Estimate minus exact, by heading; they sum to zero."""
        exact, estimate = self.exact.parts(), self.estimate.parts()
        return {heading: estimate.get(heading, 0) - exact.get(heading, 0) for heading in (exact | estimate)}

    @property
    def error_ratio(self) -> float | None:
        """Share of the step under a wrong heading (0..1), the total variation distance; None for a step of no length.

        Half the sum of the absolute differences: what is too much under one heading is too little under another.
        """
        if self.exact.wall_ns == 0:
            return None
        return sum(map(abs, self.heading_errors_ns.values())) / (2 * self.exact.wall_ns)

    @property
    def bias_limit_ratio(self) -> float | None:
        """Bound of what the profiler's own slow-down can have moved between headings (0..1); None when unknown.

        A phase that was stretched by d to L has, whatever d was spent on, a mix that is at most d / L away from the
        undisturbed one; weighed by the phases' lengths that is the sum of all d over the step.
        """
        if self.slowdown_ns is None or self.exact.wall_ns == 0:
            return None
        return min(1.0, self.slowdown_ns / self.exact.wall_ns)

    @property
    def error(self) -> CheckedError | None:
        """What the checks of a run are summed up from, small enough to keep; None for a step of no length."""
        ratio = self.error_ratio
        return None if ratio is None else (ratio, self.is_own_setting, self.bias_limit_ratio)


CheckedError = tuple[float, bool, float | None]
"""Of one check: the share under a wrong heading, whether the setting had a window before, and the bias limit."""
