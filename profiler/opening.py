"""When does a window open around a step of this job, and which step pays for it?

A window is opened between two steps, so its opening, ending and reading fall into steps that are not the profiled one.
The opening is kept until the window ends, and the price of all three goes with the profiled step to the budget, by the
books.  The budget is asked twice, because what other threads have not yet written it does not know.
Left out: whose turn it is and what may be spent (`budget`, `turns`), and what a window sees (`measurement`).
"""

from __future__ import annotations

from collections.abc import Callable

from pacecar.profiler.books import Books, FinishedStep
from pacecar.profiler.budget import Budget
from pacecar.profiler.measurement import WindowMeter
from pacecar.profiler.steptimer import StepTimer, time_step

__all__ = ["Opening"]


class Opening:
    """Opens the meter's windows as the budget allows, and has what they saw entered; called at boundaries."""

    def __init__(
        self, meter: WindowMeter, budget: Budget, books: Books, timer: StepTimer, now_ns: Callable[[], int]
    ) -> None:
        self._meter = meter
        self._budget = budget
        self._books = books
        self._timer = timer
        self._now_ns = now_ns
        self._price_ns = 0
        self.may_be_open = False
        """False: it is closed.  It also closes by itself."""
        self.has_aftermath = False
        """The step under way pays for a window, or for somebody's trace."""

    def try_to_open(self, step: int) -> None:
        """Open a window for `step`, or go on with the one that is open on a device that first runs dry."""
        if not self._meter.is_open:
            self.may_be_open = False
            if not self._budget.is_due(step):
                return
            if not self._budget.wants_window(step) and self._books.is_fresh:
                return
            self._books.settle()  # the budget must know what was spent
            if not self._budget.wants_window(step) or not self._meter.may_open():
                return
            begun = self._now_ns()
            self._meter.open()
            self.may_be_open = True
            self._price_ns = self._now_ns() - begun
        self._timer.keep_marks()

    def end(self, finished: FinishedStep) -> None:
        """Read the window of the step that is over; ending and reading it falls into the next step."""
        begun = self._now_ns()
        finished.was_profiled = finished.disturbed = self.has_aftermath = True
        finished.timed = time_step(finished.raw)
        self._books.learn(finished, finished.timed, self._meter.close(finished.timed))
        if not self._meter.is_open:
            self.may_be_open = False
            finished.price_ns = self._price_ns + self._now_ns() - begun
            self._price_ns = 0
