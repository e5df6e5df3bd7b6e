"""Gives each host a clock of its own, and takes true times to it and back.

    shown = offset + time + drift * time

The drift is so small that a float product of it is exact to less than a nanosecond.  All ranks of a host share its
clock.  A time stamp has an error of its own on top (`Noise.stamp_ns`), which `traces` adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .durations import generator
from .job import Job

__all__ = ["HostClock", "host_clocks"]

_CLOCK = 40

START_NS = 3_600_000_000_000
"""What a perfect clock shows when the job begins: an hour after the base of the trace."""


@dataclass(frozen=True)
class HostClock:
    """One host's clock; times are nanoseconds of the job's true clock, which begins at 0."""

    offset_ns: int
    drift_ratio: float

    def show(self, true_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what the clock shows at these true times."""
        drifted: NDArray[np.int64] = true_ns + np.rint(self.drift_ratio * true_ns).astype(np.int64)
        return drifted + (self.offset_ns + START_NS)

    def true(self, shown_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the true times at which the clock shows these, to the nanosecond."""
        passed = shown_ns - self.offset_ns - START_NS
        return np.rint(passed / (1 + self.drift_ratio)).astype(np.int64)


def host_clocks(job: Job) -> list[HostClock]:
    """Return the clock of each host."""
    normal = generator(job, _CLOCK).standard_normal((2, job.layout.hosts))
    offsets, drifts = normal[0] * job.clocks.offset_ns, normal[1] * job.clocks.drift_ratio
    return [HostClock(round(offset), drift) for offset, drift in zip(offsets.tolist(), drifts.tolist(), strict=True)]
