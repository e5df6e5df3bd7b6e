"""Selects the rows that HolisticTraceAnalysis counts (its window), so that its figures can be compared with these.

HolisticTraceAnalysis 0.5 (`Trace._filter_irrelevant_gpu_kernels`, `BreakdownAnalysis.get_temporal_breakdown`) does not
look at the whole trace.  Where a trace has at least two steps it keeps the device rows whose correlation is also that
of a host row that begins before the *last* step begins.  So the last step is left out, rows launched before the first
step stay, and rows without a known launch are dropped.  With one step or none it keeps everything.  Its window is then
from the first start to the last end of the rows it kept, its idle time that window less their union, its compute time
the union of kernels that are neither NCCL's nor copies, and the remainder it calls non-compute.

`--window hta` keeps the same rows.  Its figures are the same to the microsecond on traces whose times are whole
microseconds, except where HolisticTraceAnalysis counts as work what is none.  There our figures leave it out, and a
test shows that exactly this is the difference:

- it counts rows of synchronization (`cuda_sync`: "Event Sync", "Context Sync", "Stream Wait Event") as work;
- it takes host operators to which `torch.compile` gives a `stream` argument for kernels;
- it rounds fractions of a microsecond: each start up, each end down, so every kernel is shorter;
- it takes the device-side copy of a step mark for a mark like the host's; the last one begins later than the host's, so
  work of the step that should be left out stays;
- it takes only kernels called `nccl...Kernel` for communication: all other libraries are compute.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE, Trace

__all__ = ["rows_of_hta"]


def rows_of_hta(trace: Trace) -> NDArray[np.bool_]:
    """Return for each device row whether HolisticTraceAnalysis counts it."""
    if len({mark.number for mark in trace.steps}) < 2:
        return np.ones(len(trace.device.start_ns), dtype=np.bool_)
    last = max(mark.start_ns for mark in trace.steps)
    launch = trace.device.launch_ns
    kept: NDArray[np.bool_] = (launch != NONE) & (launch < last)
    return kept
