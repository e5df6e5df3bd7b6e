"""Defines the types of the tables of `pacecar analyze --tables`: kernels, operators, roofline and others.

As in `report`, times are integers of nanoseconds, rates are per second, ratios 0..1.  None is unknown, never zero.
Fields may be added, but existing ones keep their names.  The order of rows depends only on the rows.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "TABLE_NAMES",
    "AllToAllRank",
    "AnnotationTotal",
    "KernelLauncher",
    "KernelTotal",
    "LaunchStatistics",
    "MemoryPoint",
    "MemoryTimeline",
    "OperationShape",
    "OperatorTotal",
    "Percentiles",
    "QueueLength",
    "TraceTables",
]

TABLE_NAMES = ("kernels", "operators", "roofline", "launches", "memory", "annotations", "all_to_all")
"""The tables that can be requested by name, in the order in which they are printed."""


class KernelLauncher(msgspec.Struct, kw_only=True):
    """The launches of a kernel from one operator with one list of shapes in one module."""

    operator: str | None
    """The innermost open operator on the launching thread; None if there was none or the launch is unknown."""
    shapes: str | None
    """The operator's inputs ("[16, 64] [64, 128]"), from `record_shapes`."""
    types: str | None
    module: str | None
    """The classes of the modules around it, outermost first ("Net/Block/Linear"); a backward has its forward's."""
    source: str | None
    """The innermost Python frame outside torch of the longest launch ("train.py(12): step"), from `with_stack`."""
    count: int
    duration_ns: int
    exposed_ns: int
    critical_ns: int | None = None


class KernelTotal(msgspec.Struct, kw_only=True):
    """All device rows of one name and kind of work, cut to the window.

    `exposed_ns` is what the ledger charges to them: an instant belongs to compute before communication before copies,
    and among rows of one kind to the one that began first.  So the rows of a table add up exactly to the device's busy
    time.  `critical_ns` is the part of the job's critical path in these rows.
    """

    name: str
    work: str
    family: str
    count: int
    duration_ns: int
    median_ns: int
    min_ns: int
    max_ns: int
    exposed_ns: int
    critical_ns: int | None
    launchers: list[KernelLauncher]
    """The longest first, at most `LAUNCHERS_MAX`."""
    launchers_count: int


class OperatorTotal(msgspec.Struct, kw_only=True):
    """All calls of an operator with one list of shapes in one module that began in the window.

    Host times are those of the calls: `host_ns` with what they called, `host_self_ns` without.  Device times are those
    of launched rows: `device_ns` of what it launched itself, `device_total_ns` of everything launched inside it.  If
    calls of one row are nested, only the outer one counts in `host_ns` and `device_total_ns`.  `exposed_ns` and
    `critical_ns` are parts of `device_ns`, None on a CPU job.
    """

    name: str
    shapes: str | None
    types: str | None
    module: str | None
    source: str | None
    count: int
    host_ns: int
    host_self_ns: int
    device_ns: int
    device_total_ns: int
    exposed_ns: int | None
    critical_ns: int | None
    kernels: int
    """How many device rows it launched itself."""


class OperationShape(msgspec.Struct, kw_only=True):
    """Matmuls, attentions or convolutions of one shape against the device's roofline.

    `flops` and `bytes` are those of one call.  `bytes` is the minimum: each input is read once and each output written
    once.  Rates are over `busy_ns`, the time in which any row that these calls launched ran; on a CPU job, the time in
    which any of the calls was open.
    """

    kind: str
    """matmul, attention or convolution."""
    operator: str
    shapes: str
    types: str
    arithmetic: str | None
    """The arithmetic whose peak applies: a torch dtype's name or tf32; None if the kernels do not show it."""
    count: int
    launched: int
    """The calls with device rows in the trace; the rates are theirs."""
    busy_ns: int
    flops: int | None
    flops_source: str | None
    """with_flops, or the formula's name."""
    bytes: int | None
    flops_per_second: float | None
    bytes_per_second: float | None
    intensity: float | None
    """FLOPs a byte."""
    peak_flops_per_second: int | None
    peak_bytes_per_second: int | None
    flops_ratio: float | None
    bandwidth_ratio: float | None
    roofline_ratio: float | None
    """The shortest time that both peaks allow, over the time taken."""
    bound: str | None
    """compute or memory: the peak that limits this shape."""


class Percentiles(msgspec.Struct, kw_only=True):
    """The distribution of a quantity; percentiles are values that occurred (the lower one)."""

    count: int
    min_ns: int
    median_ns: int
    p95_ns: int
    max_ns: int


class QueueLength(msgspec.Struct, kw_only=True):
    """Launched rows of one stream that had not begun: the mean over time, and the maximum."""

    device: int
    stream: int
    launches: int
    mean: float
    max: int
    empty_ns: int
    """How long the queue was empty between the first launch and the last start."""


class LaunchStatistics(msgspec.Struct, kw_only=True):
    """How work reached the device.

    `delay` is from the end of the launching call to the start of the row, zero if the row began before the call
    returned.  A kernel is *short* if it ran for less time than its launching call; kernels of a graph have no call of
    their own and count in `graph_rows`.
    """

    calls: int
    rows: int
    """Device rows with a known launch."""
    rows_unlinked: int
    graph_rows: int
    call: Percentiles | None
    delay: Percentiles | None
    short_kernels: int
    short_kernels_ns: int
    kernels: int
    queues: list[QueueLength]


class MemoryPoint(msgspec.Struct, kw_only=True):
    """The maximum of bytes in tensors and of bytes taken from the driver in one of equally long parts of the window."""

    start_ns: int
    allocated_bytes: int
    reserved_bytes: int | None


class MemoryTimeline(msgspec.Struct, kw_only=True):
    """The allocator's bytes on one device over the trace, from its `[memory]` events (`profile_memory`).

    Old traces have only changes, not totals: then the bytes count from the trace's beginning (`is_relative`).
    """

    device: str
    """cpu, cuda:0, ..."""
    events: int
    is_relative: bool
    first_bytes: int
    last_bytes: int
    peak_bytes: int
    peak_ns: int
    peak_operator: str | None
    """The operator that was open at the peak and does more than allocate."""
    peak_module: str | None
    reserved_peak_bytes: int | None
    allocated_bytes: int
    """Sum of all allocations."""
    freed_bytes: int
    points: list[MemoryPoint]


class AnnotationTotal(msgspec.Struct, kw_only=True):
    """All ranges of one name that the script (`record_function`) or torch marked and that began in the window.

    If ranges of one name are nested, the outer one counts.  Device times are those of rows launched inside on the same
    thread.
    """

    name: str
    count: int
    host_ns: int
    min_ns: int
    max_ns: int
    device_ns: int
    exposed_ns: int


class AllToAllRank(msgspec.Struct, kw_only=True):
    """One rank's part in the job's all-to-alls, compared with the other ranks'.

    `bytes` sums the larger of what it sent and received; `bytes_ratio` and `duration_ratio` are relative to the mean of
    the ranks, so 1 is even.  A rank that waits stays longer: `wait_ns` and `wire_ns` split the time of the all-to-alls
    that are in other ranks' traces too.
    """

    rank: int
    count: int
    bytes: int | None
    bytes_ratio: float | None
    duration_ns: int
    duration_ratio: float | None
    wait_ns: int | None
    wire_ns: int | None


class TraceTables(msgspec.Struct, kw_only=True):
    """The tables of one trace; each list begins with the largest."""

    kernels: list[KernelTotal]
    operators: list[OperatorTotal]
    roofline: list[OperationShape]
    launches: LaunchStatistics | None
    """None for a trace without a device."""
    memory: list[MemoryTimeline]
    annotations: list[AnnotationTotal]
