"""Returns traces with some of their rows, for checks that remove contradictory ones."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE, DeviceRows, HostRows, SyncRows, Trace
from ..trace.steps import steps_of

__all__ = ["bounded", "with_device", "with_host", "with_syncs", "without_host"]

Mask = NDArray[np.bool_]
AnyRows = TypeVar("AnyRows", DeviceRows, HostRows, SyncRows)

_OF_HOST_ROWS = ("signature", "sequence", "forward_thread", "flops", "stack", "hierarchy")
"""The columns of `TraceDetails` with a value for each host row."""


def with_device(trace: Trace, kept: Mask) -> Trace:
    """Return `trace` with the device rows in `kept`."""
    return bounded(replace(trace, device=_rows(trace.device, kept)))


def with_host(trace: Trace, kept: Mask) -> Trace:
    """Return `trace` with the host rows in `kept`, and the steps that these mark."""
    host, details = _rows(trace.host_rows, kept), trace.details
    if details is not None:
        details = replace(details, **{name: getattr(details, name)[kept] for name in _OF_HOST_ROWS})
    return bounded(replace(trace, host_rows=host, steps=steps_of(trace.names, host), details=details))


def with_syncs(trace: Trace, kept: Mask) -> Trace:
    """Return `trace` with the waits in `kept`."""
    return bounded(replace(trace, syncs=_rows(trace.syncs, kept)))


def without_host(trace: Trace) -> Trace:
    """Return `trace` as if only the device had been recorded."""
    device = replace(trace.device, launch_ns=np.full_like(trace.device.launch_ns, NONE))
    trace = replace(trace, device=device, syncs=SyncRows.empty())
    return with_host(trace, np.zeros(len(trace.host_rows.start_ns), dtype=np.bool_))


def _rows(rows: AnyRows, kept: Mask) -> AnyRows:
    return replace(rows, **{column.name: getattr(rows, column.name)[kept] for column in fields(rows)})


def bounded(trace: Trace) -> Trace:
    """Return `trace` with the bounds of its present rows."""
    groups = [rows for rows in (trace.device, trace.host_rows, trace.syncs) if len(rows.start_ns)]
    if not groups:
        return replace(trace, start_ns=None, end_ns=None)
    start = min(int(rows.start_ns[0]) for rows in groups)
    return replace(trace, start_ns=start, end_ns=max(int(rows.end_ns.max()) for rows in groups))
