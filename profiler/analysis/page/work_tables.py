"""Makes the tables of the page about a trace's work: kernels, operators, roofline, launches, memory, annotations.

Several ranks have these tables each, and they look alike where nobody is named: the page shows those of one rank and
says which.  A missing number is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.formatting.page.table import Cell, Table, sortable_table
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import DASH, bandwidth, duration, percent, size_text, unit_for

from ..one_rank.kernel_families import kernel_name
from ..output.words import place_words
from ..report_tables import (
    AllToAllRank,
    AnnotationTotal,
    KernelTotal,
    LaunchStatistics,
    MemoryTimeline,
    OperationShape,
    OperatorTotal,
    Spread,
    TraceTables,
)
from .trace_tables import ROWS_MAX, count_cell, cut_note, time_cell, word_cell

__all__ = ["all_to_all_table", "work_tables"]

NAME_CHARACTERS_MAX = 64
"""Names of templates run to thousands of characters and push the figures off the page; `--json` has them whole."""

LAUNCHER_CHARACTERS_MAX = 96
"""Of operator, shapes, module and line together: three lines of their column."""

KINDS_MAX = 60
"""The most kernels, operators and annotations: the longest, which have nearly all of the time."""


def work_tables(tables: TraceTables) -> list[Table]:
    """Return the tables that have rows."""
    found = (
        _kernels(tables.kernels),
        _operators(tables.operators),
        _roofline(tables.roofline),
        _launches(tables.launches),
        _queues(tables.launches),
        _memory(tables.memory),
        _annotations(tables.annotations),
    )
    return [table for table in found if table is not None]


def _name(name: str) -> Cell:
    return clean(kernel_name(name), NAME_CHARACTERS_MAX), None


def _ratio(ratio: float | None) -> Cell:
    return percent(ratio), ratio


def _kernels(kernels: Sequence[KernelTotal]) -> Table | None:
    largest = sorted(kernels, key=lambda one: -one.duration_ns)[:KINDS_MAX]
    unit = unit_for([one.duration_ns for one in largest])
    rows = []
    for one in largest:
        first = one.launchers[0] if one.launchers else None
        where = (first.operator, first.shapes, place_words(first.module, first.source)) if first is not None else ()
        rows.append(
            (
                _name(one.name), word_cell(one.family.replace("_", " ")), count_cell(one.count),
                time_cell(unit, one.duration_ns), time_cell(unit, one.exposed_ns), time_cell(unit, one.critical_ns),
                (duration(one.median_ns), one.median_ns), (duration(one.max_ns), one.max_ns),
                (clean(", ".join(part for part in where if part), LAUNCHER_CHARACTERS_MAX) or DASH, None),
            )
        )  # fmt: skip
    head = ("kernel", "family", "count", "time", "exposed", "on the path", "median", "longest", "launched mostly by")
    note = "Exposed: what the ledger charges to it. On the path: its part of the critical path."
    note = f"{note} {cut_note(len(rows), len(kernels))}".strip()
    return sortable_table("Kernels", head, rows, texts=2, note=note, long=8)


def _operators(operators: Sequence[OperatorTotal]) -> Table | None:
    largest = sorted(operators, key=lambda one: (-one.device_ns, -one.host_self_ns))[:KINDS_MAX]
    device = unit_for([one.device_total_ns for one in largest])
    host = unit_for([one.host_ns for one in largest])
    has_device = any(one.exposed_ns is not None for one in largest)
    rows = []
    for one in largest:
        times = (one.device_ns, one.device_total_ns, one.exposed_ns, one.critical_ns) if has_device else ()
        rows.append(
            (
                _name(one.name), (clean(one.shapes or "", NAME_CHARACTERS_MAX) or DASH, None), word_cell(one.module),
                count_cell(one.count), *(time_cell(device, value) for value in times),
                time_cell(host, one.host_self_ns), time_cell(host, one.host_ns),
            )
        )  # fmt: skip
    of_device = ("device, own", "device, all", "exposed", "on the path") if has_device else ()
    head = ("operator", "shapes", "module", "calls", *of_device, "host, own", "host, all")
    note = f"Own: without what it called. {cut_note(len(rows), len(operators))}".strip()
    return sortable_table("Operators", head, rows, texts=3, note=note)


def _roofline(shapes: Sequence[OperationShape]) -> Table | None:
    largest = sorted(shapes, key=lambda one: -one.busy_ns)[:ROWS_MAX]
    unit = unit_for([one.busy_ns for one in largest])
    rows = [
        (
            word_cell(one.kind), word_cell(one.operator), word_cell(one.shapes), word_cell(one.arithmetic or one.types),
            count_cell(one.count), time_cell(unit, one.busy_ns), _flops(one.flops_per_second), _ratio(one.flops_ratio),
            (bandwidth(one.bytes_per_second), one.bytes_per_second), _ratio(one.bandwidth_ratio),
            (DASH, None) if one.intensity is None else (f"{one.intensity:.3g}", one.intensity),
            _ratio(one.roofline_ratio), word_cell(one.bound),
        )
        for one in largest
    ]  # fmt: skip
    head = (
        "kind", "operator", "shapes", "arithmetic", "calls", "busy", "achieved", "of peak", "bandwidth", "of peak",
        "FLOPs a byte", "of the roofline", "bound by",
    )  # fmt: skip
    note = "Bytes are the least that must be moved. A dash: the peak or the shape is not known."
    note = f"{note} {cut_note(len(rows), len(shapes))}".strip()
    return sortable_table("Roofline", head, rows, texts=4, note=note)


def _flops(rate: float | None) -> Cell:
    return (DASH, None) if rate is None else (f"{rate / 1e12:.3g} TFLOP/s", rate)


def _launches(found: LaunchStatistics | None) -> Table | None:
    if found is None:
        return None
    rows: list[list[Cell]] = [
        [("launching calls", None), count_cell(found.calls)],
        [("device rows with a known launch", None), count_cell(found.rows)],
        [("device rows without", None), count_cell(found.rows_unlinked)],
        [("of graphs", None), count_cell(found.graph_rows)],
        [("kernels shorter than their launch", None), _short(found)],
        *_spread("call", found.call),
        *_spread("delay from call to start", found.delay),
    ]
    return sortable_table("Launches", ("what", "figure"), rows)


def _short(found: LaunchStatistics) -> Cell:
    of = f" of {found.kernels}, {duration(found.short_kernels_ns)} together"
    return f"{found.short_kernels}{of}", found.short_kernels


def _spread(name: str, spread: Spread | None) -> list[list[Cell]]:
    if spread is None:
        return []
    figures = f"{duration(spread.median_ns)}, {duration(spread.p95_ns)}, {duration(spread.max_ns)}"
    return [[(f"{name}: median, 95th percentile, longest", None), (figures, spread.median_ns)]]


def _queues(found: LaunchStatistics | None) -> Table | None:
    rows = [
        (
            (f"stream {one.stream}, device {one.device}", one.stream), count_cell(one.launches),
            (f"{one.mean:.1f}", one.mean), count_cell(one.max), (duration(one.empty_ns), one.empty_ns),
        )
        for one in (found.queues if found is not None else [])
    ]  # fmt: skip
    return sortable_table("Queues of launches", ("queue", "launches", "mean length", "longest", "empty for"), rows)


def _memory(found: Sequence[MemoryTimeline]) -> Table | None:
    rows = [
        (
            word_cell(one.device), (size_text(one.peak_bytes), one.peak_bytes),
            (size_text(one.reserved_peak_bytes), one.reserved_peak_bytes),
            (size_text(one.first_bytes), one.first_bytes), (size_text(one.last_bytes), one.last_bytes),
            (size_text(one.allocated_bytes), one.allocated_bytes),
            count_cell(one.events),
            word_cell(", ".join(part for part in (one.peak_operator, one.peak_module) if part)),
        )
        for one in found
    ]  # fmt: skip
    head = ("device", "peak", "reserved, peak", "at first", "at last", "allocated in all", "events", "peak was in")
    is_relative = any(one.is_relative for one in found)
    note = "The trace has changes only, so bytes count from its beginning." if is_relative else ""
    return sortable_table("Memory", head, rows, note=note, long=7)


def _annotations(found: Sequence[AnnotationTotal]) -> Table | None:
    largest = sorted(found, key=lambda one: -one.host_ns)[:KINDS_MAX]
    unit = unit_for([one.host_ns for one in largest])
    rows = [
        (
            _name(one.name), count_cell(one.count), time_cell(unit, one.host_ns), time_cell(unit, one.min_ns),
            time_cell(unit, one.max_ns), time_cell(unit, one.device_ns), time_cell(unit, one.exposed_ns),
        )
        for one in largest
    ]  # fmt: skip
    head = ("annotation", "count", "host", "shortest", "longest", "device", "exposed")
    return sortable_table("Annotations", head, rows, note=cut_note(len(rows), len(found)))


def all_to_all_table(found: Sequence[AllToAllRank]) -> Table | None:
    """Return how evenly all-to-alls are spread over the ranks."""
    unit = unit_for([one.duration_ns for one in found])
    rows = [
        (
            (f"rank {one.rank}", one.rank), count_cell(one.count), (size_text(one.bytes), one.bytes),
            _times(one.bytes_ratio), time_cell(unit, one.duration_ns), _times(one.duration_ratio),
            time_cell(unit, one.wait_ns), time_cell(unit, one.wire_ns),
        )
        for one in found[:ROWS_MAX]
    ]  # fmt: skip
    head = ("rank", "count", "bytes", "of the mean", "time", "of the mean", "waiting", "wire")
    note = "A rank with little to move waits in it for the others: compare bytes and wire, not the time."
    return sortable_table("All-to-alls by rank", head, rows, note=note)


def _times(ratio: float | None) -> Cell:
    return (DASH, None) if ratio is None else (f"{ratio:.2f} x", ratio)
