"""Draws how long each instruction takes on one rank in one step, with noise and faults.

Every draw follows from the job's seed and from where it is used (rank, step), never from what was drawn before.  So the
same job without a fault has the same noise everywhere else, and what the fault cost is the difference of two runs
(common random numbers).  Faults come last, on top of the noise.

Left out: how long a collective takes, which no rank decides alone (`links`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .instructions import Phase, Program
from .job import FaultKind, Job

__all__ = ["Durations", "durations", "generator", "lengths"]

LATENCY_NS = 5_000
"""From the begin of a launch to the begin of a kernel on an idle device; traces of A100 and H100 show 3 to 10 us."""

KERNEL_NS_MIN = 1_000
"""No kernel is shorter."""

_RANK, _STEP, _HICCUP, _PAUSE, _LENGTH, _LATENESS = range(6)

Times = NDArray[np.int64]


class Durations(NamedTuple):
    """Nanoseconds by instruction: the four parts on the host in four rows, the device's work, the launch's latency.

    `scatter` is by how much a rank leaves a collective later than the earliest could.
    """

    host: Times
    device: Times
    latency: Times
    scatter: Times


def generator(job: Job, purpose: int, *where: int) -> np.random.Generator:
    """Return the generator of the draws for that purpose at that place."""
    return np.random.default_rng([job.seed, purpose, *where])


def durations(job: Job, program: Program, rank: int, step: int) -> Durations:
    """Return the durations of the program's instructions on `rank` in `step`."""
    noise = job.noise
    normal, scatter = _draws(generator(job, _STEP, rank, step), program)
    scatter = scatter * noise.scatter_ns
    if noise.lateness_ns:
        scatter += generator(job, _LATENESS, job.layout.host(rank)).exponential(noise.lateness_ns)
    own = 1 + noise.rank_ratio * generator(job, _RANK, rank).standard_normal(2)
    host = program.host_ns * np.exp(noise.host_ratio * normal[1]) * own[0]
    device = program.device_ns * np.maximum(1 + noise.kernel_ratio * normal[0], 0.5) * own[1]
    latency = LATENCY_NS * np.exp(0.1 * normal[2])
    if program.is_operator.any():  # of a CPU job: its operators are kernels
        work = program.is_operator
        host[2, work] = program.host_ns[2, work] * np.maximum(1 + noise.kernel_ratio * normal[0, work], 0.5) * own[1]
    _hiccup(job, program, rank, step, host, device)
    _add_faults(job, program, rank, step, host, device)
    ran = program.device_ns > 0
    device[ran] = np.maximum(device[ran], KERNEL_NS_MIN)
    return Durations(*(np.rint(part).astype(np.int64) for part in (host, device, latency, scatter)))


def _draws(drawn: np.random.Generator, program: Program) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return three rows of normal and one of exponential draws; those of extra layers come last and shift no other."""
    normal, exponential = np.empty((3, len(program))), np.empty(len(program))
    for which in (~program.is_extra, program.is_extra):
        count = int(which.sum())
        normal[:, which] = drawn.standard_normal((3, count))
        exponential[which] = drawn.standard_exponential(count)
    return normal, exponential


def _hiccup(
    job: Job, program: Program, rank: int, step: int, host: NDArray[np.float64], device: NDArray[np.float64]
) -> None:
    """Let one kernel or the host stand still in some rank-steps."""
    drawn = generator(job, _HICCUP, rank, step).random(4)
    if drawn[0] < job.noise.hiccup_ratio:
        length_ns = job.noise.hiccup_ns * (-np.log1p(-drawn[3]) if job.noise.has_exponential_hiccups else 1.0)
        places = np.flatnonzero(_stops(program))
        place = places[int(drawn[1] * len(places))]
        if drawn[2] < 0.5 and program.device_ns[place] > 0:
            device[place] += length_ns
        else:
            host[0, place] += length_ns


def _stops(program: Program) -> NDArray[np.bool_]:
    """Return where a host may stand still: between operators."""
    return (program.is_launch & ~program.is_extra) | program.is_operator


def _add_faults(
    job: Job, program: Program, rank: int, step: int, host: NDArray[np.float64], device: NDArray[np.float64]
) -> None:
    phase = program.phase
    kernels = (program.power > 0) & ((program.device_ns > 0) | program.is_operator)
    for fault in job.faults:
        size = fault.size
        if fault.kind is FaultKind.IMBALANCE and (fault.steps is None or step in fault.steps):
            factor = _lengths(job, program, rank, step, size)
            _stretch(program, host, device, kernels, factor)
        if not fault.hits(rank, step):
            continue
        match fault.kind:
            case FaultKind.SLOW_COMPUTE:
                _stretch(program, host, device, kernels, np.full(len(program), 1 + size))
            case FaultKind.SLOW_BACKWARD:
                _stretch(program, host, device, kernels & (phase == Phase.BACKWARD), np.full(len(program), 1 + size))
            case FaultKind.SLOW_HOST:
                waits = (phase == Phase.DATA) | (phase == Phase.CHECKPOINT) | program.is_operator
                host[:, ~waits] *= 1 + size
            case FaultKind.SLOW_LAUNCH:
                host[2, program.is_launch] += size
            case FaultKind.DATA_WAIT:
                host[2, _first(phase == Phase.DATA)] += size
            case FaultKind.CHECKPOINT:
                host[2, _first(phase == Phase.CHECKPOINT)] += size
            case FaultKind.OPTIMIZER_HOST:
                host[0, _first(phase == Phase.OPTIMIZER, after=1)] += size
            case FaultKind.COPY:
                device[_first((phase == Phase.INPUT) & (program.device_ns > 0))] += size
            case FaultKind.STALL | FaultKind.GC:
                places = np.flatnonzero(_stops(program))
                # Not by the fault's number: without another fault the stop would be elsewhere.
                drawn = generator(job, _PAUSE, 0, rank, step).random()
                host[0, places[int(drawn * len(places))]] += size
            case _:  # links and extra layers are not a matter of durations, imbalance was above
                pass
    if step in job.checkpoint_steps:
        host[2, _first(phase == Phase.CHECKPOINT)] += job.checkpoint_ns


def _stretch(
    program: Program,
    host: NDArray[np.float64],
    device: NDArray[np.float64],
    which: NDArray[np.bool_],
    factor: NDArray[np.float64],
) -> None:
    device[which] *= factor[which]
    operators = which & program.is_operator
    host[2, operators] *= factor[operators]


def _lengths(job: Job, program: Program, rank: int, step: int, size: float) -> NDArray[np.float64]:
    """Return by how much longer each instruction takes for its microbatch's sequences; ranks that share them agree."""
    return lengths(job, program, rank, step, size)[program.microbatch] ** np.maximum(program.power, 0)


def lengths(job: Job, program: Program, rank: int, step: int, size: float) -> NDArray[np.float64]:
    """Return the length of each microbatch's sequences, 1 for the usual one; `size` is that of the fault IMBALANCE."""
    microbatches = int(program.microbatch.max()) + 1
    replicas = range(job.layout.data) if job.is_balanced else [job.layout.replica(rank)]
    normal = [generator(job, _LENGTH, replica, step).standard_normal(microbatches) for replica in replicas]
    length = np.clip(1 + size * np.array(normal), 0.3, 2.5)
    return np.full(microbatches, length.mean()) if job.is_balanced else np.asarray(length[0])


def _first(which: NDArray[np.bool_], after: int = 0) -> int:
    return int(np.flatnonzero(which)[after])
