"""How long did each phase of this step take on the host?

A step runs from one optimizer update to the next and may hold several forwards and backwards (accumulation), so a
phase's time is a sum.  `StepTimer` adds the phases up and, while a window is open, also keeps *when* each stretch was, to
cut the exact ledger along the phases.

    data_wait | forward | backward ........... backward_tail | optimizer | overhead | rest (what is left)

backward ends when autograd has no more to compute; backward_tail is what DDP waits after that for its last all-reduces,
the exposed communication of a CPU job.

No torch here: callers say what happened and when.  Not thread-safe by lock: marks come from the training thread and, on
CUDA, from autograd's thread while the training thread waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MARKS_MAX", "PHASES", "Stretch", "StepTimer"]

PHASES = ("overhead", "data_wait", "checkpoint", "backward_tail", "backward", "forward", "optimizer")
"""In the order in which an instant claimed twice is given away: what nests inside another phase comes first."""

MARKS_MAX = 4096
"""Stretches kept of one profiled step: a thousand micro-batches; what is beyond belongs to `rest`."""

Stretch = tuple[int, int]


@dataclass(slots=True)
class StepTimer:
    """The phases of the step under way; `start_ns` is None until something of the job has happened."""

    start_ns: int | None = None
    durations: dict[str, int] = field(default_factory=dict)
    marks: dict[str, list[Stretch]] | None = None
    micro_batches: int = 0
    in_step_overhead_ns: int = 0
    _mark_count: int = 0
    _optimizer_start_ns: int | None = None
    _nested_ns: int = 0

    def begin(self, now_ns: int) -> None:
        """Note the job's first sign of life, from which the first step counts."""
        if self.start_ns is None:
            self.start_ns = now_ns

    def add(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Add one stretch of `phase`."""
        self.durations[phase] = self.durations.get(phase, 0) + max(0, end_ns - start_ns)
        if self.marks is not None and self._mark_count < MARKS_MAX:
            self._mark_count += 1
            self.marks.setdefault(phase, []).append((start_ns, end_ns))

    def optimizer_started(self, now_ns: int) -> None:
        """Begin the optimizer; a closure may run forward and backward inside it."""
        self._optimizer_start_ns = now_ns
        self._nested_ns = sum(self.durations.values())

    def optimizer_ended(self, now_ns: int) -> None:
        """End the optimizer; what its closure spent in other phases is theirs."""
        if self._optimizer_start_ns is None:
            return
        nested = sum(self.durations.values()) - self._nested_ns
        self.add("optimizer", self._optimizer_start_ns, now_ns)
        self.durations["optimizer"] = max(0, self.durations["optimizer"] - nested)
        self._optimizer_start_ns = None

    def backward_ns(self) -> int | None:
        """Return the whole backward, its tail included; None when none was seen."""
        if "backward" not in self.durations:
            return None
        return self.durations["backward"] + self.durations.get("backward_tail", 0)

    def next_step(self, now_ns: int) -> None:
        """Begin the next step at `now_ns`, unprofiled until `keep_marks`."""
        self.start_ns = now_ns
        self.durations = {}
        self.marks = None
        self.micro_batches = 0
        self.in_step_overhead_ns = 0
        self._mark_count = 0

    def keep_marks(self) -> None:
        """Keep when each stretch was, until the step ends; what was timed so far has no place any more."""
        self.marks = {}
