"""Defines the tables of a trace's work: kernels, operators, roofline, launches, memory, annotations, all-to-alls.

On a terminal, the launch of a kernel (operator, shapes, module) is below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict, TypeVar

from pacecar.analysis.document.report_tables import (
    AllToAllRank,
    AnnotationTotal,
    KernelTotal,
    LaunchStatistics,
    MemoryTimeline,
    OperationShape,
    OperatorTotal,
    TraceTables,
)
from pacecar.analysis.one_rank.kernel_families import kernel_name
from pacecar.formatting.quantities import bandwidth, duration, percent, plural, unit_for
from pacecar.formatting.tables import Shown, Table, TableColumn

from ..words import module_tail, place_words
from .trace_tables import cut_words

__all__ = ["OrderBy", "all_to_all_table", "tables_by_name"]

OrderBy = Literal["total", "exposed", "critical"]

Timed = TypeVar("Timed", KernelTotal, OperatorTotal)

NAME_CHARACTERS_MAX = 64
"""The most characters of a name: templates have thousands and push the figures off the page; `--json` has them
whole."""

LINE_CHARACTERS_MAX = 96
"""The most characters of a line below a row: operator and shapes, or module and source."""

TERA_FROM = 1e11
"""If the highest rate is at least 0.1 TFLOP/s, rates are shown in TFLOP/s, else in GFLOP/s."""


def tables_by_name(found: TraceTables, most: int, by: OrderBy = "total") -> dict[str, list[Table]]:
    """Return the tables with rows, by the names of `--tables`, with at most `most` rows each."""
    tables = {
        "kernels": [_kernels(found.kernels, most, by)],
        "operators": [_operators(found.operators, most, by)],
        "roofline": [_roofline(found.roofline, most)],
        "launches": [_launches(found.launches), _queues(found.launches, most)],
        "memory": [_memory(found.memory)],
        "annotations": [_annotations(found.annotations, most)],
    }
    return {name: [table for table in some if table is not None] for name, some in tables.items()}


def _kernels(found: Sequence[KernelTotal], most: int, by: OrderBy = "total") -> Table | None:
    """Return the kernels with the most time `by`, and what launched each."""
    if not found:
        return None
    rows = _ordered(found, by)[:most]
    whole = sum(row.duration_ns for row in found)
    unit = unit_for([row.duration_ns for row in found])
    columns = [
        TableColumn.text("kernel", [kernel_name(row.name) for row in rows], most=NAME_CHARACTERS_MAX),
        TableColumn.text("family", [row.family.replace("_", " ") for row in rows], "wide"),
        TableColumn.count("count", [row.count for row in rows]),
        TableColumn.time("time", unit, [row.duration_ns for row in rows]),
        TableColumn.ratio("share", [row.duration_ns / whole if whole else None for row in rows]),
        TableColumn.time("exposed", unit, [row.exposed_ns for row in rows]),
        TableColumn.time("critical", unit, [row.critical_ns for row in rows], _where_known(found)),
        TableColumn.number("median", [row.median_ns for row in rows], duration, "wide"),
        TableColumn.number("longest", [row.max_ns for row in rows], duration, "wide"),
        TableColumn.lines("launched mostly by", [_launcher(row) for row in rows], most=LINE_CHARACTERS_MAX),
    ]
    note = "Exposed: what the ledger charges to it. Critical: its part of the critical path."
    return Table("Kernels", columns, note=note, **_title(len(rows), len(found), by), unit=unit)


def _launcher(row: KernelTotal) -> tuple[str, str]:
    if not row.launchers:
        return "", ""
    first = row.launchers[0]
    called = _joined(" ", first.operator or "launched by no known operator", first.shapes, first.types)
    more = f"  (+{row.launchers_count - 1} more)" if row.launchers_count > 1 else ""
    return called + more, place_words(first.module, first.source)


def _operators(found: Sequence[OperatorTotal], most: int, by: OrderBy = "total") -> Table | None:
    """Return the operators with the most time `by`: host time, and device time of the work they launched."""
    if not found:
        return None
    rows = _ordered(found, by)[:most]
    has_device = any(row.exposed_ns is not None for row in found)
    unit = unit_for([value for row in found for value in (row.device_total_ns, row.host_self_ns)])
    of_device = [
        TableColumn.time("device", unit, [row.device_total_ns for row in rows]),
        TableColumn.time("device self", unit, [row.device_ns for row in rows], short="self"),
        TableColumn.time("exposed", unit, [row.exposed_ns for row in rows], "always" if by == "exposed" else "wide"),
        TableColumn.time(
            "critical", unit, [row.critical_ns for row in rows], "wide" if by == "exposed" else _where_known(found)
        ),
    ]
    columns = [
        TableColumn.text("operator", [row.name for row in rows], most=NAME_CHARACTERS_MAX),
        TableColumn.count("count", [row.count for row in rows]),
        TableColumn.time("host", unit, [row.host_ns for row in rows]),
        TableColumn.time("host self", unit, [row.host_self_ns for row in rows], short="self"),
        *(of_device if has_device else []),
        TableColumn.lines(
            "called with",
            [(_joined(" ", row.shapes, row.types), place_words(row.module, row.source)) for row in rows],
            most=LINE_CHARACTERS_MAX,
        ),
    ]
    caption = "Self: without the operators inside."
    return Table("Operators", columns, caption, **_title(len(rows), len(found), by), unit=unit)


def _roofline(found: Sequence[OperationShape], most: int) -> Table | None:
    """Return matmuls, attentions and convolutions by shape, against the device's peaks."""
    if not found:
        return None
    rows = found[:most]
    highest = max((row.flops_per_second or 0 for row in found), default=0)
    letter, scale = ("T", 1e12) if highest >= TERA_FROM else ("G", 1e9)
    columns = [
        TableColumn.text("operator", [row.operator for row in rows], most=NAME_CHARACTERS_MAX),
        TableColumn.text("kind", [row.kind for row in rows], "wide"),
        TableColumn.text("arithmetic", [row.arithmetic for row in rows], "wide"),
        TableColumn.count("count", [row.count for row in rows]),
        TableColumn.time("time", unit_for([row.busy_ns for row in found]), [row.busy_ns for row in rows]),
        TableColumn.number(
            f"{letter}FLOP/s", [row.flops_per_second for row in rows], lambda rate: f"{rate / scale:.1f}"
        ),
        TableColumn.number("peak", [row.flops_ratio for row in rows], _two_digits),
        TableColumn.bandwidth("memory", [row.bytes_per_second for row in rows]),
        TableColumn.number("peak", [row.bandwidth_ratio for row in rows], _two_digits),
        TableColumn.number("FLOP/B", [row.intensity for row in rows], lambda ratio: f"{ratio:.3g}", "wide"),
        TableColumn.number("roof", [row.roofline_ratio for row in rows], _two_digits),
        TableColumn.text("bound by", [row.bound for row in rows], "wide"),
        TableColumn.lines("shapes", [(_joined(" ", row.shapes, row.types, _counted(row)),) for row in rows],
                     most=LINE_CHARACTERS_MAX)
    ]  # fmt: skip
    peaks = {(row.arithmetic, peak) for row in found if (peak := row.peak_flops_per_second) is not None}
    speeds = {row.peak_bytes_per_second for row in found if row.peak_bytes_per_second is not None}
    said = [f"{name} {peak / 1e12:g} TFLOP/s" for name, peak in sorted(peaks, key=str)]
    said += [f"memory {bandwidth(speed)}" for speed in sorted(speeds)]
    caption = f"Peaks: {', '.join(said)}." if said else "The peaks of this device are not known here."
    note = "Bytes are the least that must be moved. Roof: the time that either peak allows, over the time taken."
    title = _title(len(rows), len(found))
    return Table("Matmul, attention, convolution by shape", columns, caption, note, **title)


def _two_digits(ratio: float) -> str:
    """Return a share of a peak, with digits for a small one: 62 %, 0.4 %."""
    return percent(ratio, digits=0 if ratio >= 0.1 else 1)


def _counted(row: OperationShape) -> str | None:
    """Return how many of the calls the rates cover, if not all."""
    return f"({row.launched} of {row.count} calls)" if row.launched < row.count else None


def _launches(found: LaunchStatistics | None) -> Table | None:
    """Return how long launching took, and how long work waited to begin."""
    if found is None:
        return None
    spreads = [
        (words, spread)
        for words, spread in (("launching call", found.call), ("from its end to the start", found.delay))
        if spread is not None
    ]
    columns = [
        TableColumn.text("duration", [words for words, _ in spreads]),
        TableColumn.number("least", [spread.min_ns for _, spread in spreads], duration),
        TableColumn.number("median", [spread.median_ns for _, spread in spreads], duration),
        TableColumn.number("95 %", [spread.p95_ns for _, spread in spreads], duration),
        TableColumn.number("most", [spread.max_ns for _, spread in spreads], duration),
    ]
    share = f" ({percent(found.short_kernels / found.kernels)})" if found.kernels else ""
    said = [f"Kernels shorter than their launch: {found.short_kernels}{share}, {duration(found.short_kernels_ns)}."]
    if found.graph_rows:
        said.append(f"Launched by a call for many, as graphs are: {found.graph_rows}.")
    if found.rows_unlinked:
        said.append(f"Launch not in the trace: {found.rows_unlinked}.")
    about = f"{plural(found.calls, 'call')}, {plural(found.rows, 'row')} on the device"
    return Table("Launches", columns, " ".join(said), about=about)


def _queues(found: LaunchStatistics | None, most: int) -> Table | None:
    """Return how many launches were in each stream's queue."""
    if found is None or not found.queues:
        return None
    rows = found.queues[:most]
    columns = [
        TableColumn.number("device", [row.device for row in rows]),
        TableColumn.number("stream", [row.stream for row in rows]),
        TableColumn.count("launches", [row.launches for row in rows]),
        TableColumn.number("mean", [row.mean for row in rows], lambda mean: f"{mean:.1f}"),
        TableColumn.count("most", [row.max for row in rows]),
        TableColumn.number("empty", [row.empty_ns for row in rows], duration),
    ]
    return Table("Queues: launched and not begun", columns, cut=cut_words(len(rows), len(found.queues), "first"))


def _memory(rows: Sequence[MemoryTimeline]) -> Table | None:
    """Return the bytes of each device's tensors, and what ran at the peak."""
    if not rows:
        return None
    at_peak = [" in ".join(part for part in (row.peak_operator, module_tail(row.peak_module)) if part) for row in rows]
    columns = [
        TableColumn.text("device", [row.device for row in rows]),
        TableColumn.size("first", [row.first_bytes for row in rows]),
        TableColumn.size("peak", [row.peak_bytes for row in rows]),
        TableColumn.size("last", [row.last_bytes for row in rows]),
        TableColumn.size("reserved", [row.reserved_peak_bytes for row in rows]),
        TableColumn.size("allocated", [row.allocated_bytes for row in rows], "wide"),
        TableColumn.count("events", [row.events for row in rows], "wide"),
        TableColumn.text("at the peak", [words or None for words in at_peak], is_long=True),
    ]
    is_relative = any(row.is_relative for row in rows)
    caption = "This torch wrote changes only, so bytes count from the trace's beginning." if is_relative else ""
    return Table("Memory in tensors", columns, caption, "Reserved is its peak, allocated the sum of all allocations.")


def _annotations(found: Sequence[AnnotationTotal], most: int) -> Table | None:
    """Return the ranges that the script or torch marked, the longest first."""
    if not found:
        return None
    rows = found[:most]
    unit = unit_for([row.host_ns for row in found])
    columns = [
        TableColumn.text("annotation", [row.name for row in rows], most=NAME_CHARACTERS_MAX),
        TableColumn.count("count", [row.count for row in rows]),
        TableColumn.time("host", unit, [row.host_ns for row in rows]),
        TableColumn.time("shortest", unit, [row.min_ns for row in rows], "wide"),
        TableColumn.time("longest", unit, [row.max_ns for row in rows]),
        TableColumn.time("device", unit, [row.device_ns for row in rows]),
        TableColumn.time("exposed", unit, [row.exposed_ns for row in rows]),
    ]
    return Table("Annotations", columns, **_title(len(rows), len(found)))


def all_to_all_table(rows: Sequence[AllToAllRank]) -> Table | None:
    """Return how evenly all-to-alls are spread over the ranks."""
    if not rows:
        return None
    unit = unit_for([row.duration_ns for row in rows])
    columns = [
        TableColumn.number("rank", [row.rank for row in rows]),
        TableColumn.count("count", [row.count for row in rows]),
        TableColumn.size("size", [row.bytes for row in rows]),
        TableColumn.number("of mean", [row.bytes_ratio for row in rows], _times),
        TableColumn.time("time", unit, [row.duration_ns for row in rows]),
        TableColumn.number("of mean", [row.duration_ratio for row in rows], _times),
        TableColumn.time("wait", unit, [row.wait_ns for row in rows]),
        TableColumn.time("wire", unit, [row.wire_ns for row in rows]),
    ]
    note = "A rank with little to move waits in it for the others: compare size and wire, not the time."
    return Table("All-to-all by rank", columns, note=note)


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x"


def _ordered(rows: Sequence[Timed], by: OrderBy) -> Sequence[Timed]:
    """Return the rows sorted by most time `by`; unchanged for the total, or if equal."""
    if by == "total":
        return rows
    return sorted(rows, key=lambda row: -((row.exposed_ns if by == "exposed" else row.critical_ns) or 0))


def _where_known(rows: Sequence[Timed]) -> Shown:
    """Return the column for time on the critical path, if any row has it."""
    return "always" if any(row.critical_ns is not None for row in rows) else "page"


class _Title(TypedDict):
    cut: str
    about: str


def _title(shown: int, found: int, by: OrderBy = "total") -> _Title:
    """Return how many of how many rows are shown, and which."""
    cut = cut_words(shown, found, "longest")
    about = ["" if cut else str(found), "" if by == "total" else f"by {by} time"]
    return _Title(cut=cut, about=", ".join(part for part in about if part))


def _joined(between: str, *parts: str | None) -> str:
    return between.join(part for part in parts if part)
