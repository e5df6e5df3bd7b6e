"""Measures how much slower a device job runs after a profiled window than before it, which is charged to pacecar.

The obvious price of a window is the profiled step.  On CUDA that is not all: CUPTI stays attached after the session
(torch does not tear it down unless TEARDOWN_CUPTI=1), and steps were seen to stay 10 to 20 % slower (pytorch issue
144455).  So the steps after each window are compared with the median of those before it.

One difference is mostly noise; the signed differences of many windows are not.  So they are summed with their signs,
and what is charged is the maximum that the sum has reached.  A cost is never taken back, because it is exported as a
counter.

A slow-down beyond AFTERMATH_STEPS cannot be told from a job that became slower by itself; it is not charged.  After the
first window, before which CUPTI was not attached, it is logged once.  Pure.
"""

from __future__ import annotations

import logging
from statistics import median

__all__ = ["AFTERMATH_STEPS", "WindowAftermath"]

AFTERMATH_STEPS = 16
"""Steps after a window that are compared: as many as fit between the windows of the shortest sensible interval."""

OUTLIER_RATIO = 1.5
"""A step counts as at most this many usual steps: a longer one saved a checkpoint or waited for something else."""

LASTING_RATIO = 0.03
"""A slow-down of the median that is worth a line in the log."""

_log = logging.getLogger(__name__)


class WindowAftermath:
    """Compares the steps after the windows of one rank with those before."""

    def __init__(self) -> None:
        self._usual_ns: int | None = None
        self._after: list[int] = []
        self._sum_ns = 0
        self._charged_ns = 0
        self._windows = 0

    def window(self, usual_ns: int | None) -> None:
        """Begin: a window was taken; steps before it took `usual_ns`, None where that is not known."""
        self._usual_ns = usual_ns
        self._after = []
        self._windows += 1

    def step(self, own_ns: int) -> int:
        """Add a step that was not profiled, less pacecar's own time in it; return what is to be charged now."""
        usual = self._usual_ns
        if usual is None:
            return 0
        self._after.append(own_ns)
        if len(self._after) < AFTERMATH_STEPS:
            return 0
        limit = round(usual * OUTLIER_RATIO)
        self._sum_ns += sum(min(own, limit) - usual for own in self._after)
        if self._windows == 1:
            self._say_what_lasts(usual)
        self._usual_ns = None
        charge, self._charged_ns = max(0, self._sum_ns - self._charged_ns), max(self._charged_ns, self._sum_ns)
        return charge

    def _say_what_lasts(self, usual: int) -> None:
        ratio = median(self._after[AFTERMATH_STEPS // 2 :]) / max(1, usual) - 1.0
        if ratio > LASTING_RATIO:
            _log.warning(
                "pacecar: steps are %.0f %% slower after the first profiled one. If that lasts, CUPTI is still"
                " attached: TEARDOWN_CUPTI=1 in the job's environment takes it away (CUDA 12.6 or newer), and"
                " windows = false in [hook] does without",
                100 * ratio,
            )
