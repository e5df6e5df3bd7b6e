"""Computes the window of each step, disjoint in time, from the step marks in a trace.

`ProfilerStep#N` is a mark of the host.  Where the host runs ahead, the device is still busy with step N when the host
marks N + 1, so there are three definitions of a step on the device:

- the rows launched inside the mark (HolisticTraceAnalysis): exact about what belongs to whom, but such sets overlap in
  time, so their spans do not add up to the time that passed;
- the device-side copy of the mark (`gpu_user_annotation`): spans from the first to the last such kernel, with the same
  overlap, without the idle time between steps, and missing in many traces;
- the host's marks (used here): intervals of wall time that do add up.  Work counts in the step during which it *runs*.
  The lag is the same at both ends of every step but the first, which begins with what came before the trace, and the
  last.

A step lasts until the next begins, so that what lies between two marks (the profiler's own step, a hook) is not lost.
The last step, and one before a gap in the numbers, lasts until its own mark ends and the device has finished what was
launched by then.  On the device it is longer by the lag, so the median is a better guide than the last.

Without marks a step is one update of the optimizer, from the end of one `Optimizer.step` to the end of the next.  That
is right only for a job with one optimizer or several in strict turn, and a warning says so.

`rows_of_hta` selects the rows that HolisticTraceAnalysis counts (its window), so that its figures can be compared
with these.

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

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...trace.columns import NONE, HostKind, StepMark, Trace, TraceWarning

__all__ = [
    "Step",
    "rows_of_hta",
    "step_windows",
]


class Step(NamedTuple):
    """A step's number and its window [start_ns, end_ns)."""

    number: int
    start_ns: int
    end_ns: int


def step_windows(trace: Trace) -> tuple[list[Step], list[TraceWarning]]:
    """Return the trace's steps in the order of time, disjoint, and what was odd about their marks."""
    warnings: list[TraceWarning] = []
    marks = _sound(trace.steps, warnings)
    if not marks:
        return _inferred(trace, warnings), warnings
    steps = []
    finished = _finished(trace, marks)
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        if following is not None and following.number == mark.number + 1:
            end = following.start_ns
        else:
            end = finished[mark]
            if following is not None:
                end = min(end, following.start_ns)
        steps.append(Step(mark.number, mark.start_ns, end))
    return steps, warnings


def _sound(marks: tuple[StepMark, ...], warnings: list[TraceWarning]) -> list[StepMark]:
    """Return the marks in the order of time without empty ones and those that begin together with another."""
    in_time = sorted((mark for mark in marks if mark.end_ns > mark.start_ns), key=lambda m: (m.start_ns, -m.end_ns))
    empty = len(marks) - len(in_time)
    if empty:
        warnings.append(TraceWarning("empty_steps", "step marks that last no time are left out", empty))
    kept: list[StepMark] = []
    together = overlapping = 0
    for mark in in_time:
        if kept and mark.start_ns == kept[-1].start_ns:
            together += 1  # the same step marked by two profilers or on two threads
            continue
        overlapping += bool(kept) and mark.start_ns < kept[-1].end_ns
        kept.append(mark)
    if together:
        warnings.append(TraceWarning("duplicate_steps", "of steps that begin together the longest is taken", together))
    if overlapping:
        message = "steps whose marks overlap: each ends where the next begins"
        warnings.append(TraceWarning("overlapping_steps", message, overlapping))
    numbers = [mark.number for mark in kept]
    backwards = sum(b <= a for a, b in pairwise(numbers))
    if backwards:
        message = "step numbers do not rise with time: steps are in the order of time"
        warnings.append(TraceWarning("unordered_steps", message, backwards))
    return kept


def _finished(trace: Trace, marks: list[StepMark]) -> dict[StepMark, int]:
    """Return when each of `marks` has ended and the device has done what was launched in it."""
    device = trace.device
    launched = np.where(device.launch_ns == NONE, device.start_ns, device.launch_ns)
    order = np.argsort(launched, kind="stable")
    bounds = np.searchsorted(launched[order], [(mark.start_ns, mark.end_ns) for mark in marks]).tolist()
    ends = device.end_ns[order]
    return {mark: int(ends[low:high].max(initial=mark.end_ns)) for mark, (low, high) in zip(marks, bounds, strict=True)}


def _inferred(trace: Trace, warnings: list[TraceWarning]) -> list[Step]:
    host = trace.host_rows
    is_step = np.array([name.startswith("Optimizer.step#") for name in trace.names], dtype=np.bool_)
    if not is_step.any():
        return []
    updates = np.flatnonzero((host.kind == HostKind.OPTIMIZER) & is_step[host.name])
    # An optimizer that wraps another (a mixed-precision one) is a row around a row: only the outer one is an update.
    ends = np.maximum.accumulate(host.end_ns[updates])
    updates = updates[np.concatenate((np.ones(min(len(updates), 1), np.bool_), host.end_ns[updates][1:] > ends[:-1]))]
    names = host.name[updates].tolist()
    turns = len(set(names))
    if turns == 0 or len(names) % turns or any(a != b for a, b in zip(names, names[turns:], strict=False)):
        return []
    if max(Counter(names[:turns]).values()) > 1:
        return []
    bounds = host.end_ns[updates][turns - 1 :: turns].tolist()
    if len(bounds) < 2:
        return []
    message = "no step marks: a step is the time from the end of one optimizer update to the end of the next"
    warnings.append(TraceWarning("steps_inferred", message, len(bounds) - 1))
    return [Step(number, start, end) for number, (start, end) in enumerate(pairwise(bounds))]


def rows_of_hta(trace: Trace) -> NDArray[np.bool_]:
    """Return for each device row whether HolisticTraceAnalysis counts it."""
    if len({mark.number for mark in trace.steps}) < 2:
        return np.ones(len(trace.device.start_ns), dtype=np.bool_)
    last = max(mark.start_ns for mark in trace.steps)
    launch = trace.device.launch_ns
    kept: NDArray[np.bool_] = (launch != NONE) & (launch < last)
    return kept
