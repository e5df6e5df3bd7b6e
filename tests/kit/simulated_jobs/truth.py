"""Says what is true of a job: who holds it up, in what, and what the job would gain without it.

The gain is not computed from the times of one run.  The same job is run again with the same draws and without the
fault, and the difference of the wall times is what the fault cost.  With two faults each gain is that of removing one
while the other stays, as one would mend them; they need not add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .job import Fault, FaultKind, Job, without
from .run import Run, simulate

__all__ = ["Culprit", "Truth", "truth_of"]


@dataclass(frozen=True)
class Culprit:
    """A fault and what its removal saves of the recorded steps' wall time, in all and a step.

    `ranks` are empty where nobody is to blame (imbalance).
    """

    fault: Fault
    ranks: tuple[int, ...]
    cause: str
    saved_ns: int
    saved_step_ns: float
    saved_ratio: float


@dataclass(frozen=True)
class Truth:
    """What is true of a job: its run, and who is to blame for what, the most harmful first; nobody in a healthy one."""

    run: Run
    culprits: tuple[Culprit, ...] = field(default=())

    @property
    def wall_ns(self) -> int:
        return self.run.wall_ns

    @property
    def clock_offsets_ns(self) -> tuple[int, ...]:
        """Return by host what its clock shows beyond the true time when the job begins."""
        return tuple(clock.offset_ns for clock in self.run.clocks)


def truth_of(job: Job) -> Truth:
    """Run the job with all of its faults, and once more without each of them."""
    run = simulate(job)
    culprits = []
    for fault in job.faults:
        saved = run.wall_ns - simulate(without(job, fault)).wall_ns
        blamed = () if fault.kind is FaultKind.IMBALANCE else fault.ranks
        culprits.append(Culprit(fault, blamed, fault.cause, saved, saved / job.steps, saved / run.wall_ns))
    return Truth(run, tuple(sorted(culprits, key=lambda one: -one.saved_ns)))
