"""Times each phase of a step on the host from the intervals recorded by the hooks.

A step runs from one optimizer update to the next and may contain several forwards and backwards (accumulation), so a
phase's time is a sum.  The loop only records intervals: between two of them the job evicts our code from the caches,
and work done there costs ten times as much as when batched.  `time_step` adds them up later, off the step path.

    data_wait | forward | backward ........... backward_tail | optimizer | overhead | stopped | rest (what is left)

backward ends when autograd has nothing left to compute; backward_tail is DDP's wait after that for its last
all-reduces, the exposed communication of a CPU job.

There is no lock: marks come from the training thread and, on CUDA, from autograd's thread while the training thread
waits for it.  On CUDA each mark is also made on the device (`cuda_timer`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pacecar.ledger.attribution import REST

from .cuda_timer import DeviceStep, DeviceTimer

__all__ = [
    "EVENTS_MAX", "PHASES", "STOPPED", "Event", "RawStep", "StepTimer", "Stretch", "TimedStep", "phase_of",
    "stopped_within", "time_step",
]  # fmt: skip

PHASES = ("overhead", "data_wait", "checkpoint", "backward_tail", "backward", "forward", "optimizer")
"""In order of priority for times claimed by two phases: a phase nested in another comes first."""

STOPPED = "stopped"
"""The phase for all times when the process did not run; see `process_stops`."""

EVENTS_MAX = 4096
"""The most intervals kept before they are added up, a thousand micro-batches; beyond this there are no marks."""

Stretch = tuple[int, int]
Event = tuple[str, int, int]
"""A phase, its start and its end."""
Absorbed = tuple[dict[str, int], int] | None
"""Phases and micro-batches of the events that are already added up."""


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step; times are monotonic nanoseconds, `phases` are disjoint durations inside it."""

    start_ns: int
    end_ns: int
    phases: dict[str, int]
    marks: dict[str, list[Stretch]]
    micro_batches: int
    overhead_ns: int
    device: DeviceStep | None = None
    """What the device timer knows of it; None for a CPU job."""
    elements: int | None = None
    """The elements of the first tensor that each forward was called with: its work, compared with the same model's."""

    @property
    def wall_ns(self) -> int:
        """The step's wall time."""
        return self.end_ns - self.start_ns

    @property
    def backward_ns(self) -> int | None:
        """The whole backward including its tail; None if there was none."""
        if "backward" not in self.phases:
            return None
        return self.phases["backward"] + self.phases.get("backward_tail", 0)


class RawStep(msgspec.Struct, eq=False):
    """One finished step as recorded, not yet added up; `was_marked` asks for the marks too.

    A Struct because its constructor runs no Python frame: it is made on the step path.
    """

    start_ns: int
    end_ns: int
    events: list[Event]
    overhead_ns: int
    was_marked: bool
    absorbed: Absorbed
    device: DeviceStep | None = None
    """The step's marks on the device, whose phases are known some steps later."""


class StepTimer:
    """Collects the events of the current step; the first step has no start until the hooks see the job run."""

    def __init__(self) -> None:
        self.start_ns: int | None = None
        """When the current step began; None before the job's first event."""
        self._is_marked = False
        self._absorbed: Absorbed = None
        self.device: DeviceTimer | None = None
        """On a device job, the timer that also marks the phases on the device."""
        self.events: list[Event] = []
        """The intervals of this step in the order in which they ended; every observer appends its own."""
        self.overhead_ns = 0
        """Pacecar's own time in this step so far; every part that spends time adds it."""

    def finish(self, now_ns: int) -> RawStep:
        """End the step at `now_ns` and begin the next one, without marks until `keep_marks`."""
        events, start_ns = self.events[:], self.start_ns
        if start_ns is None:  # the first step begins with the job's first event
            start_ns = min((start for _, start, _ in events), default=now_ns)
        step = RawStep(start_ns, now_ns, events, self.overhead_ns, self._is_marked, self._absorbed)
        if self.device is not None:
            step.device = self.device.finish()
        self.start_ns = now_ns
        self._is_marked = False
        self._absorbed = None
        self.events.clear()  # clear the same list: others hold it
        self.overhead_ns = 0
        return step

    def skip(self, now_ns: int) -> int:
        """End a step that is not measured; return its wall time."""
        start_ns = now_ns if self.start_ns is None else self.start_ns
        self.start_ns = now_ns
        self._absorbed = None
        self.events.clear()
        if self.device is not None:
            self.device.skip()
        return now_ns - start_ns

    def waits(self) -> None:
        """Record that the loop begins to wait for data."""
        if self.device is not None:
            self.device.enter("data_wait")

    def waited(self, start_ns: int, end_ns: int) -> None:
        """Record that the loop got the data, or that there is none left."""
        self.events.append(("data_wait", start_ns, end_ns))
        if self.device is not None:
            self.device.enter(REST)

    def keep_marks(self) -> None:
        """Keep the intervals of this step as marks; call at its beginning."""
        self._is_marked = True

    def absorb(self) -> None:
        """Add up what was recorded so far, so that the list stays bounded in a loop that never ends a step."""
        if self.start_ns is None:
            self.start_ns = min((start for _, start, _ in self.events), default=None)
        phases, micro_batches = self._absorbed or ({}, 0)
        self._absorbed = _add_up(self.events, dict(phases)), micro_batches + _forwards(self.events)
        self.events.clear()


def time_step(raw: RawStep, stops: Sequence[Stretch] = (), *, elements: int | None = None) -> TimedStep:
    """Add up the phases of a step; `stops`, in which the process did not run, count only as STOPPED.

    An optimizer may run a closure with forward and backward inside, whose time is not the optimizer's.
    """
    phases, micro_batches = raw.absorbed or ({}, 0)
    marks: dict[str, list[Stretch]] = {}
    if raw.was_marked:
        for phase, start, end in raw.events:
            marks.setdefault(phase, []).append((start, end))
    added = _add_up(raw.events, dict(phases), stops)
    overhead_ns = raw.overhead_ns
    if stops:
        added[STOPPED] = stopped_within(stops, raw.start_ns, raw.end_ns)
        ours = [(start, end) for phase, start, end in raw.events if phase == "overhead"]
        # Run delay that `preemption` has left out already may be called a stop as well.
        left_out_ns = max(0, sum(end - start for start, end in ours) - overhead_ns)
        overhead_ns -= max(0, sum(stopped_within(stops, start, end) for start, end in ours) - left_out_ns)
    return TimedStep(
        start_ns=raw.start_ns,
        end_ns=raw.end_ns,
        phases=added,
        marks=marks,
        micro_batches=micro_batches + _forwards(raw.events),
        overhead_ns=max(0, overhead_ns),
        device=raw.device,
        elements=elements,
    )


def phase_of(raw: RawStep, start_ns: int, end_ns: int) -> str:
    """Return the phase that most of an interval was in, the innermost if nested; "outside" if none."""

    def within(event: Event) -> tuple[int, int]:
        _, start, end = event
        return stopped_within([(start_ns, end_ns)], start, end), start - end

    most = max(raw.events, key=within, default=None)
    return most[0] if most is not None and 2 * within(most)[0] >= end_ns - start_ns else "outside"


def stopped_within(stops: Sequence[Stretch], start_ns: int, end_ns: int) -> int:
    """Return how much of the disjoint `stops` lies between two times."""
    return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in stops)


def _add_up(events: Sequence[Event], phases: dict[str, int], stops: Sequence[Stretch] = ()) -> dict[str, int]:
    for index, (phase, start, end) in enumerate(events):
        duration = end - start
        if phase == "optimizer":
            duration -= sum(e - s for _, s, e in events[:index] if s >= start)
        if stops:
            duration -= stopped_within(stops, start, end)
            if phase == "optimizer":
                duration += sum(stopped_within(stops, s, e) for _, s, e in events[:index] if s >= start)
        phases[phase] = phases.get(phase, 0) + max(0, duration)
    return phases


def _forwards(events: Sequence[Event]) -> int:
    return sum(phase == "forward" for phase, _, _ in events)
