"""Times each phase of a step on the device with CUDA events, without ever waiting for the device.

The host's timers cannot tell: the host launches work and goes on, and while it is in forward the device may still be in
the step before.  So at each boundary between phases an event is recorded into the stream in which the job launches.
The device passes it when it has done all that was launched before, and not before the host has come there:

    host     f f f f B B B B O O . . . . . . f f f         launched
    device   . . f f f f f f B B B B B B O O . f f f       done; where the host was late the phase begins idle
             |   ^forward    ^backward   ^optimizer

One event is the end of one phase and the beginning of the next, so a step's phases sum to its length on the device
exactly, rounding included, and the end of one step is the beginning of the next.

Events are asked by `query()` at later boundaries, in the order of the steps, and read when all of a step's are done.
This happens on the training thread only: a query from another thread would break a CUDA graph that is being captured
meanwhile (the reason why torch's own NCCL watchdog has a guard against it).  Events come from a pool of EVENTS_MAX.
These steps have no device times and are counted: one for which the pool does not suffice, one that was captured into a
graph, and one whose events are not done STEPS_MAX steps later.  Whatever the driver raises ends this timer and is
logged once; the host's timers go on.

No torch here but for `CudaStream`, which is the one edge.  Left out: what ran inside a phase (exact windows), and what
the times are used for (`pacecar.profiler.ledger.estimate`).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Protocol

import torch

from ..ledger.attribution import REST

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
"""Pool size: eight steps of twenty micro-batches with five marks each; an event takes the driver some hundred bytes."""

STEPS_MAX = 8
"""Steps that wait for the device; a host is seldom more than two or three ahead, as the launch queue is bounded."""

READS_MAX = 2
"""Steps read at one boundary: one more than are added, so that a backlog shrinks and no boundary pays for many."""

_log = logging.getLogger(__name__)


class TimingEvent(Protocol):
    """The part of torch.cuda.Event(enable_timing=True) that is used."""

    def query(self) -> bool: ...  # noqa: D102
    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401  of its own kind
        """Return the milliseconds from this event to `end_event`, both done."""
        ...


class Stream(Protocol):
    """The stream into which the calling thread launches, where marks are recorded."""

    def make(self) -> TimingEvent: ...  # noqa: D102
    def record(self, event: TimingEvent, /) -> None: ...  # noqa: D102
    def is_capturing(self) -> bool: ...  # noqa: D102


class DeviceStep:
    """One step's marks, and its `phases` once the device has passed them all; `is_settled` when that is decided."""

    __slots__ = ("is_settled", "marks", "owns_end", "phases")

    def __init__(self, marks: list[tuple[str, TimingEvent]]) -> None:
        self.marks = marks
        self.owns_end = False
        """Whether no later step begins with this one's last event."""
        self.is_settled = False
        self.phases: dict[str, int] | None = None


class DeviceTimer:
    """Keeps the marks of the step under way, and the steps whose marks the device has not passed yet."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free: list[TimingEvent] = []
        self._made = 0
        self._marks: list[tuple[str, TimingEvent]] = []
        self._is_complete = False
        """Whether the step under way has a beginning and lacks no mark so far."""
        self._waiting: deque[DeviceStep] = deque()
        self.is_alive = True
        self.untimed_steps = 0
        """Steps that have no device times: too many marks, captured, or not done for too long."""

    def enter(self, phase: str) -> None:
        """Mark that what is launched from now on is `phase`; on any thread that launches for the step."""
        if not (self.is_alive and self._is_complete):
            return
        try:
            self._mark(phase)
        except Exception as error:  # noqa: BLE001  whatever a driver raises
            self._give_up(error)

    def finish(self) -> DeviceStep | None:
        """End the step and begin the next one, at a boundary; read what the device has passed meanwhile.

        None: this step has no device times.
        """
        if not self.is_alive:
            return None
        try:
            return self._finish()
        except Exception as error:  # noqa: BLE001  as above
            self._give_up(error)
            return None

    def skip(self) -> None:
        """Drop the marks of the step under way, which is not measured."""
        self._is_complete = False
        if not self._marks:
            return
        (_, begin), *others = self._marks
        self._free.extend(event for _, event in others)
        self._marks = []
        if self._waiting and self._waiting[-1].marks[-1][1] is begin:
            self._waiting[-1].owns_end = True
        else:
            self._free.append(begin)

    def _finish(self) -> DeviceStep | None:
        self._read()
        end = None if self._stream.is_capturing() else self._take()
        if not self._is_complete or end is None:
            self.untimed_steps += bool(self._marks)
            self.skip()
        if end is None:
            return None
        self._stream.record(end)
        step: DeviceStep | None = None
        if self._is_complete:
            step = DeviceStep([*self._marks, (REST, end)])
            self._waiting.append(step)
            self._drop_old()
        self._marks = [(REST, end)]
        self._is_complete = True
        return step

    def _mark(self, phase: str) -> None:
        event = None if self._stream.is_capturing() else self._take()
        if event is None:
            self._is_complete = False
            return
        self._stream.record(event)
        self._marks.append((phase, event))

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
            if not all(event.query() for _, event in reversed(step.marks)):
                return
            self._waiting.popleft()
            step.phases = _durations(step.marks)
            self._let_go(step)

    def _drop_old(self) -> None:
        while len(self._waiting) > STEPS_MAX:
            self.untimed_steps += 1
            self._let_go(self._waiting.popleft())

    def _let_go(self, step: DeviceStep) -> None:
        step.is_settled = True
        self._free.extend(event for _, event in step.marks[: None if step.owns_end else -1])
        step.marks = []

    def _give_up(self, error: Exception) -> None:
        self.is_alive = False
        self._free.clear()
        self._marks = []
        for step in self._waiting:
            step.is_settled = True
        self._waiting.clear()
        _log.warning("pacecar times no more phases on the device, only on the host: %s", error)


def _durations(marks: list[tuple[str, TimingEvent]]) -> dict[str, int]:
    """Return nanoseconds by phase; they sum to the time from the first mark to the last.

    Marks of several streams may be passed in another order than they were made: one that was passed before the mark
    before it adds nothing.
    """
    first = marks[0][1]
    phases: dict[str, int] = {}
    before, phase = 0, marks[0][0]
    for name, event in marks[1:]:
        at = max(before, round(first.elapsed_time(event) * 1e6))
        phases[phase] = phases.get(phase, 0) + at - before
        before, phase = at, name
    return phases


class CudaStream:
    """The current stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self) -> TimingEvent:
        """Return a new event; the driver's part is made when it is first recorded."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self, event: Any) -> None:  # noqa: ANN401  a torch.cuda.Event, whose methods have no types
        """Put `event` behind what was launched so far; does not wait."""
        event.record(torch.cuda.current_stream(self._device))

    def is_capturing(self) -> bool:
        """Return whether launches go into a CUDA graph: an event there would be part of the graph."""
        return torch.cuda.is_current_stream_capturing()


def device_timer(device: torch.device) -> DeviceTimer | None:
    """Return a timer for jobs on a CUDA device, None for all others."""
    return DeviceTimer(CudaStream(device)) if device.type == "cuda" else None
