"""Defines the record that compares the estimate of a step with its exact window, and computes the error.

Before an exact window becomes a calibration, its step is estimated from timers as if it had not been profiled, and both
ledgers are recorded.  Their total variation distance is the share of the step under a wrong heading.
"""

from __future__ import annotations

import msgspec

from pacecar.records.measurements.ledger import Ledger
from pacecar.records.ranges import Count, Label, Nanoseconds, Rank

__all__ = ["CheckedError", "EstimateCheck"]


class EstimateCheck(msgspec.Struct, frozen=True, kw_only=True, tag="estimate_check"):
    """An exact window of one rank, and the estimate of the same step with the previous calibration.

    That calibration is `calibration_age_steps` old, has the same knobs if `is_own_setting`, and was made from `windows`
    windows.  `slowdown_ns` is how much longer than usual the phases of this step took, mostly because of the profiler;
    None if no usual step is known.
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
        """Share of the step under a wrong heading (0..1), the total variation distance; None for an empty step.

        Half the sum of the absolute differences, because what is too much in one heading is missing in another.
        """
        if self.exact.wall_ns == 0:
            return None
        return sum(map(abs, self.heading_errors_ns.values())) / (2 * self.exact.wall_ns)

    @property
    def bias_limit_ratio(self) -> float | None:
        """Bound on the share that the profiler's own slowdown moved between headings (0..1); None if unknown.

        Whatever a phase of length L spent its extra time d on, its mix differs by at most d / L from the undisturbed
        one.  Weighted by the phases' lengths, that is the sum of all d over the step.
        """
        if self.slowdown_ns is None or self.exact.wall_ns == 0:
            return None
        return min(1.0, self.slowdown_ns / self.exact.wall_ns)

    @property
    def error(self) -> CheckedError | None:
        """The part that is kept to sum up a run's checks; None for an empty step."""
        ratio = self.error_ratio
        return None if ratio is None else (ratio, self.is_own_setting, self.bias_limit_ratio)


CheckedError = tuple[float, bool, float | None]
"""The error ratio of a check, whether the calibration had the same knobs, and the bias limit."""
