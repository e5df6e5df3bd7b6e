"""How long did each phase of this step take on the host?

A step runs from one optimizer update to the next and may hold several forwards and backwards (accumulation), so a
phase's time is a sum.  `StepTimer` adds the phases up and, while a window is open, also keeps *when* each stretch
was, to cut the exact ledger along the phases.

    data_wait | forward | backward ........... backward_tail | optimizer | overhead | rest (what is left)

backward ends when autograd has no more to compute; backward_tail is what DDP waits after that for its last all-reduces,
the exposed communication of a CPU job.

No torch here: callers say what happened and when.  No lock either: marks come from the training thread and, on CUDA,
from autograd's thread while the training thread waits for it.
"""

from __future__ import annotations

import msgspec

__all__ = ["MARKS_MAX", "PHASES", "StepTimer", "Stretch", "TimedStep"]

PHASES = ("overhead", "data_wait", "checkpoint", "backward_tail", "backward", "forward", "optimizer")
"""In the order in which an instant claimed twice is given away: what nests inside another phase comes first."""

MARKS_MAX = 4096
"""Stretches kept of one profiled step: a thousand micro-batches; what is beyond belongs to `rest`."""

Stretch = tuple[int, int]


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step; times are monotonic nanoseconds, `phases` are disjoint durations inside it."""

    start_ns: int
    end_ns: int
    phases: dict[str, int]
    marks: dict[str, list[Stretch]]
    micro_batches: int
    overhead_ns: int

    @property
    def wall_ns(self) -> int:
        """The step's wall time."""
        return self.end_ns - self.start_ns

    @property
    def backward_ns(self) -> int | None:
        """The whole backward, its tail included; None when none was seen."""
        if "backward" not in self.phases:
            return None
        return self.phases["backward"] + self.phases.get("backward_tail", 0)


class StepTimer:
    """The phases of the step under way; it has no start until something of the job has happened."""

    def __init__(self) -> None:
        self._start_ns: int | None = None
        self._phases: dict[str, int] = {}
        self._marks: dict[str, list[Stretch]] | None = None
        self._mark_count = 0
        self._optimizer_start_ns: int | None = None
        self._nested_ns = 0
        self.micro_batches = 0
        self.overhead_ns = 0
        """Pacecar's own time in this step so far; whoever spends it adds it."""

    def begin(self, now_ns: int) -> None:
        """Note the job's first sign of life, from which the first step counts."""
        if self._start_ns is None:
            self._start_ns = now_ns

    def add(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Add one stretch of `phase`."""
        self._phases[phase] = self._phases.get(phase, 0) + max(0, end_ns - start_ns)
        if self._marks is not None and self._mark_count < MARKS_MAX:
            self._mark_count += 1
            self._marks.setdefault(phase, []).append((start_ns, end_ns))

    def optimizer_started(self, now_ns: int) -> None:
        """Begin the optimizer; a closure may run forward and backward inside it."""
        self._optimizer_start_ns = now_ns
        self._nested_ns = sum(self._phases.values())

    def optimizer_ended(self, now_ns: int) -> None:
        """End the optimizer; what its closure spent in other phases is theirs."""
        if self._optimizer_start_ns is None:
            return
        nested = sum(self._phases.values()) - self._nested_ns
        self.add("optimizer", self._optimizer_start_ns, now_ns)
        self._phases["optimizer"] = max(0, self._phases["optimizer"] - nested)
        self._optimizer_start_ns = None

    def finish(self, now_ns: int) -> TimedStep:
        """End the step at `now_ns`, begin the next one there, without marks until `keep_marks`."""
        step = TimedStep(
            start_ns=now_ns if self._start_ns is None else self._start_ns,
            end_ns=now_ns,
            phases=self._phases,
            marks=self._marks or {},
            micro_batches=self.micro_batches,
            overhead_ns=self.overhead_ns,
        )
        self._start_ns = now_ns
        self._phases = {}
        self._marks = None
        self._mark_count = 0
        self.micro_batches = 0
        self.overhead_ns = 0
        return step

    def keep_marks(self) -> None:
        """Keep when each stretch of this step is; to be called at its beginning."""
        self._marks = {}
