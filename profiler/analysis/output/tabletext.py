"""Prints the tables that were asked for (`--tables`) for a terminal, in place of the ledger, at 80 columns.

Each table has its longest rows; all rows are in `--json` and `--csv`.  What launched a kernel stands below it:
operator, shapes, module.  Of several ranks one is shown (`words.shown_rank`), because eight times the same forty rows
are read by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import bandwidth, duration, percent, plural, size_text, unit_for
from pacecar.formatting.tables import rich_table

from ..one_rank.kernel_families import kernel_name
from ..report import TraceDocument, TraceReport
from ..report_tables import (
    TABLE_NAMES,
    AllToAllRank,
    AnnotationTotal,
    KernelTotal,
    LaunchStatistics,
    MemoryTimeline,
    OperationShape,
    OperatorTotal,
)
from .words import module_tail, place_words, shown_rank

__all__ = ["ROWS_SHOWN", "OrderBy", "tables_text"]

OrderBy = Literal["total", "exposed", "critical"]

Timed = TypeVar("Timed", KernelTotal, OperatorTotal)

ROWS_SHOWN = 10
"""The most rows of a table; with the lines below them a screen."""

NAME_WIDTH_MIN = 16
TERA_FROM = 1e11
"""From 0.1 TFLOP/s on, which any GPU does at its best, rates are shown in TFLOP/s, else in GFLOP/s."""

SPARK_WIDTH_MAX = 60
_SPARKS = "▁▂▃▄▅▆▇█"


def tables_text(
    document: TraceDocument, names: Sequence[str], console: Console, by: OrderBy = "total"
) -> Iterator[RenderableType]:
    """Yield what is to be printed of the tables `names`, in order; kernels and operators with the most time `by`."""
    reports = document.traces if any(name != "all_to_all" for name in names) else []
    if document.job is not None and len(reports) > 1:
        chosen, why = shown_rank(reports, document.job)
        yield Text(f"{len(reports)} traces; tables of rank {chosen.rank}, {why}", style="dim")
        reports = [chosen]
    for index, report in enumerate(reports):
        if index:
            yield Text()
        yield Text(clean(Path(report.file).name), style="bold", overflow="fold")
        for name in TABLE_NAMES:
            if name in names and name != "all_to_all":
                yield Text()
                yield from _PARTS[name](report, console, by)
    if "all_to_all" in names:
        if reports:
            yield Text()
        yield _all_to_all([] if document.job is None else document.job.all_to_all)


def _kernels(report: TraceReport, console: Console, by: OrderBy) -> Iterator[RenderableType]:
    rows = _ordered(report.tables.kernels, by) if report.tables is not None else []
    if not rows:
        yield _nothing("Kernels", "no work on a device")
        return
    whole = sum(row.duration_ns for row in rows)
    has_path = any(row.critical_ns is not None for row in rows)
    unit = unit_for([row.duration_ns for row in rows])
    columns = ["count", "time", "share", "exposed", *(["critical"] if has_path else [])]
    lines = []
    for row in rows[:ROWS_SHOWN]:
        cells = [str(row.count), unit.number(row.duration_ns), percent(row.duration_ns / whole)]
        cells += [unit.number(row.exposed_ns), *([_number(unit.number, row.critical_ns)] if has_path else [])]
        lines.append(_Line(kernel_name(row.name), cells, _below_kernel(row)))
    yield from _table(f"{_title('Kernels', len(rows), by)}, in {unit.name}", columns, lines, console)


def _operators(report: TraceReport, console: Console, by: OrderBy) -> Iterator[RenderableType]:
    rows = _ordered(report.tables.operators, by) if report.tables is not None else []
    if not rows:
        yield _nothing("Operators", "the trace has none")
        return
    has_device = any(row.exposed_ns is not None for row in rows)
    has_path = any(row.critical_ns is not None for row in rows)
    last = ["exposed"] if by == "exposed" else ["critical"] if has_path else []
    columns = ["count", "host", "self", *(["device", "own", *last] if has_device else [])]
    unit = unit_for([value for row in rows for value in (row.device_total_ns, row.host_self_ns)])
    lines = []
    for row in rows[:ROWS_SHOWN]:
        cells = [str(row.count), unit.number(row.host_ns), unit.number(row.host_self_ns)]
        if has_device:
            cells += [unit.number(row.device_total_ns), unit.number(row.device_ns)]
            value = row.exposed_ns if by == "exposed" else row.critical_ns
            cells += [_number(unit.number, value)] if last else []
        below = (_joined(" ", row.shapes, row.types), place_words(row.module, row.source))
        lines.append(_Line(row.name, cells, below))
    yield from _table(f"{_title('Operators', len(rows), by)}, in {unit.name}", columns, lines, console)
    words = "self: without the operators inside" + ("; own: of what it launched itself" if has_device else "")
    yield Text(words, style="dim")


def _below_kernel(row: KernelTotal) -> tuple[str, ...]:
    first = row.launchers[0]
    called = _joined(" ", first.operator or "launched by no known operator", first.shapes, first.types)
    more = f"  (+{row.launchers_count - 1} more)" if row.launchers_count > 1 else ""
    return called + more, place_words(first.module, first.source)


def _roofline(report: TraceReport, console: Console, by: OrderBy) -> Iterator[RenderableType]:
    rows = report.tables.roofline if report.tables is not None else []
    if not rows:
        yield _nothing("Matmul, attention, convolution", "no shapes in this trace (record_shapes), or none of these")
        return
    unit = unit_for([row.busy_ns for row in rows])
    highest = max((row.flops_per_second or 0 for row in rows), default=0)
    letter, scale = ("T", 1e12) if highest >= TERA_FROM else ("G", 1e9)
    lines = []
    for row in rows[:ROWS_SHOWN]:
        rate = "-" if row.flops_per_second is None else f"{row.flops_per_second / scale:.1f}"
        cells = [str(row.count), unit.text(row.busy_ns), rate, percent(row.flops_ratio, digits=0)]
        cells += [bandwidth(row.bytes_per_second), percent(row.bandwidth_ratio, digits=0)]
        cells.append(percent(row.roofline_ratio, digits=0))
        lines.append(_Line(row.operator, cells, (_joined(" ", row.shapes, row.types, _counted(row)),)))
    columns = ["count", "time", f"{letter}FLOP/s", "peak", "memory", "peak", "roof"]
    yield from _table(_title("Matmul, attention, convolution by shape", len(rows)), columns, lines, console)
    peaks = {(row.arithmetic, peak) for row in rows if (peak := row.peak_flops_per_second) is not None}
    speeds = {row.peak_bytes_per_second for row in rows if row.peak_bytes_per_second is not None}
    said = [f"{name} {peak / 1e12:g} TFLOP/s" for name, peak in sorted(peaks, key=str)]
    said += [f"memory {bandwidth(speed)}" for speed in sorted(speeds)]
    yield Text(f"peaks: {', '.join(said)}" if said else "the peaks of this device are not known here", style="dim")


def _launches(report: TraceReport, console: Console, by: OrderBy) -> Iterator[RenderableType]:
    row = report.tables.launches if report.tables is not None else None
    if row is None:
        yield _nothing("Launches", "no work on a device")
        return
    yield _launch_spreads(row)
    yield from _launch_facts(row)
    if row.queues:
        table = rich_table("Queues: launched and not begun")
        for column in ("device", "stream", "launches", "mean", "most", "empty"):
            table.add_column(column, justify="right", no_wrap=True)
        for queue in row.queues[:ROWS_SHOWN]:
            cells = (f"{queue.mean:.1f}", str(queue.max), duration(queue.empty_ns))
            table.add_row(str(queue.device), str(queue.stream), str(queue.launches), *cells)
        yield Text()
        yield table


def _launch_spreads(row: LaunchStatistics) -> Table:
    table = rich_table(f"Launches ({plural(row.calls, 'call')}, {plural(row.rows, 'row')} on the device)")
    table.add_column("")
    for column in ("least", "median", "95 %", "most"):
        table.add_column(column, justify="right", no_wrap=True)
    for words, spread in (("launching call", row.call), ("from its end to the start", row.delay)):
        if spread is not None:
            values = (spread.min_ns, spread.median_ns, spread.p95_ns, spread.max_ns)
            table.add_row(words, *(duration(value) for value in values))
    return table


def _launch_facts(row: LaunchStatistics) -> Iterator[Text]:
    share = f" ({percent(row.short_kernels / row.kernels)})" if row.kernels else ""
    yield Text(f"kernels shorter than their launch: {row.short_kernels}{share}, {duration(row.short_kernels_ns)}")
    if row.graph_rows:
        yield Text(f"launched by a call for many, as graphs are: {row.graph_rows}")
    if row.rows_unlinked:
        yield Text(f"launch not in the trace: {row.rows_unlinked}")


def _memory(report: TraceReport, console: Console, by: OrderBy) -> Iterator[RenderableType]:
    rows = report.tables.memory if report.tables is not None else []
    if not rows:
        yield _nothing("Memory", "no events of the allocator (profile_memory)")
        return
    table = rich_table("Memory in tensors")
    table.add_column("device", no_wrap=True)
    for column in ("first", "peak", "last", "reserved"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("at the peak", no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
    table.expand = True
    for row in rows:
        cells = (_bytes(row.first_bytes), _bytes(row.peak_bytes), _bytes(row.last_bytes))
        at = " in ".join(part for part in (row.peak_operator, module_tail(row.peak_module)) if part) or "-"
        table.add_row(clean(row.device), *cells, size_text(row.reserved_peak_bytes), clean(at))
    yield table
    for row in rows[:1]:
        yield from _spark(row, console)
    if any(row.is_relative for row in rows):
        yield Text("this torch wrote changes only: bytes count from the trace's beginning", style="dim")


def _spark(row: MemoryTimeline, console: Console) -> Iterator[Text]:
    """Yield the timeline as one line of blocks, from zero to the peak, where the terminal has them."""
    width = min(SPARK_WIDTH_MAX, console.width - 12)
    if not console.encoding.lower().startswith("utf") or len(row.points) < 2 or row.peak_bytes <= 0 or width < 2:
        return
    first, last = row.points[0].start_ns, row.points[-1].start_ns
    cells = [0] * width
    level = 0
    at = 0
    for cell in range(width):
        edge = first + (last - first) * (cell + 1) // width
        most = level
        while at < len(row.points) and (row.points[at].start_ns < edge or cell == width - 1):
            level = row.points[at].allocated_bytes
            most = max(most, level)
            at += 1
        cells[cell] = most
    top = len(_SPARKS) - 1
    bar = "".join(_SPARKS[min(max(value, 0) * top // row.peak_bytes, top)] for value in cells)
    yield Text(f"{clean(row.device):<10} {bar}")


def _annotations(report: TraceReport, console: Console, by: OrderBy) -> Iterator[RenderableType]:
    rows: Sequence[AnnotationTotal] = report.tables.annotations if report.tables is not None else []
    if not rows:
        yield _nothing("Annotations", "the trace has none (record_function)")
        return
    table = rich_table(_title("Annotations", len(rows)))
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    for column in ("count", "host", "longest", "device", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.expand = True
    unit = unit_for([row.host_ns for row in rows])
    for row in rows[:ROWS_SHOWN]:
        times = (row.host_ns, row.max_ns, row.device_ns, row.exposed_ns)
        table.add_row(clean(row.name), str(row.count), *(unit.text(value) for value in times))
    yield table


def _all_to_all(rows: Sequence[AllToAllRank]) -> RenderableType:
    if not rows:
        return _nothing("All-to-all", "none, or only one rank")
    table = rich_table("All-to-all by rank")
    for column in ("rank", "count", "size", "of mean", "time", "of mean", "wait", "wire"):
        table.add_column(column, justify="right", no_wrap=True)
    unit = unit_for([row.duration_ns for row in rows])
    for row in rows:
        cells = (size_text(row.bytes), _times(row.bytes_ratio), unit.text(row.duration_ns), _times(row.duration_ratio))
        table.add_row(str(row.rank), str(row.count), *cells, unit.text(row.wait_ns), unit.text(row.wire_ns))
    return table


_PARTS: dict[str, Callable[[TraceReport, Console, OrderBy], Iterator[RenderableType]]] = {
    "kernels": _kernels,
    "operators": _operators,
    "roofline": _roofline,
    "launches": _launches,
    "memory": _memory,
    "annotations": _annotations,
}


def _title(words: str, count: int, by: OrderBy = "total") -> str:
    shown = f"the longest {ROWS_SHOWN} of {count}" if count > ROWS_SHOWN else str(count)
    return f"{words} ({shown}{'' if by == 'total' else f', by {by} time'})"


def _ordered(rows: Sequence[Timed], by: OrderBy) -> Sequence[Timed]:
    """Return the rows with the most time `by` first; as they are where it is the total, or equal."""
    if by == "total":
        return rows
    return sorted(rows, key=lambda row: -((row.exposed_ns if by == "exposed" else row.critical_ns) or 0))


def _nothing(title: str, why: str) -> Text:
    return Text.assemble((title, "bold"), (f": {why}", "dim"))


class _Line(NamedTuple):
    """A row of a table: its name, its figures, and what is said of it below, over the whole width."""

    name: str
    cells: Sequence[str]
    below: Sequence[str]


def _table(title: str, columns: Sequence[str], lines: Sequence[_Line], console: Console) -> Iterator[Text]:
    """Yield a table as lines: rich's tables have no cell that spans all columns."""
    widths = [max(len(text) for text in texts) for texts in zip(columns, *(line.cells for line in lines), strict=True)]
    room = max(console.width - sum(width + 2 for width in widths), NAME_WIDTH_MIN)

    def figures(name: str, cells: Sequence[str]) -> str:
        shown = clean(name, room).ljust(room)
        return shown + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    yield Text(title, style="bold")
    yield Text(figures("", columns))
    yield Text("─" * (room + sum(width + 2 for width in widths)))
    for line in lines:
        yield Text(figures(line.name, line.cells))
        for text in line.below:
            if text:
                yield Text(f"  {clean(text, console.width - 2)}", style="dim")


def _counted(row: OperationShape) -> str | None:
    """Return how many of the calls the rates are of, where it is not all."""
    return f"({row.launched} of {row.count} calls)" if row.launched < row.count else None


def _joined(between: str, *parts: str | None) -> str:
    return between.join(part for part in parts if part)


def _number(text: Callable[[float], str], value: int | None) -> str:
    return "-" if value is None else text(value)


def _bytes(value: int) -> str:
    return f"-{size_text(-value)}" if value < 0 else size_text(value)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"
