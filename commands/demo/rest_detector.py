"""Decides when the demo may end: a change was kept, nothing is being tried any more, and the overhead is in budget.

A fixed length is wrong twice: on a quiet machine most of it is waiting, and a trial that has just begun is cut off.  So
the demo ends when its tuner has found something better, has been watching for REST_SECONDS without another trial, and
pacecar's own cost is within the budget again, start-up included.  A tuner that found nothing looks again by itself
after a while (the policy's second look), so the demo goes on; a time limit, which the training script keeps, ends it
all the same.

Pure: what the records say, and a clock that is passed in.
"""

from __future__ import annotations

from .progress import Progress

__all__ = ["REST_SECONDS", "RestDetector"]

REST_SECONDS = 20.0
"""Time at the settings that were found: some hundred steps, which the report compares with those before."""


class RestDetector:
    """Says, each time it is asked, whether the demo may end; `overhead_budget` is the ratio that the hook may take."""

    def __init__(self, overhead_budget: float) -> None:
        self._overhead_budget = overhead_budget
        self._since_seconds: float | None = None

    def is_over(self, progress: Progress, now_seconds: float) -> bool:
        """Return whether the job may end now, as far as `progress` knows at `now_seconds`."""
        if not progress.kept or progress.trial is not None or not progress.is_watching:
            self._since_seconds = None
            return False
        if self._since_seconds is None:
            self._since_seconds = now_seconds
        ratio = progress.overhead_ratio()
        is_paid = ratio is not None and ratio <= self._overhead_budget
        return is_paid and now_seconds - self._since_seconds >= REST_SECONDS
