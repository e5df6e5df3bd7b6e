"""What does the tuner take from a finished step?  The hook's side of a step, and what a policy sees of it.

The hook writes a step's record late, on threads that look anyway; so a step is told by what the agreement needs at
once, and its record is asked for only where a policy will see it (rank 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from pacecar.controller.observation import KnobSpace, Observation
from pacecar.controller.protocol import JobPace
from pacecar.records import StepRecord

__all__ = ["Measured", "observe"]


class Measured(Protocol):
    """A finished step as the hook tells it; its record is written when it is asked for."""

    @property
    def step(self) -> int:
        """Its number."""
        ...

    @property
    def wall_ns(self) -> int:
        """Its wall time."""
        ...

    @property
    def disturbed(self) -> bool:
        """Its pace says nothing about the job's settings."""
        ...

    @property
    def source(self) -> Literal["exact", "estimate"]:
        """What its ledger comes from."""
        ...

    def settled(self) -> StepRecord:
        """Return its record."""
        ...


def observe(record: StepRecord, pace: JobPace, live: Sequence[KnobSpace]) -> Observation:
    """Return `record` as a policy sees it: the job's pace, and the values of the `live` knobs."""
    values = record.knobs.values
    return Observation(
        step=record.step,
        wall_ns=record.ended_wall_ns,
        values={space.knob: int(values[space.knob]) for space in live},
        pace_ns=pace.pace_ns,
        profiled=pace.profiled,
        ledger=record.ledger,
        exact=record.source == "exact",
        forward_ns=record.forward_ns,
        backward_ns=record.backward_ns,
        optimizer_ns=record.optimizer_ns,
        data_wait_ns=record.data_wait_ns,
        micro_batches=record.micro_batches,
    )
