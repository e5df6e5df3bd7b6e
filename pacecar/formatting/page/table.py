"""Holds a table, title, head and cells as text, and writes it as HTML.

The content of each cell is decided by whoever makes the table, so that a page, markdown and a terminal cannot say
different things.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .template import NOTHING, part

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


def table_html(table: Table | None) -> Markup:
    """Return the table in a region that scrolls sideways, and its note; nothing for None."""
    if table is None:
        return NOTHING
    nothing = (None,) * len(table.head)
    values = table.values if table.values is not None else [nothing] * len(table.rows)
    return part("table", table, list(zip(table.rows, values, strict=True)))


def folded(title: str, table: Table | None) -> Markup:
    """Return the table behind a title that opens it; nothing for None."""
    return NOTHING if table is None else part("folded", title, table_html(table))
