"""When does a window open around a step of this job, and which step pays for it?

A window is opened between two steps, so its opening, ending and reading fall into steps that are not the profiled one.
The opening is kept until the window ends, and the price of all three goes with the profiled step to the budget, by the
books.  The budget is asked twice, because what other threads have not yet written it does not know.

Price.  Opening, ending and reading are wall time less what other programs had of the processor meanwhile
(`preemption`).  The profiled step itself is slower, and on a busy machine its wall time does not say by how much: it
takes a third more or less by itself.  On a CPU job all that a window adds is work of the training thread, so there the
processor's time of that step is held against its mean since the last window or switch of a knob, to within a boundary.

Left out: whose turn it is and what may be spent (`budget`, `turns`), and what a window sees (`measurement`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pacecar.profiler.books import Books, FinishedStep
from pacecar.profiler.budget import Budget, ThreadTime
from pacecar.profiler.measurement import WindowMeter
from pacecar.profiler.preemption import Preemption
from pacecar.profiler.steptimer import StepTimer

__all__ = ["Opening"]


class Opening:
    """Opens the meter's windows as the budget allows, and has what they saw entered; called at boundaries."""

    def __init__(
        self,
        meter: WindowMeter,
        budget: Budget,
        books: Books,
        timer: StepTimer,
        now_ns: Callable[[], int],
        preemption: Preemption,
        *,
        on_device: bool,
    ) -> None:
        self._meter = meter
        self._budget = budget
        self._books = books
        self._timer = timer
        self._now_ns = now_ns
        self._preemption = preemption
        self._on_device = on_device
        self._price_ns = 0
        self._mark: tuple[int, int] | None = None
        self._usual_ns: int | None = None
        self._thread_ns = 0
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
            self._preemption.begin()
            self._books.settle()  # the budget must know what was spent
            self._preemption.end()
            if not self._budget.wants_window(step) or not self._meter.may_open():
                return
            begun = self._now_ns()
            self._preemption.begin()
            self._meter.open()
            self.may_be_open = True
            self._price_ns = self._now_ns() - begun - self._preemption.end()
            self.slows(step)
        self._timer.keep_marks()

    def mark(self, step: int) -> None:
        """Take the steps from `step` on as those that a slowed one is held against; called where one begins."""
        self._mark = (step, time.thread_time_ns())

    def slows(self, step: int) -> None:
        """Note that pacecar slows the step that begins: it is profiled, or its operations are counted."""
        mark, now_ns = self._mark, time.thread_time_ns()
        is_known = mark is not None and not self._on_device and step > mark[0]
        self._usual_ns = (now_ns - mark[1]) // (step - mark[0]) if is_known and mark is not None else None
        self._thread_ns = now_ns

    def thread_time(self) -> ThreadTime | None:
        """Return what the step that was slowed took of the processor, asked once where it ends; None: nobody knows."""
        usual_ns, self._usual_ns = self._usual_ns, None
        return None if usual_ns is None else ThreadTime(time.thread_time_ns() - self._thread_ns, usual_ns)

    def end(self, finished: FinishedStep) -> None:
        """Read the window of the step that is over; ending and reading it falls into the next step."""
        begun = self._now_ns()
        finished.thread_time = finished.thread_time or self.thread_time()
        self._preemption.begin()
        finished.was_profiled = finished.disturbed = self.has_aftermath = True
        finished.timed = self._books.time(finished)
        stops = [stop.stretch for stop in finished.stops]
        self._books.learn(finished, finished.timed, self._meter.close(finished.timed, stops))
        if not self._meter.is_open:
            self.may_be_open = False
            finished.price_ns = self._price_ns + max(0, self._now_ns() - begun - self._preemption.end())
            self._price_ns = 0
            self.mark(finished.step + 1)
        else:
            self._preemption.end()
