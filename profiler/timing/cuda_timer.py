"""Times each phase of a step on the device with CUDA events, without ever waiting for the device.

The host's timers cannot show this: the host launches work and goes on, and while it is in forward the device may still
be in the previous step.  So at each boundary between phases an event is recorded into the stream that the job launches
into.  The device passes the event once it has finished all work launched before it:

    host     f f f f B B B B O O . . . . . . f f f         launched
    device   . . f f f f f f B B B B B B O O . f f f       done; where the host was late the phase begins idle
             |   ^forward    ^backward   ^optimizer

One event ends a phase and begins the next, so a step's phases sum exactly to its length on the device, rounding
included, and each step begins where the previous one ends.

Events are polled with `query()` at later boundaries, in step order, and read when all of a step's are done.  Only the
training thread does this: a query from another thread would break a CUDA graph that is being captured (torch's own NCCL
watchdog has a guard for the same reason).  Events come from a pool of EVENTS_MAX.  A step has no device times, and is
counted as such, if the pool is too small for it, if it was captured into a graph, if its events are not done STEPS_MAX
steps later (logged once), or if the device's clock went back.  Any driver error ends this timer and is logged once; the
host's timers go on.

Only `CudaStream` touches torch.  Exact windows show what ran inside a phase; `pacecar.profiler.windows.estimate` uses
the times.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from pacecar.ledger.attribution import REST

__all__ = [
    "EVENTS_MAX",
    "STEPS_MAX",
    "CudaStream",
    "DeviceStep",
    "DeviceTimer",
    "Stream",
    "TimingEvent",
    "device_timer",
]

EVENTS_MAX = 1024
"""Pool size: ten steps of twenty micro-batches with five marks each; the driver needs a few hundred bytes an event."""

STEPS_MAX = 64
"""The most steps waiting for the device.  The driver's queue holds about a thousand launches, so a loop that never
reads its loss runs two or three large steps ahead, or fifty steps of twenty kernels."""

READS_MAX = 2
"""Steps read at one boundary: one more than is added, so that a backlog shrinks without one boundary paying for it."""

_log = logging.getLogger(__name__)


class TimingEvent(Protocol):
    """The part of torch.cuda.Event(enable_timing=True) that we use."""

    def record(self, stream: torch.cuda.Stream) -> object: ...  # noqa: D102
    def query(self) -> bool: ...  # noqa: D102
    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401  of its own kind
        """Return the milliseconds from this event to `end_event`, both of them done."""
        ...


class Stream(Protocol):
    """The stream that the calling thread launches into, where marks are recorded."""

    def make(self) -> TimingEvent: ...  # noqa: D102
    def record(self, event: TimingEvent, /) -> int:
        """Record the event and return the number of its stream."""
        ...

    def is_capturing(self) -> bool: ...  # noqa: D102


class Mark(NamedTuple):
    """`phase` begins at `event`, which was recorded into `stream`."""

    phase: str
    event: TimingEvent
    stream: int


class DeviceStep:
    """One step's marks, and its `phases` once the device has passed them all; `is_settled` once that is known.

    `is_behind`: when the host ended the step, the device had not ended the one before.
    """

    __slots__ = ("is_behind", "is_settled", "marks", "owns_end", "phases")

    def __init__(self, marks: list[Mark], *, is_behind: bool = False) -> None:
        self.marks = marks
        self.is_behind = is_behind
        self.owns_end = False
        """Whether this step's last event does not begin a later step."""
        self.is_settled = False
        self.phases: dict[str, int] | None = None


class DeviceTimer:
    """Keeps the current step's marks and the steps whose marks the device has not passed yet."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free: list[TimingEvent] = []
        self._made = 0
        self._marks: list[Mark] = []
        self._is_complete = False
        """Whether the current step has a beginning and all of its marks so far."""
        self._waiting: deque[DeviceStep] = deque()
        self.is_alive = True
        self.untimed_steps = 0
        """The number of steps without device times: too many marks, captured, late, or the clock went back."""
        self._has_told = False

    def enter(self, phase: str) -> None:
        """Mark the beginning of `phase`, for work launched from now on, on any thread that launches for the step."""
        if not (self.is_alive and self._is_complete):
            return
        try:
            self._mark(phase)
        except Exception as error:  # noqa: BLE001  whatever a driver raises
            self._give_up(error)

    def finish(self) -> DeviceStep | None:
        """End the step and begin the next one, at a boundary; read the events that the device has passed.

        Return None if this step has no device times.
        """
        if not self.is_alive:
            return None
        try:
            return self._finish()
        except Exception as error:  # noqa: BLE001  as above
            self._give_up(error)
            return None

    def has_begun(self, step: DeviceStep) -> bool | None:
        """Return whether the device has reached the beginning of `step`, the last one; None if it cannot be asked."""
        if step.phases is not None:
            return True
        if not (self.is_alive and step.marks):
            return None
        try:
            return None if self._stream.is_capturing() else step.marks[0].event.query()
        except Exception as error:  # noqa: BLE001  as above
            self._give_up(error)
            return None

    def skip(self) -> None:
        """Drop the marks of the current step, which is not measured."""
        self._is_complete = False
        if not self._marks:
            return
        begin, *others = self._marks
        self._free.extend(mark.event for mark in others)
        self._marks = []
        if self._waiting and self._waiting[-1].marks[-1].event is begin.event:
            self._waiting[-1].owns_end = True
        else:
            self._free.append(begin.event)

    def _finish(self) -> DeviceStep | None:
        self._read()
        end = None if self._stream.is_capturing() else self._take()
        if not self._is_complete or end is None:
            self.untimed_steps += bool(self._marks)
            self.skip()
        if end is None:
            return None
        boundary = Mark(REST, end, self._stream.record(end))
        step: DeviceStep | None = None
        if self._is_complete:
            step = DeviceStep([*self._marks, boundary], is_behind=bool(self._waiting))
            self._waiting.append(step)
            self._drop_old()
        self._marks = [boundary]
        self._is_complete = True
        return step

    def _mark(self, phase: str) -> None:
        event = None if self._stream.is_capturing() else self._take()
        if event is None:
            self._is_complete = False
            return
        self._marks.append(Mark(phase, event, self._stream.record(event)))

    def _take(self) -> TimingEvent | None:
        if self._free:
            return self._free.pop()
        if self._made >= EVENTS_MAX:
            return None
        self._made += 1
        return self._stream.make()

    def _read(self) -> None:
        if self._waiting and self._stream.is_capturing():
            return
        for _ in range(READS_MAX):
            if not self._waiting:
                return
            step = self._waiting[0]
            # The last first: it is done last, so one query is enough while the device is behind.
            if not all(mark.event.query() for mark in reversed(step.marks)):
                return
            self._waiting.popleft()
            step.phases = _durations(step.marks)
            self.untimed_steps += step.phases is None
            self._let_go(step)

    def _drop_old(self) -> None:
        while len(self._waiting) > STEPS_MAX:
            self.untimed_steps += 1
            self._let_go(self._waiting.popleft())
            if not self._has_told:
                self._has_told = True
                _log.warning(
                    "pacecar: the device is more than %d steps behind its host; until it catches up, ledgers between"
                    " windows come from the host's timers alone",
                    STEPS_MAX,
                )

    def _let_go(self, step: DeviceStep) -> None:
        step.is_settled = True
        self._free.extend(mark.event for mark in step.marks[: None if step.owns_end else -1])
        step.marks = []

    def _give_up(self, error: Exception) -> None:
        self.is_alive = False
        self._free.clear()
        self._marks = []
        for step in self._waiting:
            step.is_settled = True
        self._waiting.clear()
        _log.warning("pacecar stops timing phases on the device and uses only the host's timers: %s", error)


def _durations(marks: list[Mark]) -> dict[str, int] | None:
    """Return nanoseconds by phase; they sum to the time from the first mark to the last.

    The device may pass marks of several streams out of order: a mark passed before its predecessor adds nothing.
    Within one stream that is impossible and means that the device's clock was set back; the result is then None.
    """
    first = marks[0].event
    latest = {marks[0].stream: 0}
    phases: dict[str, int] = {}
    before, phase = 0, marks[0].phase
    for mark in marks[1:]:
        passed = round(first.elapsed_time(mark.event) * 1e6)
        if passed < latest.get(mark.stream, passed):
            return None
        latest[mark.stream] = passed
        at = max(before, passed)
        phases[phase] = phases.get(phase, 0) + at - before
        before, phase = at, mark.phase
    return phases


class CudaStream:
    """The current stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self) -> TimingEvent:
        """Return a new event; the driver creates its part when the event is first recorded."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self, event: TimingEvent) -> int:
        """Record `event` after the work launched so far, without waiting, and return the stream's number."""
        stream = torch.cuda.current_stream(self._device)
        event.record(stream)
        return int(stream.cuda_stream)

    def is_capturing(self) -> bool:
        """Return whether launches go into a CUDA graph, which an event would become part of.

        Checks this device and the current one, if the loop has selected another: a query would break its capture.
        """
        if torch.cuda.is_current_stream_capturing():
            return True
        if torch.cuda.current_device() == self._device.index:
            return False
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()


def device_timer(device: torch.device) -> DeviceTimer | None:
    """Return a timer for jobs on a CUDA device, None for other jobs."""
    return DeviceTimer(CudaStream(device)) if device.type == "cuda" else None
