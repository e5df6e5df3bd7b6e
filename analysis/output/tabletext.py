"""Prints the requested tables (`--tables`) for a terminal, in place of the ledger, at 80 columns.

Each table has its longest rows; all rows are in `--json` and `--csv`.  Only one of several ranks is shown
(`words.shown_rank`): eight times the same forty rows would be unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from pacecar.formatting.plain_text import clean
from pacecar.formatting.tables import Table
from pacecar.formatting.terminal_tables import terminal_table

from ..document.report import TraceDocument
from ..document.report_tables import TABLE_NAMES, MemoryTimeline
from .tables import work_tables
from .tables.work_tables import OrderBy
from .words import shown_rank

__all__ = ["ROWS_SHOWN", "tables_text"]

ROWS_SHOWN = 10
"""The most rows of a table; with the lines below them, they fill a screen."""

SPARK_WIDTH_MAX = 60
_SPARKS = "▁▂▃▄▅▆▇█"

_NOTHING = {
    "kernels": ("Kernels", "no work on a device"),
    "operators": ("Operators", "the trace has none"),
    "roofline": ("Matmul, attention, convolution", "no shapes in this trace (record_shapes), or none of these"),
    "launches": ("Launches", "no work on a device"),
    "memory": ("Memory", "no events of the allocator (profile_memory)"),
    "annotations": ("Annotations", "the trace has none (record_function)"),
    "all_to_all": ("All-to-all", "none, or only one rank"),
}
"""Title of a table without rows, and why it has none."""


def tables_text(
    document: TraceDocument, names: Sequence[str], console: Console, by: OrderBy = "total"
) -> Iterator[RenderableType]:
    """Yield the tables `names` in order; kernels and operators are those with the most time `by`."""
    reports = document.traces if any(name != "all_to_all" for name in names) else []
    if document.job is not None and len(reports) > 1:
        chosen, why = shown_rank(reports, document.job)
        yield Text(f"{len(reports)} traces; tables of rank {chosen.rank}, {why}", style="dim")
        reports = [chosen]
    for index, report in enumerate(reports):
        if index:
            yield Text()
        yield Text(clean(Path(report.file).name), style="bold", overflow="fold")
        found = {} if report.tables is None else work_tables.tables_by_name(report.tables, ROWS_SHOWN, by)
        for name in TABLE_NAMES:
            if name in names and name != "all_to_all":
                yield Text()
                yield from _drawn(name, found.get(name, []), console)
                if name == "memory" and report.tables is not None and report.tables.memory:
                    yield from _spark(report.tables.memory[0], console)
    if "all_to_all" in names:
        if reports:
            yield Text()
        table = work_tables.all_to_all_table([] if document.job is None else document.job.all_to_all)
        yield from _drawn("all_to_all", [table] if table is not None else [], console)


def _drawn(name: str, tables: Sequence[Table], console: Console) -> Iterator[Text]:
    if not tables:
        title, why = _NOTHING[name]
        yield Text.assemble((title, "bold"), (f": {why}", "dim"))
    for place, table in enumerate(tables):
        if place:
            yield Text()
        yield from terminal_table(table, console)


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
