"""Defines the tables of `pacecar analyze --tables` as types of its document: kernels, operators, roofline and others.

As in `report`: times are integers of nanoseconds, rates a second, ratios 0..1.  None is unknown, never zero.  Fields
may be added, but none is renamed.  Rows are in an order that follows from the rows alone.

Left out: how they are computed (`one_rank.tables`).
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
    "QueueLength",
    "Spread",
    "TraceTables",
]

TABLE_NAMES = ("kernels", "operators", "roofline", "launches", "memory", "annotations", "all_to_all")
"""The tables that can be asked for by name, in the order in which they are printed."""


class KernelLauncher(msgspec.Struct, kw_only=True):
    """The launches of a kernel that come from one operator, with one list of shapes, in one module."""

    operator: str | None
    """The innermost operator that was open on the launching thread; None where none was, or the launch is unknown."""
    shapes: str | None
    """The operator's inputs ("[16, 64] [64, 128]"), of `record_shapes`."""
    types: str | None
    module: str | None
    """The classes of the modules around it, outermost first ("Net/Block/Linear"); of a backward its forward's."""
    source: str | None
    """The innermost python frame outside torch ("train.py(12): step"), of `with_stack`, of the longest launch."""
    count: int
    duration_ns: int
    exposed_ns: int
    critical_ns: int | None = None


class KernelTotal(msgspec.Struct, kw_only=True):
    """All device rows of one name and kind of work, cut to the window.

    `exposed_ns` is what the ledger charges to them: an instant belongs to compute before communication before copies,
    and of several rows of one kind to the one that began first.  So the rows of a table add up to the time in which
    the device was busy, exactly.  `critical_ns` is the part of the job's critical path in these rows.
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
    """The longest first; more than `LAUNCHERS_MAX` of them are cut."""
    launchers_count: int


class OperatorTotal(msgspec.Struct, kw_only=True):
    """All calls of an operator with one list of shapes in one module, by where they began.

    Host times are of the calls: `host_ns` with what they called, `host_self_ns` without.  Device times are of the rows
    that were launched: `device_ns` by itself and no operator inside it, `device_total_ns` by anything inside it.
    Where a call of a row is inside another of the same row, the outer one counts in `host_ns` and `device_total_ns`.
    `exposed_ns` and `critical_ns` are those of `device_ns`, None on a CPU job.
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
    """How many device rows it launched by itself."""


class OperationShape(msgspec.Struct, kw_only=True):
    """Matmuls, attentions or convolutions of one shape against the device's roofline.

    `flops` and `bytes` are of one call.  `bytes` is the least that must be moved: each input read once and each output
    written once.  Rates are over `busy_ns`, the time in which any row ran that these calls launched; of a CPU job the
    time in which any of the calls was open.
    """

    kind: str
    """matmul, attention or convolution."""
    operator: str
    shapes: str
    types: str
    arithmetic: str | None
    """The arithmetic whose peak counts: a torch dtype's name or tf32; None where the kernels do not tell."""
    count: int
    launched: int
    """Of how many of the calls device rows are in the trace: the rates are of these."""
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
    """The least time that either peak allows, over the time taken."""
    bound: str | None
    """compute or memory: which of the two peaks is nearer to this shape."""


class Spread(msgspec.Struct, kw_only=True):
    """How a quantity is spread; percentiles are values that occurred (the lower one)."""

    count: int
    min_ns: int
    median_ns: int
    p95_ns: int
    max_ns: int


class QueueLength(msgspec.Struct, kw_only=True):
    """Rows of one stream that were launched and had not begun: the mean over time, and the most at one instant."""

    device: int
    stream: int
    launches: int
    mean: float
    max: int
    empty_ns: int
    """How long nothing was waiting, between the first launch and the last start."""


class LaunchStatistics(msgspec.Struct, kw_only=True):
    """How work came to the device.

    `delay` is from the end of the launching call to the start of the row; zero where the row began before the call
    returned.  A kernel is *short* if it ran for less time than the call that launched it; those of a graph have no call
    of their own and count in `graph_rows`.
    """

    calls: int
    rows: int
    """Device rows with a known launch."""
    rows_unlinked: int
    graph_rows: int
    call: Spread | None
    delay: Spread | None
    short_kernels: int
    short_kernels_ns: int
    kernels: int
    queues: list[QueueLength]


class MemoryPoint(msgspec.Struct, kw_only=True):
    """The most bytes in tensors, and the most taken from the driver, in one of equally long parts of the window."""

    start_ns: int
    allocated_bytes: int
    reserved_bytes: int | None


class MemoryTimeline(msgspec.Struct, kw_only=True):
    """The allocator's bytes on one device over the trace, from its `[memory]` events (`profile_memory`).

    Old traces have no totals but changes only: then the bytes count from the trace's beginning (`is_relative`).
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
    """The operator that was open when the peak was reached, and does more than allocate."""
    peak_module: str | None
    reserved_peak_bytes: int | None
    allocated_bytes: int
    """Sum of all allocations."""
    freed_bytes: int
    points: list[MemoryPoint]


class AnnotationTotal(msgspec.Struct, kw_only=True):
    """All ranges of one name that the script (`record_function`) or torch marked, by where they began.

    Of ranges inside one of the same name the outer one counts.  Device times are of rows launched inside on the same
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
    """What one rank did in the job's all-to-alls, and how that compares with the others'.

    `bytes` is the larger of what it sent and received, summed up; `bytes_ratio` and `duration_ratio` are over the mean
    of the ranks, so 1 is even.  A rank that waits is in it for longer: `wait_ns` and `wire_ns`
    split the time of those that were found in other ranks' traces.
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
    """The tables of one trace; each list has the largest first."""

    kernels: list[KernelTotal]
    operators: list[OperatorTotal]
    roofline: list[OperationShape]
    launches: LaunchStatistics | None
    """None of a trace without a device."""
    memory: list[MemoryTimeline]
    annotations: list[AnnotationTotal]
