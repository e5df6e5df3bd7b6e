"""Lays out tables for a terminal: as lines of text, and with rich.

rich comes with some extras only, and `pacecar dump`, `knobs` and `tune` work without it: their tables are lines, whose
cells are cleaned here.  `pacecar analyze` and `demo` draw theirs with rich.

Left out: the live tables of `pacecar top`, which lose columns where the terminal is narrow, and those of `pacecar
bench`, whose layout is nccl-tests'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pacecar.formatting.plain_text import clean

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["TextColumn", "fact_lines", "rich_table", "table_lines"]

FACT_CELLS = 8
"""Width of the names of facts."""


class TextColumn(NamedTuple):
    """A column of `width` cells, the last one as wide as its text without one; numbers stand at the right."""

    title: str = ""
    width: int | None = None
    is_number: bool = False


def table_lines(
    columns: Sequence[TextColumn], rows: Iterable[Sequence[str]], width: int | None = None
) -> Iterator[str]:
    """Yield the titles, if there are any, and a line a row; cells, and lines of more than `width`, are cut."""
    titles = tuple(column.title for column in columns)
    for cells in (titles, *rows) if any(titles) else rows:
        line = "  ".join(_fitted(cell, column) for cell, column in zip(cells, columns, strict=True))
        yield clean(line.rstrip(), width)


def _fitted(cell: str, column: TextColumn) -> str:
    text = clean(cell, column.width)
    return text if column.width is None else text.rjust(column.width) if column.is_number else text.ljust(column.width)


def fact_lines(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line a fact: its name, and beside it what is so."""
    return table_lines((TextColumn(width=FACT_CELLS), TextColumn()), facts)


def rich_table(title: str) -> Table:
    """Return an empty table in the style of all of pacecar's."""
    from rich import box
    from rich.table import Table

    return Table(
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
    )
