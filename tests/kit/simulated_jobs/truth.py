"""Says what is true of a job: who holds it up, in what, and what the job would gain without it.

The gain is not computed from the times of one run.  The same job is run again with the same draws and without the
fault, and the difference of the wall times is what the fault cost.  It is counted from the end of the step before
those that are recorded: what a fault cost before the record began, no trace shows.  With two faults each gain is that
of removing one while the other stays, as one would mend them; they need not add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .identifiability import ranks_told
from .job import Fault, FaultKind, Job, without
from .run import Run, simulate

__all__ = ["Culprit", "Truth", "truth_of"]


@dataclass(frozen=True)
class Culprit:
    """A fault and what its removal saves of the recorded steps' wall time, in all and a step.

    `ranks` are empty where nobody is to blame (imbalance).  Any of `causes` is a right answer, and any of `told`, which
    are the ranks that the traces can show: None where they cannot.  `since_step` is the first recorded step in which
    the fault was there.
    """

    fault: Fault
    ranks: tuple[int, ...]
    told: tuple[int, ...] | None
    causes: tuple[str, ...]
    since_step: int
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


def truth_of(job: Job, healthy: Run | None = None) -> Truth:
    """Run the job with all of its faults, and once more without each of them.

    `healthy` is the run without any fault where the caller has it already; it saves a run where there is one fault.
    """
    run = simulate(job)
    culprits = []
    for fault in job.faults:
        mended = healthy if healthy is not None and len(job.faults) == 1 else simulate(without(job, fault))
        saved = run.recorded_ns - mended.recorded_ns
        blamed = () if fault.kind is FaultKind.IMBALANCE else fault.ranks
        steps = [job.steps_before] if fault.steps is None else [s for s in fault.steps if s >= job.steps_before]
        since = min(steps, default=job.steps_before)
        told = ranks_told(job, fault)
        saving = (saved, saved / job.steps, saved / run.wall_ns)
        culprits.append(Culprit(fault, blamed, told, fault.causes, since, *saving))
    return Truth(run, tuple(sorted(culprits, key=lambda one: -one.saved_ns)))
