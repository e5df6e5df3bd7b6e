"""Holds a table, title, head and cells as text, and writes it as HTML.

The content of each cell is decided by whoever makes the table, so that a page, markdown and a terminal cannot say
different things.  Foreign words are escaped here and never markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Cell", "Table", "folded", "sortable_table", "table_html"]

Cell = tuple[str, float | None]
"""What is shown, and the number by which it is sorted; None where there is none."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under `head`; the first `texts` columns are words, the others figures.  `note` explains.

    `long` is the column whose words may have several lines.  `values` has a number for each cell by which a reader may
    sort, None for a cell that has none; a table without `values` keeps its order.
    """

    name: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    texts: int = 1
    note: str = ""
    long: int | None = None
    values: Sequence[tuple[float | None, ...]] | None = None


def sortable_table(
    name: str,
    head: tuple[str, ...],
    rows: Sequence[Sequence[Cell]],
    *,
    texts: int = 1,
    note: str = "",
    long: int | None = None,
) -> Table | None:
    """Return a table of cells with their numbers; None without rows."""
    if not rows:
        return None
    shown = [tuple(text for text, _ in row) for row in rows]
    values = [tuple(value for _, value in row) for row in rows]
    return Table(name, head, shown, texts=texts, note=note, long=long, values=values)


def table_html(table: Table | None) -> str:
    """Return the table in a region that scrolls sideways, and its note; nothing for None."""
    if table is None:
        return ""
    head = "".join(
        f'<th scope="col"{_text_class(table, place)}>{escape(cell)}</th>' for place, cell in enumerate(table.head)
    )
    lines = [_row(table, number, row) for number, row in enumerate(table.rows)]
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    thead = f"<thead><tr>{head}</tr></thead>" if any(table.head) else ""
    sortable = ' class="sortable"' if table.values is not None else ""
    # A region that scrolls sideways can be reached by keyboard.
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Table: {escape(table.name)}">'
        f"<table{sortable}>{thead}<tbody>{''.join(lines)}</tbody></table></div>{note}"
    )


def folded(title: str, table: Table | None) -> str:
    """Return the table behind a title that opens it."""
    return "" if table is None else f"<details><summary>{escape(title)}</summary>{table_html(table)}</details>"


def _row(table: Table, number: int, row: tuple[str, ...]) -> str:
    values = table.values[number] if table.values is not None else (None,) * len(row)
    first, *rest = row
    cells = [f'<th scope="row" class="text"{_value(values[0])}>{escape(first)}</th>']
    for place, cell in enumerate(rest, start=1):
        cells.append(f"<td{_text_class(table, place, cell)}{_value(values[place])}>{escape(cell)}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _value(value: float | None) -> str:
    return "" if value is None else f' data-value="{value:.12g}"'


def _text_class(table: Table, place: int, cell: str | None = None) -> str:
    names = []
    if place < table.texts or place == table.long:
        names.append("text")
    if place == table.long:
        names.append("long")
    if cell in ("kept", "faster", "slower"):
        names.append(f"mark-{cell}")
    return f' class="{" ".join(names)}"' if names else ""
