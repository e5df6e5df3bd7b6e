"""Counts profiler rows in a few milliseconds of a step (a slice), to predict the price of a whole window.

A session must end on the thread that began it and outside of backward: autograd's engine restores the thread's state
when it is done, including a session that has ended.  A dense forward may take seconds between two of our hooks.  So a
Python profile function (`sys.setprofile`), which the interpreter runs at every call of that thread, ends the session:
at the first call after SLICE_NS of processor time, or at the call that enters the engine.  The function is set only for
these milliseconds, and never if there already is one.

    boundary ... | forward  sss...........|  backward  | optimizer ........... |      s the slice of the forward
    boundary ... | forward  ..............|  backward  | optimizer sss........ |      s the slice of the optimizer

A record that begins inside a phase ends inside it, so none in a slice outlives the step.  The step is marked as
disturbed, and the cost is charged.  `window_price` uses the count.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pacecar.torch_internals import find

from ..timing.torch_compile import keep_out
from .window_price import SLICE_NS, Part, Slice
from .window_reader import WindowReader

__all__ = ["RowDensityProbe"]

_log = logging.getLogger(__name__)

_ENGINE_CALLS = frozenset({"run_backward"})
"""Functions that enter autograd's engine."""


class RowDensityProbe:
    """Takes one slice at a time, armed at a boundary; all calls come from the training thread and none raises."""

    def __init__(self, reader: WindowReader, charge: Callable[[int], None]) -> None:
        self._reader = reader
        self._charge = charge
        self._graph_task: Callable[[], int] | None = find("torch._C._current_graph_task_id")
        self._part: Part | None = None
        self._thread = 0
        self._begun_ns = 0
        self._cost_ns = 0
        self._is_running = False
        self._found: Slice | None = None
        keep_out(RowDensityProbe.entered, RowDensityProbe._called)

    @property
    def is_possible(self) -> bool:
        """Whether this torch can report backward and omit annotations, and no profile function is set."""
        return self._graph_task is not None and sys.getprofile() is None and self._reader.can_be_sliced

    @property
    def is_in_backward(self) -> bool:
        """Whether autograd's engine runs in this thread, where a session must not end; True also if unknown."""
        return self._graph_task is None or self._graph_task() != -1

    @property
    def is_armed(self) -> bool:
        """Whether a slice of the current step will be or was taken."""
        return self._part is not None

    def arm(self, part: Part) -> None:
        """Take a slice of `part` in the beginning step."""
        self._part, self._found, self._cost_ns = part, None, 0
        self._thread = threading.get_ident()

    def entered(self, phase: str) -> None:
        """Handle that the training thread enters `phase`."""
        if self._is_running:
            self._end()
        elif phase == self._part and self._found is None:
            self._begin()

    def next_part(self) -> tuple[Part, Slice, int] | None:
        """End the slice at the boundary; return its part, its counts and its cost, or None if there was no slice."""
        part, self._part = self._part, None
        if self._is_running:
            self._end()
        found, self._found = self._found, None
        return None if part is None or found is None else (part, found, self._cost_ns)

    def abandon(self) -> None:
        """End a running slice and restore torch's and Python's state."""
        self._part = None
        if self._is_running:
            self._end()

    def _begin(self) -> None:
        begun = time.monotonic_ns()
        try:
            if not (
                threading.get_ident() == self._thread
                and not self.is_in_backward
                and sys.getprofile() is None
                and self._reader.may_open()
            ):
                return
            self._reader.open_slice()
            self._is_running = True
            self._begun_ns = time.thread_time_ns()
            sys.setprofile(self._called)
        except Exception:  # noqa: BLE001  inside the job's forward
            _log.debug("a slice could not begin", exc_info=True)
        finally:
            self._pay(time.monotonic_ns() - begun)

    def _called(self, frame: object, event: str, argument: Any) -> None:  # noqa: ANN401  python's profile function
        is_at_engine = event == "c_call" and getattr(argument, "__name__", "") in _ENGINE_CALLS
        if is_at_engine or time.thread_time_ns() - self._begun_ns >= SLICE_NS:
            self._end()

    def _end(self) -> None:
        try:
            if threading.get_ident() != self._thread or self.is_in_backward:
                return  # a later call ends it
            spent_ns = time.thread_time_ns() - self._begun_ns
            begun, ended_ns = time.monotonic_ns(), time.thread_time_ns()
            self._is_running = False
            if sys.getprofile() == self._called:
                sys.setprofile(None)
            rows = self._reader.close_slice()
            if rows is not None:
                self._found = Slice(rows, spent_ns, time.thread_time_ns() - ended_ns)
                self._pay(self._found.slowed_ns)
            self._pay(time.monotonic_ns() - begun)
        except Exception:  # noqa: BLE001  as above
            _log.debug("a slice could not end", exc_info=True)

    def _pay(self, cost_ns: int) -> None:
        self._cost_ns += cost_ns
        self._charge(cost_ns)
