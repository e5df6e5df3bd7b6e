"""Simulates a job and holds what came of it: true times of all ranks, wall time, and the traces that torch would write.

    run = simulate(job)
    run.wall_ns, run.step_ns       true
    run.trace(rank)                in the clock of the rank's host

Left out: what faults cost (`truth`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import Trace

from .clocks import HostClock, host_clocks
from .cpu_programs import cpu_program
from .engine import RankTimes, Simulation
from .instructions import Program
from .job import PROGRAM_KINDS, Job
from .programs import device_program
from .traces import build_trace

__all__ = ["Run", "program_of", "simulate"]


def program_of(job: Job, stage: int) -> Program:
    """Return the program of one pipeline stage, with the work that faults add to it."""
    if job.is_cpu:
        return cpu_program(job)
    ranks = set(job.layout.ranks_of_stage(stage))
    return device_program(job, stage, [f for f in job.faults if f.kind in PROGRAM_KINDS and ranks <= set(f.ranks)])


@dataclass(frozen=True)
class Run:
    """What happened in one run of a job."""

    job: Job
    programs: tuple[Program, ...]
    times: tuple[RankTimes, ...]

    def program(self, rank: int) -> Program:
        return self.programs[self.job.layout.stage(rank)]

    @cached_property
    def clocks(self) -> list[HostClock]:
        return host_clocks(self.job)

    @cached_property
    def step_bounds_ns(self) -> NDArray[np.int64]:
        """Return by rank when each recorded step began in true time, and when the last ended: (ranks, steps + 1)."""
        bounds = []
        for rank, times in enumerate(self.times):
            n = len(self.program(rank))
            starts = times.host_start[self.job.steps_before * n :: n]
            bounds.append(np.append(starts, max(times.host_end[-1], times.device_end.max())))
        return np.array(bounds)

    @property
    def wall_ns(self) -> int:
        """From the first rank's begin of the first recorded step to the end of the last rank's last."""
        return int(self.step_bounds_ns[:, -1].max() - self.step_bounds_ns[:, 0].min())

    @property
    def recorded_ns(self) -> int:
        """From the end of all work of the step before the recorded ones, if there is one, to the end of the last."""
        before = self.job.steps_before
        ends = [0]
        for rank, times in enumerate(self.times):
            n = before * len(self.program(rank))
            if n:
                ends.append(max(int(times.host_end[n - 1]), int(times.device_end[:n].max())))
        return int(self.step_bounds_ns[:, -1].max()) - max(ends)

    @property
    def step_ns(self) -> float:
        """The wall time a recorded step."""
        return self.wall_ns / self.job.steps

    def trace(self, rank: int) -> Trace:
        """Return the trace of one rank as the reader would, from the begin of its first recorded step."""
        clock = self.clocks[self.job.layout.host(rank)]
        return build_trace(self.job, self.program(rank), self.times[rank], rank, clock)

    def traces(self) -> list[Trace]:
        return [self.trace(rank) for rank in range(self.job.layout.ranks)]


def simulate(job: Job) -> Run:
    """Run the job.  Raises RuntimeError where its ranks wait for each other for ever."""
    programs = tuple(program_of(job, stage) for stage in range(job.layout.pipeline))
    return Run(job, programs, tuple(Simulation(job, programs.__getitem__).run()))
