"""Finds the marked steps of a trace, and the window of each, disjoint in time.

`ProfilerStep#N` is a mark of the host.  If the host runs ahead, the device is still busy with step N when the host
marks N + 1, so a step on the device has three possible definitions:

- the rows launched inside the mark (HolisticTraceAnalysis): exact about ownership, but such sets overlap in time, so
  their spans do not add up to the time that passed;
- the device-side copy of the mark (`gpu_user_annotation`): from the first to the last such kernel, with the same
  overlap, without the idle time between steps, and missing in many traces;
- the host's marks (used here): intervals of wall time that add up.  Work counts in the step during which it *runs*.
  Both ends of a step lag equally, except in the first, which begins with earlier work, and the last.

A step lasts until the next begins, so that time between two marks (the profiler's own step, a hook) is not lost.  The
last step, and one before a gap in the numbers, lasts until its mark ends and the device has finished what was launched
by then.  It is longer by the lag, so the median step is more typical than the last.

Without marks, a step is one update of the optimizer, from the end of one `Optimizer.step` to the end of the next.  That
is right only for one optimizer or several in strict turn, and a warning says so.

`rows_of_hta` selects the rows that HolisticTraceAnalysis counts (its window), to compare its figures with these.

HolisticTraceAnalysis 0.5 (`Trace._filter_irrelevant_gpu_kernels`, `BreakdownAnalysis.get_temporal_breakdown`) does not
use the whole trace.  With at least two steps, it keeps the device rows whose correlation is also that of a host row
that begins before the *last* step.  So the last step is left out, rows launched before the first step stay, and rows
without a known launch are dropped.  With one step or none it keeps everything.  Its window is from the first start to
the last end of these rows, its idle time that window less their union, its compute time the union of kernels other than
NCCL's and copies; the rest is "non-compute".

`--window hta` keeps the same rows.  On traces with times in whole microseconds the figures agree to the microsecond,
except where HolisticTraceAnalysis counts things that are not work.  A test shows that these are the only differences:

- it counts rows of synchronization (`cuda_sync`: "Event Sync", "Context Sync", "Stream Wait Event") as work;
- it counts host operators with a `stream` argument (from `torch.compile`) as kernels;
- it rounds each start up and each end down to a microsecond, so every kernel is shorter;
- it treats the device-side copy of a step mark like the host's mark; the last one begins later, so some work of the
  step that should be left out stays;
- it treats only kernels called `nccl...Kernel` as communication: all other libraries are compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .columns import NONE, HostKind, HostRows, StepMark, Trace, TraceWarning

__all__ = [
    "STEP_PREFIX",
    "Step",
    "rows_of_hta",
    "step_numbers",
    "step_windows",
    "steps_of",
]

STEP_PREFIX = "ProfilerStep#"
"""The name of a step mark, before the step's number."""


class Step(NamedTuple):
    """A step's number and its window [start_ns, end_ns)."""

    number: int
    start_ns: int
    end_ns: int


def steps_of(names: Sequence[str], host: HostRows) -> tuple[StepMark, ...]:
    """Return the marks among `host`, in the order of their start; `names` are those of the trace."""
    numbers = {
        number: int(text[len(STEP_PREFIX) :])
        for number, text in enumerate(names)
        if text.startswith(STEP_PREFIX) and text[len(STEP_PREFIX) :].isdecimal() and len(text) < len(STEP_PREFIX) + 16
    }
    marks = np.flatnonzero(np.isin(host.name, list(numbers)) & (host.kind == HostKind.ANNOTATION))
    return tuple(
        StepMark(numbers[int(host.name[row])], int(host.start_ns[row]), int(host.end_ns[row])) for row in marks.tolist()
    )


def step_windows(trace: Trace) -> tuple[list[Step], list[TraceWarning]]:
    """Return the trace's steps in order of time, disjoint, and warnings about their marks."""
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
    """Return the marks in order of time, without empty ones, and with one of those that begin together."""
    in_time = sorted((mark for mark in marks if mark.end_ns > mark.start_ns), key=lambda m: (m.start_ns, -m.end_ns))
    empty = len(marks) - len(in_time)
    if empty:
        warnings.append(TraceWarning("empty_steps", "step marks without a duration are left out", empty))
    kept: list[StepMark] = []
    together = overlapping = 0
    for mark in in_time:
        if kept and mark.start_ns == kept[-1].start_ns:
            together += 1  # the same step marked by two profilers or on two threads
            continue
        overlapping += bool(kept) and mark.start_ns < kept[-1].end_ns
        kept.append(mark)
    if together:
        warnings.append(
            TraceWarning("duplicate_steps", "of several steps that begin together, the longest is used", together)
        )
    if overlapping:
        message = "steps whose marks overlap: each ends where the next begins"
        warnings.append(TraceWarning("overlapping_steps", message, overlapping))
    numbers = [mark.number for mark in kept]
    backwards = sum(b <= a for a, b in pairwise(numbers))
    if backwards:
        message = "step numbers do not rise with time: steps are in order of time"
        warnings.append(TraceWarning("unordered_steps", message, backwards))
    return kept


def _finished(trace: Trace, marks: list[StepMark]) -> dict[StepMark, int]:
    """Return when each of `marks` has ended and the device has finished the work launched in it."""
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
    # An optimizer that wraps another (mixed precision) is a row around a row; only the outer one is an update.
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
    """For each device row, return whether HolisticTraceAnalysis counts it."""
    if len({mark.number for mark in trace.steps}) < 2:
        return np.ones(len(trace.device.start_ns), dtype=np.bool_)
    last = max(mark.start_ns for mark in trace.steps)
    launch = trace.device.launch_ns
    kept: NDArray[np.bool_] = (launch != NONE) & (launch < last)
    return kept


def step_numbers(trace: Trace, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the mark in which each time lies, NONE outside all marks."""
    if not trace.steps:
        return np.full(len(times), NONE, dtype=np.int64)
    start = np.array([mark.start_ns for mark in trace.steps], dtype=np.int64)
    end = np.array([mark.end_ns for mark in trace.steps], dtype=np.int64)
    number = np.array([mark.number for mark in trace.steps], dtype=np.int64)
    at = np.searchsorted(start, times, side="right") - 1
    steps: NDArray[np.int64] = np.where((at >= 0) & (times < end[at]), number[at], NONE)
    return steps
