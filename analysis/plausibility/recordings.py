"""Checks that a file holds one recording: rows occur once, are close in time, have an end, and are of one process.

A trace saved twice into one file, two merged traces, and a row with a garbage time all parse.

Left out: what one row says about another (`streams`, `clocks`, `kernels`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pacecar.formatting.quantities import plural, short_duration

from ..trace.columns import NONE, DeviceRows, HostKind, HostRows, SyncRows, Trace, TraceWarning
from ..trace.steps import steps_of
from .selection import bounded, with_device, with_host, with_syncs

__all__ = [
    "check_distances",
    "check_durations",
    "check_ends",
    "check_launch_numbers",
    "check_processes",
    "check_repeats",
]

FAR_NS = 3600 * 10**9
"""An hour that no row spans and in which none begins.  Recordings last seconds; a hang is inside a row."""

MAIN_RATIO_MIN = 0.9
"""The least share of rows close in time that are believed against the others."""

REPEATED_RATIO_MIN = 0.1
"""From this share on, repeated operators are left out.  Fewer are real: with times in whole microseconds, calls shorter
than one look alike (21 of 52,691 rows of a trace recorded elsewhere)."""

SHARED_NUMBERS_RATIO_MAX = 0.1
"""From this share of the launches on, shared correlations come from a second recording, not from a broken row."""

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]


def check_repeats(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace with each row once."""
    device, host = trace.device, trace.host_rows
    of_device = _repeated(device, device.name, device.device, device.stream, device.correlation)
    of_host = _repeated(host, host.name, host.thread, host.correlation)
    if of_host.sum() < REPEATED_RATIO_MIN * len(of_host):
        of_host &= host.correlation != NONE
    count = int(of_device.sum() + of_host.sum())
    if not count:
        return trace, []
    message = f"{plural(count, 'row')} of the trace occur more than once in the file: each counts once"
    trace = with_host(with_device(trace, ~of_device), ~of_host)
    return trace, [TraceWarning("repeated_rows", message, count, "left_out")]


def check_distances(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without rows far from all others; refuse it if the rows lie in several places."""
    groups = (trace.device, trace.host_rows, trace.syncs)
    starts = np.sort(np.concatenate([rows.start_ns for rows in groups]), kind="stable")
    at = np.flatnonzero(np.diff(starts) > FAR_NS)
    spans = [_spanned(rows, starts[at], starts[at + 1], int(starts[-1])) for rows in groups] if len(at) else []
    at = at[~np.logical_or.reduce(spans)] if spans else at
    if not len(at):
        return trace, []
    bounds = [0, *(at + 1).tolist(), len(starts)]
    sizes = np.diff(bounds)
    main = int(sizes.argmax())
    if len(starts) - sizes[main] > max(1, (1 - MAIN_RATIO_MIN) * len(starts)):
        return trace, [_scattered(trace, starts, at)]
    low, high = int(starts[bounds[main]]), int(starts[bounds[main + 1] - 1])
    far = max(low - int(starts[0]), int(starts[-1]) - high)
    kept = [(rows.start_ns >= low) & (rows.start_ns <= high) for rows in groups]
    trace = with_syncs(with_host(with_device(trace, kept[0]), kept[1]), kept[2])
    count = len(starts) - int(sizes[main])
    message = f"{plural(count, 'row')} up to {short_duration(1e-9 * far)} away from all others were left out"
    return trace, [TraceWarning("distant_rows", message, count, "left_out")]


def check_ends(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace with unfinished calls cut at the last other end, and without unfinished rows of a device.

    An operator that had not ended when recording stopped gets a garbage end: a duration of 54 years.
    """
    groups: tuple[DeviceRows | HostRows | SyncRows, ...] = (trace.device, trace.host_rows, trace.syncs)
    latest = max((int(rows.start_ns[-1]) for rows in groups if len(rows.start_ns)), default=0)
    endless = [rows.end_ns > latest + FAR_NS for rows in groups]
    if not any(mask.any() for mask in endless):
        high = trace.end_ns
        is_bound = high is None or high <= latest + FAR_NS  # the endless row may be of a kind that is not kept
        return (trace if is_bound else bounded(trace)), []
    warnings = []
    ends = [rows.end_ns[~mask] for rows, mask in zip(groups, endless, strict=True)]
    last = max((int(column.max()) for column in ends if len(column)), default=latest)
    if count := int(endless[0].sum() + endless[2].sum()):
        trace = with_syncs(with_device(trace, ~endless[0]), ~endless[2])
        message = f"{plural(count, 'row')} of a device that would last for hours after all others were left out"
        warnings.append(TraceWarning("endless_rows", message, count, "left_out"))
    if count := int(endless[1].sum()):
        host = trace.host_rows
        host = replace(host, end_ns=np.where(endless[1], np.maximum(last, host.start_ns), host.end_ns))
        message = f"{plural(count, 'call')} had not ended when recording stopped: cut at the end of the last other row"
        warnings.append(TraceWarning("unfinished_rows", message, count, "cut"))
        trace = replace(trace, host_rows=host, steps=steps_of(trace.names, host))
    return bounded(trace), warnings


def check_durations(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Refuse a trace in which all work has a duration of zero."""
    host, device = trace.host_rows, trace.device
    lasted = device.end_ns - device.start_ns
    if not trace.has_device:
        lasted = (host.end_ns - host.start_ns)[np.isin(host.kind, (HostKind.OPERATOR, HostKind.COLLECTIVE_WORK))]
    if len(lasted) == 0 or lasted.any():
        return trace, []
    what = "kernels and copies" if trace.has_device else "operators"
    message = f"none of {len(lasted)} {what} has a duration: durations are missing"
    return trace, [TraceWarning("no_durations", message, len(lasted), "refused")]


def check_launch_numbers(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without links between a kernel and one of several launches; refuse it if there are many."""
    host = trace.host_rows
    launches = np.flatnonzero((host.kind == HostKind.LAUNCH) & (host.correlation != NONE))
    number = host.correlation[launches]
    if len(number) == 0:
        return trace, []
    order = np.argsort(number, kind="stable")  # of equal ones, the launch that began first
    launches, number = launches[order], number[order]
    # A runtime call and the driver call inside it may have the same number: that is one launch.
    again = (number[1:] == number[:-1]) & (host.start_ns[launches[1:]] >= host.end_ns[launches[:-1]])
    count = int(again.sum())
    if not count:
        return trace, []
    message = f"{plural(count, 'launch call')} of {len(number)} have the correlation of an earlier one"
    if count > SHARED_NUMBERS_RATIO_MAX * len(number):
        message += ": these are the rows of more than one recording"
        return trace, [TraceWarning("several_recordings", message, count, "refused")]
    device = trace.device
    shared = np.isin(device.correlation, number[1:][again])
    device = replace(device, launch_ns=np.where(shared, NONE, device.launch_ns))
    message += ": their kernels count as launched by no known call"
    return replace(trace, device=device), [TraceWarning("shared_correlations", message, count, "unknown")]


def check_processes(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Warn if the host's work is that of several processes."""
    host = trace.host_rows
    works = (host.kind == HostKind.OPERATOR) | (host.kind == HostKind.LAUNCH)
    present = np.flatnonzero(np.bincount(host.thread[works], minlength=len(trace.threads)))
    processes = len({trace.threads[thread][0] for thread in present.tolist()})
    if processes < 2:
        return trace, []
    message = f"the rows of {processes} processes are combined: analyze each rank's own trace instead"
    return trace, [TraceWarning("several_processes", message, processes)]


def _repeated(rows: DeviceRows | HostRows, *columns: NDArray[np.int64] | NDArray[np.int32]) -> Mask:
    """Return which of `rows` have a duration and equal an earlier one in their times and `columns`."""
    found = np.zeros(len(rows.start_ns), dtype=np.bool_)
    together = np.zeros(len(found), dtype=np.bool_)
    together[1:] = rows.start_ns[1:] == rows.start_ns[:-1]
    together[:-1] |= together[1:]
    lasting = np.flatnonzero(together & (rows.end_ns > rows.start_ns))
    every = [column[lasting].astype(np.uint64) for column in (rows.start_ns, rows.end_ns, *columns)]
    mixed = np.zeros(len(lasting), dtype=np.uint64)
    for column in every:
        mixed = (mixed ^ column) * _MIX
        mixed ^= mixed >> np.uint64(29)
    in_order = np.sort(mixed)
    again = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(again):
        seen: set[tuple[int, ...]] = set()
        alike = np.flatnonzero(np.isin(mixed, again))
        for row, key in zip(
            alike.tolist(), zip(*(column[alike].tolist() for column in every), strict=True), strict=True
        ):
            found[lasting[row]] = key in seen
            seen.add(key)
    return found


_MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4)."""


def _spanned(rows: DeviceRows | HostRows | SyncRows, before: Column, after: Column, latest: int) -> Mask:
    """Return which gaps [before, after] a row spans except for FAR_NS; an endless row spans nothing."""
    sound = rows.end_ns <= latest + FAR_NS
    start, end = rows.start_ns[sound], np.maximum.accumulate(rows.end_ns[sound])
    at = np.searchsorted(start, before, side="right") - 1
    spanned: Mask = (
        (at >= 0) & (end[np.maximum(at, 0)] + FAR_NS >= after) if len(end) else np.zeros(len(before), np.bool_)
    )
    return spanned


def _scattered(trace: Trace, starts: Column, at: Column) -> TraceWarning:
    far = short_duration(1e-9 * int((starts[at + 1] - starts[at]).max()))
    device, host = trace.device.start_ns, trace.host_rows.start_ns
    if len(at) == 1 and len(device) and len(host) and (device[-1] < host[0] or host[-1] < device[0]):
        message = f"the device's rows lie {far} from the host's: their clocks or their units of time differ"
        return TraceWarning("clocks_differ", message, len(starts), "refused")
    message = f"the rows lie in {len(at) + 1} places up to {far} apart: that is not one recording"
    return TraceWarning("several_recordings", message, len(starts), "refused")
