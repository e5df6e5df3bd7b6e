"""Makes of a trace what a user may have in its place: older, cut, doubled, with a clock that jumped.

Each takes a trace and gives another; the rest of it stays.  Left out: damage of the file itself, of which the tests of
the reader are full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import NONE, DeviceRows, HostKind, HostRows, SyncRows, Trace

__all__ = [
    "cut",
    "device_rows_only",
    "doubled",
    "jumped",
    "stretched",
    "without_groups",
    "without_launches",
    "without_peers",
    "without_sequence",
]

Rows = TypeVar("Rows", DeviceRows, HostRows, SyncRows)


def without_sequence(trace: Trace) -> Trace:
    """Return the trace as torch before 2.3 wrote it: collectives are not numbered."""
    return _collectives(trace, sequence=None)


def without_peers(trace: Trace) -> Trace:
    """Return the trace without the peers of sends and receives, as of messages that were sent as a batch."""
    return _collectives(trace, source_rank=None, destination_rank=None)


def without_groups(trace: Trace) -> Trace:
    """Return the trace as torch before 2.1 wrote it: a collective has an operation and bytes."""
    none = dict.fromkeys(("dtype", "group", "group_size", "ranks", "sequence", "source_rank", "destination_rank"))
    return _collectives(trace, **none)


def without_launches(trace: Trace, ratio: float, seed: int = 0) -> Trace:
    """Return the trace without the launches of so many of its kernels, as of kernels in a graph."""
    device, host = trace.device, trace.host_rows
    lost = np.random.default_rng(seed).random(len(device.start_ns)) < ratio
    gone = (host.kind == HostKind.LAUNCH) & np.isin(host.correlation, device.correlation[lost])
    launch_ns = np.where(lost, NONE, device.launch_ns)
    return replace(trace, device=replace(device, launch_ns=launch_ns), host_rows=_kept(host, ~gone))


def device_rows_only(trace: Trace) -> Trace:
    """Return the trace of a profiler that recorded the device alone: no calls, launches or steps."""
    device = replace(trace.device, launch_ns=np.full(len(trace.device.start_ns), NONE))
    host = _kept(trace.host_rows, np.zeros(len(trace.host_rows.start_ns), dtype=np.bool_))
    return _bounded(replace(trace, device=device, host_rows=host, syncs=SyncRows.empty(), steps=()))


def jumped(trace: Trace, at_ns: int, by_ns: int) -> Trace:
    """Return the trace of a clock that was set by so much at that time; what was running then got longer or shorter."""

    def moved(rows: Rows) -> Rows:
        start, end = (part + by_ns * (part >= at_ns) for part in (rows.start_ns, rows.end_ns))
        times = replace(rows, start_ns=start, end_ns=np.maximum(end, start))
        if isinstance(times, DeviceRows):
            launched = times.launch_ns != NONE
            times = replace(times, launch_ns=times.launch_ns + by_ns * (launched & (times.launch_ns >= at_ns)))
        return _kept(times, np.argsort(times.start_ns, kind="stable"))

    def shown(ns: int) -> int:
        return ns + by_ns * (ns >= at_ns)

    steps = tuple(
        msgspec.structs.replace(step, start_ns=shown(step.start_ns), end_ns=shown(step.end_ns)) for step in trace.steps
    )
    device, host, syncs = moved(trace.device), moved(trace.host_rows), moved(trace.syncs)
    return _bounded(replace(trace, device=device, host_rows=host, syncs=syncs, steps=steps))


def cut(trace: Trace, first: int, last: int) -> Trace:
    """Return the trace of a profiler that recorded only the steps from `first` to `last`."""
    steps = tuple(step for step in trace.steps if first <= step.number <= last)
    begin, end = steps[0].start_ns, steps[-1].end_ns

    def inside(rows: Rows) -> Rows:
        return _kept(rows, (rows.start_ns >= begin) & (rows.start_ns < end))

    device, host, syncs = inside(trace.device), inside(trace.host_rows), inside(trace.syncs)
    device = replace(device, launch_ns=np.where(device.launch_ns >= begin, device.launch_ns, NONE))
    return _bounded(replace(trace, steps=steps, device=device, host_rows=host, syncs=syncs))


def doubled(trace: Trace, ratio: float, seed: int = 0) -> Trace:
    """Return the trace with so many of its rows twice, as of files that were put together."""
    drawn = np.random.default_rng(seed)

    def twice(rows: Rows) -> Rows:
        return _kept(rows, np.repeat(np.arange(len(rows.start_ns)), 1 + (drawn.random(len(rows.start_ns)) < ratio)))

    return replace(trace, device=twice(trace.device), host_rows=twice(trace.host_rows))


def stretched(trace: Trace, row: int, duration_ns: int) -> Trace:
    """Return the trace with one device row of an absurd duration."""
    end = trace.device.end_ns.copy()
    end[row] = trace.device.start_ns[row] + duration_ns
    return _bounded(replace(trace, device=replace(trace.device, end_ns=end)))


def _collectives(trace: Trace, **fields: object) -> Trace:
    return replace(trace, collectives=tuple(msgspec.structs.replace(one, **fields) for one in trace.collectives))


def _kept(rows: Rows, which: NDArray[np.bool_] | NDArray[np.int64]) -> Rows:
    return type(rows)(**{name: getattr(rows, name)[which] for name in type(rows).__dataclass_fields__})


def _bounded(trace: Trace) -> Trace:
    parts = (trace.device, trace.host_rows, trace.syncs)
    starts, ends = (np.concatenate([getattr(rows, name) for rows in parts]) for name in ("start_ns", "end_ns"))
    return replace(trace, start_ns=int(starts.min()), end_ns=int(ends.max()))
