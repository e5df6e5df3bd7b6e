"""Records several whole steps into a trace file, from a step that all ranks agreed on (`ranks.cross_rank_window`).

The session is one of the hook's windows over more steps, with a mark a step as torch's own profiler writes it.  Half of
what a row costs is for the end of the session, a third for writing the file, the rest for recording.  The end holds the
GIL, so no other thread can do it beside the training.  The hook charges what happens at boundaries; SLOWED_ROW_NS a row
is charged for the recorded steps.

So rows are what must be bounded.  Before each further step, and when the training thread enters a phase, `row_watch`
estimates how many there are.  If their price exceeds PRICE_NS_MAX, or what the overhead budget allowed at the
beginning, the recording ends.  It ends after a step if it has STEPS_MIN by then: the steps that all ranks have are
judged.  Else nothing more is recorded, and all of it is dropped.

On a device a session loses rows at its beginning and its end.  So one step before the marked ones is recorded, and one
after them, in which the device finishes theirs.

What only timers know, the passes of the model and garbage collections, is kept beside it.

The session must not end while a process group's thread may write to it (`session_pause`).  If it still may
PAUSED_STEPS_MAX steps later, the recording is given up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch.autograd.profiler import record_function

from pacecar.profiler.timing.garbage_collections import GarbageCollections
from pacecar.profiler.timing.preemption import Preemption
from pacecar.profiler.timing.step_timer import Event
from pacecar.profiler.windows.session_pause import may_collectives_be_out
from pacecar.profiler.windows.window_reader import WindowReader

from .row_watch import SLOWED_ROW_NS, RowWatch

__all__ = ["PRICE_NS_MAX", "STEPS_MIN", "RecordedHook", "RecordingResult", "StepRecorder", "allowed_price_ns"]

PRICE_NS_MAX = 2_000_000_000
"""The most that a recording may cost, whatever the overhead budget allows: the job stands still while it ends."""

PAUSED_STEPS_MAX = 20

STEPS_MIN = 3
"""A rank records at least so many steps, or none: fewer of two ranks are too few for the verdict's test."""

PASSES = ("forward", "backward")

_log = logging.getLogger(__name__)

STEP_MARK = "ProfilerStep#"
"""The name with which torch's profiler marks steps in traces."""


def allowed_price_ns(headroom_ns: int | None) -> int:
    """Return what a recording may cost where the overhead budget still allows `headroom_ns` (None: no limit)."""
    return PRICE_NS_MAX if headroom_ns is None else min(headroom_ns, PRICE_NS_MAX)


class RecordedHook(Protocol):
    """The hook, as seen by a recording."""

    is_traced: bool
    preemption: Preemption

    @property
    def step(self) -> int:
        """The number of the beginning step."""
        ...

    @property
    def windows(self) -> WindowReader:
        """The hook's own windows."""
        ...

    def wake(self) -> None:
        """Call the listener at the next boundary; may be called from any thread."""
        ...

    def request_window(self) -> None:
        """Request an exact window soon."""
        ...

    def headroom_ns(self) -> int | None:
        """Return what the overhead budget still allows; None: no limit."""
        ...

    def watch_phases(self, listener: Callable[[str], None] | None) -> None:
        """Call `listener`, which must not raise, with each phase that the training thread enters."""
        ...


class RecordingResult(NamedTuple):
    """How a recording ended: `refusal` says why there is none.

    `timed` are passes of the model and garbage collections ("gc"), in monotonic nanoseconds; `cost_ns` is what the
    steps and the end of the session cost.
    """

    first_step: int = 0
    steps: int = 0
    rows: int = 0
    timed: tuple[Event, ...] = ()
    cost_ns: int = 0
    refusal: str | None = None

    def __str__(self) -> str:
        return f"steps {self.first_step} to {self.first_step + self.steps - 1}, {self.rows} rows"


class _Order(NamedTuple):
    first: int
    end: int
    path: str
    step_rows: int


class StepRecorder:
    """One rank's recording.  `count`, `order` and `result` are for any thread, the rest for the training thread.

    `price_ns` returns what so many rows cost.
    """

    def __init__(
        self,
        hook: RecordedHook,
        charge: Callable[[int], None],
        price_ns: Callable[[int], int],
        *,
        on_device: bool,
    ) -> None:
        self._hook = hook
        self._charge = charge
        self._price_ns = price_ns
        self._margin = int(on_device)
        # On a device the backward runs on threads of autograd's.
        self._clock_ns = time.process_time_ns if on_device else time.thread_time_ns
        self._must_count = False
        self._order: _Order | None = None
        self._watch: RowWatch | None = None
        self._allowed_ns = 0
        self._begun_step = 0
        self._is_due = False
        self._is_open = False
        self._is_paused = False
        self._is_cut = False
        self._mark: Any = None
        self._marked: list[int] = []
        self._collections = GarbageCollections()
        self._timed: list[Event] = []
        self.result: RecordingResult | None = None
        """The end of the last recording; None while there is none, or it goes on."""

    @property
    def is_pending(self) -> bool:
        """Whether the next boundaries matter."""
        return self._order is not None or self._must_count

    @property
    def is_ordered(self) -> bool:
        """Whether a recording is pending or goes on."""
        return self._order is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a recording is pending that is not due yet: no other window may spend what it needs."""
        return self._order is not None and not self._is_due

    @property
    def steps_around(self) -> int:
        """How many steps are recorded beside those ordered."""
        return 2 * self._margin

    def count(self) -> None:
        """Have a window of this rank alone count the rows of a step soon."""
        self._must_count = True
        self._hook.wake()

    def order(self, first: int, steps: int, path: str, step_rows: int) -> None:
        """Record `steps` steps, of about `step_rows` rows, from `first` on into `path`; none may be pending."""
        self.result = None
        self._watch = RowWatch(step_rows, self._clock_ns)
        self._order = _Order(first, first + steps, path, step_rows)
        self._hook.wake()

    def boundary(self, events: Iterable[Event] = ()) -> None:
        """Begin, go on with or end the recording: a step with these `events` is over.  Never raises."""
        order, watch = self._order, self._watch
        try:
            if self._must_count:
                self._must_count = False
                self._hook.request_window()
            if order is None or watch is None:
                return
            if self._is_open:
                self._timed += [event for event in events if event[0] in PASSES]
                self._go_on(order, watch)
                return
            watch.passed()
            self._is_due = self._hook.step >= order.first - self._margin
            if self._is_due:
                self._begin(order, watch)
        except Exception as error:  # noqa: BLE001  private parts of torch, a full disk: the job goes on
            self._abandon(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Give up a recording: the job ends."""
        if self._order is not None:
            self._abandon("the job ends")

    def _begin(self, order: _Order, watch: RowWatch) -> None:
        windows = self._hook.windows
        self._allowed_ns = allowed_price_ns(self._hook.headroom_ns())
        if self._hook.step > order.end - STEPS_MIN:
            self._finish(RecordingResult(refusal=f"the order for step {order.first} came at step {self._hook.step}"))
        elif not windows.is_settled:
            windows.let_pass()
        elif not windows.may_open():
            self._finish(RecordingResult(refusal="another profiler is on, or windows are not possible"))
        elif not watch.is_ready:
            self._finish(RecordingResult(refusal="no step passed between the order and its first step"))
        elif self._is_over((STEPS_MIN + self.steps_around) * order.step_rows):
            self._finish(RecordingResult(refusal="overhead_budget no longer allows it"))
        else:
            self._measure()
            windows.open_recording()
            self._is_open = self._hook.is_traced = True
            self._is_cut = False
            self._begun_step, self._marked, self._timed = self._hook.step, [], []
            self._collections.start()
            watch.begin()
            self._hook.watch_phases(self._entered)
            self._mark_step(order)

    def _measure(self) -> None:
        """Leave what other programs take of the processor out of the cost of this boundary."""
        if not self._hook.preemption.is_begun:
            self._hook.preemption.begin()

    def _is_over(self, rows: int) -> bool:
        """Return whether so many rows cost more than was allowed."""
        return self._price_ns(rows) > self._allowed_ns

    def _go_on(self, order: _Order, watch: RowWatch) -> None:
        windows, step = self._hook.windows, self._hook.step
        self._end_mark()
        if not (self._is_paused or self._is_cut) and order.first < step < order.end:
            rows = watch.rows(step - self._begun_step) + (1 + self._margin) * order.step_rows
            if self._is_over(rows):
                self._order = order = order._replace(end=step)
                if step - order.first < STEPS_MIN:
                    self._is_cut = True
        if self._is_cut:
            self._drop(order)
        elif self._is_paused:
            if windows.may_end_recording():
                self._end(order)
            elif step >= order.end + PAUSED_STEPS_MAX:
                self._abandon(f"collectives were under way for {PAUSED_STEPS_MAX} steps")
        elif step < order.end + self._margin:
            self._mark_step(order)
        elif self._margin or not may_collectives_be_out() or windows.pause_recording():
            self._end(order)
        else:
            self._is_paused = True

    def _entered(self, phase: str) -> None:
        """Record no more if the step turns out to have too many rows; never raises."""
        watch = self._watch
        if self._is_cut or self._is_paused or watch is None or not self._is_open:
            return
        try:
            if self._is_over(watch.rows(self._hook.step - self._begun_step + 1)):
                self._is_cut = True
                self._hook.windows.pause_recording()
        except Exception:  # noqa: BLE001  inside the job's forward
            _log.debug("a recording could not be cut off", exc_info=True)

    def _drop(self, order: _Order) -> None:
        """End a recording that is cut off once no process group writes to it any more."""
        windows = self._hook.windows
        if (
            self._margin
            or not may_collectives_be_out()
            or windows.pause_recording()
            or self._hook.step >= order.end + PAUSED_STEPS_MAX
        ):
            self._abandon("its steps have too many rows")

    def _mark_step(self, order: _Order) -> None:
        if order.first <= self._hook.step < order.end:
            self._mark = record_function(f"{STEP_MARK}{self._hook.step}")
            self._mark.__enter__()
            self._marked.append(self._hook.step)

    def _end_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _end(self, order: _Order) -> None:
        self._measure()
        begun_ns = time.thread_time_ns()
        rows = self._hook.windows.close_recording(order.path)
        cost_ns = time.thread_time_ns() - begun_ns + SLOWED_ROW_NS * rows
        self._charge(SLOWED_ROW_NS * rows)
        timed = (*self._timed, *(("gc", start, end) for start, end in self._collections.long()))
        self._finish(RecordingResult(self._marked[0], len(self._marked), rows, timed, cost_ns))

    def _abandon(self, why: str) -> None:
        try:
            self._end_mark()
            if self._is_open:
                self._measure()
                self._hook.windows.discard_recording()
        finally:
            self._finish(RecordingResult(refusal=why))

    def _finish(self, result: RecordingResult) -> None:
        if self._is_open:
            self._hook.is_traced = False
            self._hook.watch_phases(None)
            self._collections.close()
        self._is_due = self._is_open = self._is_paused = self._is_cut = False
        self._order, self._watch, self.result = None, None, result
