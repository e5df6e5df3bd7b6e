"""Draws tables in a terminal with rich: the important columns at any width, and more where there is room.

Tables are lines of text instead of a `rich.table.Table`, which cannot span columns: remarks on a row are written below
it, over the whole width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .quantities import DASH
from .tables import Table, TableColumn

__all__ = ["rich_table", "terminal_table"]

WIDE_COLUMNS = 120
"""From this width on, a table also shows its "wide" columns, as far as they fit."""

GAP = 2
"""Cells between two columns."""

CUT_CELLS_MIN = 16
"""Names are not cut shorter than this."""


def terminal_table(table: Table | None, console: Console, marks: Sequence[Text] = ()) -> Iterator[Text]:
    """Yield the table as lines: title, heads, rows and caption; nothing for None.  `marks` are appended to the rows."""
    if table is None:
        return
    is_unicode = console.encoding.lower().startswith("utf")
    ellipsis, rule = ("…", "─") if is_unicode else ("~", "-")
    columns = [column for column in table.columns if column.shown == "always"]
    texts = {id(column): _texts(column, table) for column in table.columns}
    widths = {key: max(map(cell_len, lines)) for key, lines in texts.items()}
    room = console.width - max((GAP + mark.cell_len for mark in marks), default=0)

    def taken() -> int:
        return sum(widths[id(column)] + GAP for column in columns) - GAP

    if console.width >= WIDE_COLUMNS:
        for column in table.columns:
            if column.shown == "wide" and taken() + GAP + widths[id(column)] <= room:
                columns = [one for one in table.columns if one in (*columns, column)]
    cut = next((column for column in columns if column.is_long), columns[0])
    if (over := taken() - room) > 0:
        widths[id(cut)] = min(widths[id(cut)], max(widths[id(cut)] - over, CUT_CELLS_MIN))

    def line(row: int) -> Text:
        found = Text()
        for place, column in enumerate(columns):
            text, width = texts[id(column)][row], widths[id(column)]
            if cell_len(text) > width:
                text = set_cell_size(text, width - 1) + ellipsis
            space = " " * (width - cell_len(text))
            is_dim = column.is_long and row > 0
            found.append(" " * GAP * (place > 0) + (text + space if column.is_text else space + text), "dim" * is_dim)
        return found

    yield Text(_title(table), style="bold")
    head = _fitted(line(0), console)
    head.stylize("bold")
    yield head
    yield Text(rule * min(taken() + console.width - room, console.width))
    rows = len(table.cells)
    for row in range(rows):
        if table.sums and row == rows - table.sums:
            yield Text()
        found = line(row + 1)
        if marks:
            found.append(" " * GAP).append_text(marks[row])
        yield _fitted(found, console)
        for column in table.columns:
            if column.shown == "below":
                yield from _below(column.cells[row][0], console.width - GAP, ellipsis)
    if table.caption:
        yield Text(table.caption, style="dim")


def _fitted(line: Text, console: Console) -> Text:
    """Return the line cut to the console's width, with an ellipsis, so that it does not wrap."""
    line.rstrip()
    line.truncate(console.width, overflow="ellipsis")
    return line


def _texts(column: TableColumn, table: Table) -> list[str]:
    """Return the head and the cells; times are bare numbers if the table's title names their unit."""
    texts = [text for text, _ in column.cells]
    if table.unit is not None and column.unit == table.unit:
        texts = [DASH if value is None else table.unit.number(value) for _, value in column.cells]
    return [(column.short or column.head).ljust(column.name_cells), *texts]


def _title(table: Table) -> str:
    said = ", ".join(part for part in (table.cut, table.about) if part)
    return f"{table.name}{f' ({said})' if said else ''}{f', in {table.unit.name}' if table.unit is not None else ''}"


def _below(text: str, room: int, ellipsis: str) -> Iterator[Text]:
    for line in text.split("\n"):
        if line and line != DASH:
            shown = line if cell_len(line) <= room else set_cell_size(line, room - 1) + ellipsis
            yield Text(" " * GAP + shown, style="dim")


def rich_table(title: str) -> RichTable:
    """Return an empty rich table in pacecar's style, which folds long words."""
    return RichTable(
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
    )
