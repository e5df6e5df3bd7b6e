"""Which rows does HolisticTraceAnalysis count?  Its window, so that its figures can be compared with these.

HolisticTraceAnalysis 0.5 (`Trace._filter_irrelevant_gpu_kernels`, `BreakdownAnalysis.get_temporal_breakdown`) does not
look at the whole trace.  Where a trace has at least two steps it keeps the device rows whose correlation is also that
of a host row that begins before the *last* step begins: the last step is left out, rows launched before the first step
stay, rows without a known launch go.  With one step or none it keeps everything.  Its window is then from the first
start to the last end of the rows it kept, its idle time that window less their union, its compute time the union of
kernels that are neither NCCL's nor copies, and what is left it calls non-compute.

`--window hta` keeps the same rows.  Its figures are the same to the microsecond on traces whose times are whole
microseconds, except where HolisticTraceAnalysis takes for work what is none; then ours stay without it, and a test
shows that exactly this is the difference:

- rows of synchronization (`cuda_sync`: "Event Sync", "Context Sync", "Stream Wait Event") are no work, there they are;
- `torch.compile` gives host operators a `stream` argument, which there makes them kernels;
- traces with fractions of a microsecond are rounded there: each start up, each end down, so every kernel is shorter;
- the device-side copy of a step mark is there a mark like the host's; the last one begins later than the host's, so
  work of the step that should be left out stays;
- communication is there what is called `nccl...Kernel`: all other libraries are compute.
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
