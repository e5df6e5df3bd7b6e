"""Turns the rows of a profiled window into spans by kind of work: rows in, unions of intervals out.

The same code serves CUDA jobs and CPU jobs with gloo; they differ in what "the device" is:

- on a device job, work is the rows of kernels and copies, and nothing on the host;
- on a CPU job, the training threads are the device: compute is the union of the operators on the thread that runs the
  loop and on autograd's threads (recognized by their `autograd::engine` rows), without calls that only launch a
  collective and without operators inside data loading.  Copies (`aten::copy_`) are ordinary operators.

Communication of host process groups (gloo) has rows on the group's own threads, so on both kinds of job it is found by
name.  A collective's row lasts until the last rank has arrived and so includes waiting for a late rank.

`classification` says what a row means, `attribution` what the spans mean; rows come from `kineto_window`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pacecar.ledger.attribution import Work, compute_on_host
from pacecar.ledger.classification import (
    COLLECTIVE_CALLS,
    METADATA_ROW,
    HostRow,
    classify_device,
    classify_host,
    is_closed,
)
from pacecar.ledger.intervals import EMPTY, Intervals, intervals, union

from .collective_stats import SeenCollective
from .device_phases import Launch

__all__ = ["Activity", "TraceSpans", "read_rows"]


class Activity(Protocol):
    """One row as Kineto provides it; times are nanoseconds since the epoch."""

    def name(self) -> str: ...  # noqa: D102
    def type(self) -> str: ...  # noqa: D102
    def timestamp(self) -> int: ...  # noqa: D102
    def duration(self) -> int: ...  # noqa: D102
    def resource_id(self) -> int: ...  # noqa: D102
    def linked_activity(self) -> Activity | None: ...  # noqa: D102
    def metadata_json(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class TraceSpans:
    """The contents of the rows: work by kind, the time in data loading, and the number of device rows.

    `annotations` are the rows of records that were opened and must be closed; `launches` are those of kernels whose
    launch is known.  `first_device_ns` is when the first device row began.  `skew_ns` is the most that any row began
    before the operator that launched it, which is impossible, so the device's clock is off by at least that.
    """

    work: dict[Work, Intervals]
    data_wait: Intervals
    device_rows: int
    annotations: list[Activity]
    launches: list[Launch] = field(default_factory=list)
    first_device_ns: int | None = None
    skew_ns: int = 0
    collectives: list[SeenCollective] = field(default_factory=list)
    operators: Intervals = field(default_factory=lambda: EMPTY)
    """The operators on the training threads of a CPU job."""
    launch_calls: list[int] = field(default_factory=list)
    """When the host began each call that launches one device row, whether or not that row was recorded."""


def read_rows(
    rows: Iterable[Activity],
    *,
    training_thread: int | None,
    on_device: bool,
    data_wait: Intervals = EMPTY,
    backward_end_ns: int | None = None,
    may_communicate_inside: bool = False,
) -> TraceSpans:
    """Return the spans in `rows`.

    `training_thread` is the thread that runs the loop, as named in rows; None takes every thread that ran an operator.
    `data_wait` was timed by the hook; on a CPU job operators inside it are not compute.  A collective's row may still
    be open when the trace ends although the job has long moved on, because the group's thread wakes the training thread
    before it closes the row.  Such a row ends at `backward_end_ns`, when DDP has waited for all of them.
    `may_communicate_inside`: ATen operators may contain functional collectives, as with DTensor, whose class handles
    the operator in Python: `wait_tensor` may take nearly all of an `aten::mm`.
    """
    device: dict[Work, list[tuple[int, int]]] = {kind: [] for kind in Work}
    operators: dict[int, list[tuple[int, int]]] = {}
    host: dict[HostRow, list[tuple[int, int]]] = {kind: [] for kind in HostRow}
    autograd: set[int] = set()
    device_rows, skew_ns = 0, 0
    first_device_ns: int | None = None
    annotations: list[Activity] = []
    launches: list[Launch] = []
    collectives: list[SeenCollective] = []
    launch_calls: list[int] = []
    closed_until, closed_thread = 0, -1
    for row in rows:
        start = row.timestamp()
        is_inside = start < closed_until and row.resource_id() == closed_thread
        if is_inside and not (may_communicate_inside and row.name().startswith(COLLECTIVE_CALLS)):
            continue  # inside an operator that counts as a whole: 7 rows in 10, and every call here costs 0.2 us
        row_type, name = row.type(), row.name()
        span = (start, start + row.duration())
        if row_type == "user_annotation":
            annotations.append(row)
        elif row_type in _CALL_TYPES and name.startswith(LAUNCH_CALLS):
            launch_calls.append(start)
        host_row = classify_host(row_type, name)
        if host_row is HostRow.OPERATOR:
            thread = row.resource_id()
            operators.setdefault(thread, []).append(span)
            if is_closed(name):
                closed_until, closed_thread = span[1], thread
            elif name.startswith("autograd::engine::"):
                autograd.add(thread)
        elif host_row is HostRow.WORK and backward_end_ns is not None and start < backward_end_ns < span[1]:
            is_open = '"finished": false' in row.metadata_json()
            span = (start, backward_end_ns) if is_open else span
            host[host_row].append(span)
            collectives.append(SeenCollective(name, *span))
        elif host_row is not None:
            host[host_row].append(span)
            if host_row is HostRow.WORK:
                collectives.append(SeenCollective(name, *span))
        else:
            linked = row.linked_activity() if row_type in _MAY_BE_LINKED else None
            kind = classify_device(row_type, name, linked.name() if linked is not None else None)
            if kind is not None:
                device[kind].append(span)
                device_rows += 1
                if kind is Work.COMMUNICATION:
                    says = linked is not None and linked.name() == METADATA_ROW
                    collectives.append(SeenCollective(name, *span, linked.metadata_json() if linked and says else None))
                first_device_ns = start if first_device_ns is None else min(first_device_ns, start)
                if linked is not None:
                    launched = linked.timestamp()
                    skew_ns = max(skew_ns, launched - start)
                    launches.append((launched, span[1], row.resource_id()))
    waits = union(intervals([*map(tuple, data_wait.tolist()), *host[HostRow.LOADER]]))
    work = {kind: intervals(spans) for kind, spans in device.items()}
    ran = EMPTY
    if not on_device:
        threads = operators.keys() if training_thread is None else {training_thread} | autograd
        ran = intervals(span for thread in threads for span in operators.get(thread, ()))
        work[Work.COMPUTE] = compute_on_host(ran, intervals(host[HostRow.LAUNCH]), waits)
    work[Work.COMMUNICATION] = intervals([*device[Work.COMMUNICATION], *host[HostRow.WORK]])
    return TraceSpans(
        work={k: v for k, v in work.items() if len(v)},
        data_wait=waits,
        device_rows=device_rows,
        annotations=annotations,
        launches=launches,
        first_device_ns=first_device_ns,
        skew_ns=skew_ns,
        collectives=collectives,
        operators=ran,
        launch_calls=launch_calls,
    )


_CALL_TYPES = frozenset({"cuda_runtime", "cuda_driver"})

LAUNCH_CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
"""Calls that each make one device row; a graph launch makes any number."""

_MAY_BE_LINKED = frozenset({"kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset", "xpu_kernel", "mtia_kernel"})
