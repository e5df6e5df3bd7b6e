"""Checks that the work that was launched is in the trace.

A profiler with a full buffer silently drops device rows, CUPTI lost those at the head of some windows (pytorch issue
192021), and a truncated file ends before them.  Launches without kernels show the loss:

    all launches              the device was not recorded: refused
    those at one end          the record is cut there, and the steps with it
    some in between           idle time is unknown, because any of it may have been a lost kernel
    many in between           refused

Kernels without launches are not a contradiction: the launch may be older than the recording, be of a kind that is not
recorded, or the trace may lack the host.

Copies are ignored if there are other rows, because a copy of zero bytes has a call and no row.  So are host functions
and launches during graph capture, which run nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pacecar.formatting.quantities import plural
from pacecar.ledger.intervals import covers, union

from ..trace.columns import NONE, HostKind, Trace, TraceWarning
from ..trace.kernel_links import first_at
from .selection import with_host

__all__ = ["check_kernels"]

LOST_RATIO_SAID = 0.01
"""Up to this share of lost launches, the loss is only reported: it moves no heading by more."""

RUN_CHANCE_MIN = 0.001
"""Consecutive losses at an end count as a cut if, at the rate of losses in between, they are less likely than this."""

LOST_RATIO_MAX = 0.5
"""Beyond this share of lost launches, most of the device's time is missing."""

UNLAUNCHED_RATIO_SAID = 0.05
"""From this share on, kernels without a launch are reported: the end of the idle time before them is unexplained."""

HOST_BACKENDS = ("gloo", "mpi", "ucc")
"""The backends of torch.distributed whose collectives run on the host; a job of any other uses devices."""


def check_kernels(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without the parts of the record that lack the device's rows."""
    host, device = trace.host_rows, trace.device
    launches = np.flatnonzero((host.kind == HostKind.LAUNCH) & ~_captured(trace))
    if not trace.has_device:
        return trace, _no_device(trace, len(launches))
    launches = launches[_starts_kernels(trace)[host.name[launches]] & (host.correlation[launches] != NONE)]
    warnings = _unlaunched(trace, len(launches))
    lost = first_at(device.correlation, host.correlation[launches]) == NONE
    if not lost.any():
        return trace, warnings
    found = np.flatnonzero(~lost)
    if not len(found):
        message = f"none of {len(launches)} launches has its kernel in this trace: rows of the device are missing"
        return trace, [TraceWarning("kernels_lost", message, len(launches), "refused")]
    inside = lost[found[0] : found[-1] + 1]
    if inside.mean() > LOST_RATIO_MAX:
        message = f"{inside.sum()} of {len(inside)} launches have no kernel in this trace: most of them are lost"
        return trace, [TraceWarning("kernels_lost", message, int(inside.sum()), "refused")]
    begin, end = (0 if _is_scattered(run, inside) else run for run in (int(found[0]), len(lost) - 1 - int(found[-1])))
    for name, run, of_run in (("beginning", begin, slice(0, begin)), ("end", end, slice(len(lost) - end, None))):
        if run:
            trace = _cut(trace, host.start_ns[launches[of_run]], is_head=name == "beginning")
            message = f"the kernels of {plural(run, 'launch call')} at the {name} are not in this trace: cut there"
            warnings.append(TraceWarning(f"kernels_lost_at_{name}", message, run, "cut"))
    rest = lost[begin : len(lost) - end]
    count = int(rest.sum())
    message = f"{count} of {len(rest)} launches have no kernel in this trace"
    if rest.mean() > LOST_RATIO_SAID:
        message += ": rows of the device are missing, so the causes of idle time are unknown"
        warnings.append(TraceWarning("kernels_lost", message, count, "unknown"))
        trace = replace(trace, is_device_complete=False)
    elif count:
        warnings.append(TraceWarning("kernels_lost", message, count))
    return trace, warnings


def _is_scattered(run: int, inside: NDArray[np.bool_]) -> bool:
    """Return whether `run` consecutive losses at an end are few, or plausible at the rate of those `inside`."""
    return run <= LOST_RATIO_SAID * len(inside) or float(inside.mean()) ** run > RUN_CHANCE_MIN


def _no_device(trace: Trace, launches: int) -> list[TraceWarning]:
    """Return the warnings about a trace without any device work."""
    if launches:
        why = "the file is cut off before them" if trace.is_truncated else "the profiler's buffer may have been full"
        calls = "1 launch has" if launches == 1 else f"{launches} launches have"
        message = f"{calls} no kernel in this trace: the device's rows are missing ({why})"
        return [TraceWarning("kernels_lost", message, launches, "refused")]
    if trace.gpus or (trace.backend is not None and not trace.backend.startswith(HOST_BACKENDS)):
        message = "this trace has no device rows: if the job used a device, this is the ledger of its host alone"
        return [TraceWarning("host_only", message)]
    return []


def _unlaunched(trace: Trace, launches: int) -> list[TraceWarning]:
    count, rows = int((trace.device.launch_ns == NONE).sum()), len(trace.device.launch_ns)
    if not launches or count < UNLAUNCHED_RATIO_SAID * rows:
        return []
    message = f"{count} of {rows} kernels and copies have no launch in this trace"
    return [TraceWarning("launches_missing", message, count)]


def _starts_kernels(trace: Trace) -> NDArray[np.bool_]:
    """For each name, return whether a call of that name puts a kernel or a graph on a device."""
    return np.array(["Launch" in name and "HostFunc" not in name for name in trace.names], dtype=np.bool_)


def _captured(trace: Trace) -> NDArray[np.bool_]:
    """Return which host rows began while their thread captured a graph."""
    host = trace.host_rows
    captured = np.zeros(len(host.start_ns), dtype=np.bool_)
    begins, ends = _calls(trace, "StreamBeginCapture"), _calls(trace, "StreamEndCapture")
    for thread in np.unique(host.thread[begins]).tolist():
        start = host.start_ns[begins[host.thread[begins] == thread]]
        end = np.append(host.end_ns[ends[host.thread[ends] == thread]], host.start_ns[-1] + 1)
        captures = union(np.stack((start, end[np.searchsorted(end[:-1], start)]), axis=1))
        captured |= (host.thread == thread) & covers(captures, host.start_ns)
    return captured


def _calls(trace: Trace, word: str) -> NDArray[np.int64]:
    """Return the host rows whose name contains `word`."""
    numbers = [number for number, name in enumerate(trace.names) if word in name]
    return np.flatnonzero(np.isin(trace.host_rows.name, numbers)) if numbers else np.empty(0, dtype=np.int64)


def _cut(trace: Trace, lost_ns: NDArray[np.int64], *, is_head: bool) -> Trace:
    """Return `trace` without the host rows up to, or from, the launches at `lost_ns`."""
    host = trace.host_rows
    kept = host.start_ns > lost_ns.max() if is_head else host.end_ns < lost_ns.min()
    return with_host(trace, kept)
