"""Times one collective of one size on all ranks: the median over iterations of the mean over ranks, with quartiles.

The time of one call on one rank includes waiting for late ranks.  So, like nccl-tests by default, iterations follow
each other without a barrier (which has its own skew), and an iteration's time is the mean over the ranks.  Unlike
nccl-tests, the result is the median and quartiles over iterations, because one busy moment of a machine is not a
property of the link.

The first iteration decides, on all ranks together, how many a slow link gets.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pacecar.ledger.bus_bandwidth import bus_bandwidth_factor

from .document import Row
from .operations import BenchOperation

__all__ = ["ITERATIONS_MIN", "MeasurementPlan", "measure", "why_missing"]

ITERATIONS_MIN = 3
"""The fewest values with a middle one, for the median."""

WARMUP_SHARE = 0.2
"""Share of a size's time.  Connections, buffers and caches are warm after one iteration; clocks need more."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """At most `iterations`, or as many as fit into `seconds`, but at least ITERATIONS_MIN."""

    warmup: int
    iterations: int
    seconds: float


def measure(collective: BenchOperation, size: int, plan: MeasurementPlan, device: torch.device) -> Row:
    """Measure one size; all ranks call this and get the same row.  Raises RuntimeError when a rank is lost."""
    collective.resize(size)
    wrong = collective.check()
    first_ns = _agreed([float(ns) for ns in _timed(collective, 1, device)], device, dist.ReduceOp.MAX)[0]
    fitting = plan.seconds * 1e9 / max(1.0, first_ns)
    _timed(collective, min(plan.warmup, int(WARMUP_SHARE * fitting)), device)
    durations = _timed(collective, min(plan.iterations, max(ITERATIONS_MIN, int(fitting))), device)
    # One exchange for the times and the number of wrong elements.
    *sums, all_wrong = _agreed([*map(float, durations), float(wrong)], device, dist.ReduceOp.SUM)
    means = [total / dist.get_world_size() for total in sums]
    low, middle, high = statistics.quantiles(means, n=4, method="inclusive")
    seconds = middle / 1e9
    size_now = collective.size
    factor = bus_bandwidth_factor(collective.operation, dist.get_world_size()) or 0.0
    return Row(
        bytes=size_now,
        count=collective.count,
        iterations=len(means),
        time_ns=round(middle),
        low_ns=round(low),
        high_ns=round(high),
        algorithm_bytes_per_second=size_now / seconds,
        bus_bytes_per_second=size_now * factor / seconds,
        wrong=round(all_wrong),
    )


def why_missing(collective: BenchOperation) -> str | None:
    """Return why the backend does not offer this operation; None if it does.  All ranks get the same answer.

    Raises:
        RuntimeError: another failure, such as a lost rank.
    """
    collective.resize(1)
    try:
        collective.run()
    except (NotImplementedError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, NotImplementedError) or "support" in text or "implement" in text:
            return f"{dist.get_backend()} does not offer it: {text}"
        raise
    return None


def _timed(collective: BenchOperation, count: int, device: torch.device) -> list[int]:
    """Run `count` times and return the nanoseconds of each: host time on a CPU, device time on a GPU."""
    if device.type != "cuda":
        durations = []
        begun = time.perf_counter_ns()
        for _ in range(count):
            collective.run()
            ended = time.perf_counter_ns()
            durations.append(ended - begun)
            begun = ended
        return durations
    # Unannotated as of torch 2.13.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        collective.run()
        mark.record()  # the current stream waits for the collective's
    torch.cuda.synchronize(device)
    return [round(before.elapsed_time(after) * 1e6) for before, after in itertools.pairwise(marks)]


def _agreed(values: list[float], device: torch.device, how: dist.ReduceOp.RedOpType) -> list[float]:
    """Return the sums or maxima of the values over all ranks."""
    exchanged = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(exchanged, op=how)
    agreed: list[float] = exchanged.tolist()
    return agreed
