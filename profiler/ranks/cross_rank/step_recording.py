"""Records several whole steps into a trace file, from a step that all ranks agreed on (`ranks.cross_rank_window`).

The session is one of the hook's windows over more steps, with a mark a step as torch's own profiler writes it.  A row
costs 9 us in all: half for the end of the session, a third for writing the file, the rest for recording.  The hook
charges what happens at boundaries; SLOWED_ROW_NS a row is charged for the recorded steps.

On a device a session loses rows at its beginning and its end.  So one step before the marked ones is recorded, and one
after them, in which the device finishes theirs.

What only timers know, the passes of the model and garbage collections, is kept beside it.

The session must not end while a process group's thread may write to it (`session_pause`).  If it still may
PAUSED_STEPS_MAX steps later, the recording is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch.autograd.profiler import record_function

from pacecar.profiler.timing.garbage_collections import GarbageCollections
from pacecar.profiler.timing.step_timer import Event
from pacecar.profiler.windows.session_pause import may_collectives_be_out
from pacecar.profiler.windows.window_reader import WindowReader

__all__ = ["ROW_NS", "RecordedHook", "RecordingResult", "StepRecorder"]

ROW_NS = 9_000
"""The total cost of a row (torch 2.13, CPU, 28 000 rows): 1.8 us in the step, 4.8 to end the session, 2.4 to write."""

SLOWED_ROW_NS = 2_000

PAUSED_STEPS_MAX = 20

STEPS_MIN = 4
"""A rank that begins late records at least so many steps, or none."""

PASSES = ("forward", "backward")

STEP_MARK = "ProfilerStep#"
"""The name with which torch's profiler marks steps in traces."""


class RecordedHook(Protocol):
    """The hook, as seen by a recording."""

    is_traced: bool

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


class RecordingResult(NamedTuple):
    """How a recording ended: `refusal` says why there is none.

    `timed` are passes of the model and garbage collections ("gc"), in monotonic nanoseconds.
    """

    first_step: int = 0
    steps: int = 0
    rows: int = 0
    timed: tuple[Event, ...] = ()
    refusal: str | None = None

    def __str__(self) -> str:
        return f"steps {self.first_step} to {self.first_step + self.steps - 1}, {self.rows} rows"


class _Order(NamedTuple):
    first: int
    end: int
    path: str


class StepRecorder:
    """One rank's recording.  `order` and `result` are for any thread, the rest for the training thread."""

    def __init__(self, hook: RecordedHook, charge: Callable[[int], None], *, on_device: bool) -> None:
        self._hook = hook
        self._charge = charge
        self._margin = int(on_device)
        self._order: _Order | None = None
        self._is_open = False
        self._is_paused = False
        self._mark: Any = None
        self._marked: list[int] = []
        self._collections = GarbageCollections()
        self._timed: list[Event] = []
        self.result: RecordingResult | None = None
        """The end of the last recording; None while there is none, or it goes on."""

    @property
    def is_pending(self) -> bool:
        """Whether the next boundaries matter."""
        return self._order is not None

    def order(self, first: int, steps: int, path: str) -> None:
        """Record `steps` steps from `first` on into `path`; no other recording may be pending."""
        self.result = None
        self._order = _Order(first, first + steps, path)
        self._hook.wake()

    def boundary(self, events: Iterable[Event] = ()) -> None:
        """Begin, go on with or end the recording: a step with these `events` is over.  Never raises."""
        order = self._order
        if order is None:
            return
        try:
            if self._is_open:
                self._timed += [event for event in events if event[0] in PASSES]
                self._go_on(order)
            elif self._hook.step >= order.first - self._margin:
                self._begin(order)
        except Exception as error:  # noqa: BLE001  private parts of torch, a full disk: the job goes on
            self._abandon(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Give up a recording: the job ends."""
        if self._order is not None:
            self._abandon("the job ends")

    def _begin(self, order: _Order) -> None:
        windows = self._hook.windows
        if self._hook.step > order.end - STEPS_MIN:
            self._finish(RecordingResult(refusal=f"the order for step {order.first} came at step {self._hook.step}"))
        elif not windows.is_settled:
            windows.let_pass()
        elif not windows.may_open():
            self._finish(RecordingResult(refusal="another profiler is on, or windows are not possible"))
        else:
            windows.open_recording()
            self._is_open = self._hook.is_traced = True
            self._marked, self._timed = [], []
            self._collections.start()
            self._mark_step(order)

    def _go_on(self, order: _Order) -> None:
        windows = self._hook.windows
        self._end_mark()
        if self._is_paused:
            if windows.may_end_recording():
                self._end(order)
            elif self._hook.step >= order.end + PAUSED_STEPS_MAX:
                self._abandon(f"collectives were under way for {PAUSED_STEPS_MAX} steps")
        elif self._hook.step < order.end + self._margin:
            self._mark_step(order)
        elif self._margin or not may_collectives_be_out() or windows.pause_recording():
            self._end(order)
        else:
            self._is_paused = True

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
        rows = self._hook.windows.close_recording(order.path)
        self._charge(SLOWED_ROW_NS * rows)
        timed = (*self._timed, *(("gc", start, end) for start, end in self._collections.long()))
        self._finish(RecordingResult(self._marked[0], len(self._marked), rows, timed))

    def _abandon(self, why: str) -> None:
        try:
            self._end_mark()
            if self._is_open:
                self._hook.windows.discard_recording()
        finally:
            self._finish(RecordingResult(refusal=why))

    def _finish(self, result: RecordingResult) -> None:
        if self._is_open:
            self._hook.is_traced = False
            self._collections.close()
        self._is_open = self._is_paused = False
        self._order, self.result = None, result
