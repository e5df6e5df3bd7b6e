"""Defines tables by their values, for every renderer, and lays out simple ones as lines of text.

A `Table` holds what each cell shows and the number it sorts by, which columns fit into a terminal, and what was left
out.  `page.document` writes it as HTML, `terminal_tables` draws it with rich, and `pacecar report` writes markdown, so
all three show the same.

`pacecar dump`, `knobs` and `tune` work without rich, which only some extras install: they print `table_lines`.

Left out: the live tables of `pacecar top`, which drop columns in a narrow terminal, and those of `pacecar bench`, which
have nccl-tests' layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import DASH, DisplayUnit, bandwidth, percent, size_text

__all__ = [
    "Cell",
    "Shown",
    "Table",
    "TableColumn",
    "TextColumn",
    "fact_lines",
    "table_lines",
    "table_of_rows",
    "whole_number",
]

FACT_CELLS = 8
"""Width of the column of names in `fact_lines`."""

GROUPED_FROM = 10_000
"""From this number on, digits are grouped by thousands; four digits read as fast without."""

Cell = tuple[str, float | None]
"""The text shown, and the number it sorts by, if any."""

Shown = Literal["always", "wide", "below", "page"]
"""Where a column is shown besides a page, which has all: in every terminal, in a wide one with room, on lines below
its row, or nowhere else."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table.

    `short` is its head in a terminal.  A long column wraps on a page and is cut in a terminal.  `name_cells` is its
    minimum width in a terminal.  `unit` is the unit of its times.
    """

    head: str
    cells: Sequence[Cell]
    is_text: bool = False
    is_long: bool = False
    shown: Shown = "always"
    short: str = ""
    name_cells: int = 0
    unit: DisplayUnit | None = None

    @classmethod
    def text(
        cls,
        head: str,
        values: Iterable[str | None],
        shown: Shown = "always",
        *,
        most: int | None = None,
        is_long: bool = False,
        name_cells: int = 0,
    ) -> TableColumn:
        """Return a column of words, cleaned and cut to `most` characters; None is a dash."""
        cells = [(DASH if one is None else clean(one, most), None) for one in values]
        return cls(head, cells, is_text=True, is_long=is_long, shown=shown, name_cells=name_cells)

    @classmethod
    def lines(cls, head: str, values: Iterable[Sequence[str]], *, most: int) -> TableColumn:
        """Return a column that is shown as lines below each row, cleaned and cut to `most` characters."""
        cells = [("\n".join(clean(line, most) for line in lines if line) or DASH, None) for lines in values]
        return cls(head, cells, is_text=True, is_long=True, shown="below")

    @classmethod
    def number(
        cls, head: str, values: Iterable[Number | None], text: Callable[[Number], str] = str, shown: Shown = "always"
    ) -> TableColumn:
        """Return a column of numbers formatted by `text`; None is a dash."""
        return cls(head, [(DASH if one is None else text(one), one) for one in values], shown=shown)

    @classmethod
    def count(cls, head: str, values: Iterable[float | None], shown: Shown = "always") -> TableColumn:
        """Return a column of whole numbers."""
        return cls.number(head, values, whole_number, shown)

    @classmethod
    def time(
        cls,
        head: str,
        unit: DisplayUnit,
        values: Iterable[float | None],
        shown: Shown = "always",
        *,
        short: str = "",
    ) -> TableColumn:
        """Return a column of times, given in nanoseconds, in one unit."""
        return cls(head, [(unit.text(value), value) for value in values], shown=shown, short=short, unit=unit)

    @classmethod
    def ratio(cls, head: str, values: Iterable[float | None], shown: Shown = "always") -> TableColumn:
        """Return a column of ratios as percentages."""
        return cls.number(head, values, percent, shown)

    @classmethod
    def size(cls, head: str, values: Iterable[int | None], shown: Shown = "always") -> TableColumn:
        """Return a column of sizes in bytes; a change may be negative."""
        return cls.number(head, values, lambda size: f"-{size_text(-size)}" if size < 0 else size_text(size), shown)

    @classmethod
    def bandwidth(cls, head: str, values: Iterable[float | None], shown: Shown = "always") -> TableColumn:
        """Return a column of bytes per second."""
        return cls.number(head, values, bandwidth, shown)


@dataclass(frozen=True, slots=True)
class Table:
    """Columns under a name; the first are words, the others figures.

    `caption` is needed to read the table, `note` explains more where there is room, `cut` says which rows of how many
    are shown, `about` is shown beside the name in a terminal.  With `unit`, a terminal shows times of that unit as bare
    numbers and names the unit in the title.  The last `sums` rows are sums or facts about the others and stay last.
    """

    name: str
    columns: Sequence[TableColumn]
    caption: str = ""
    note: str = ""
    cut: str = ""
    about: str = ""
    unit: DisplayUnit | None = None
    sums: int = 0

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.head for column in self.columns)

    @property
    def cells(self) -> list[tuple[Cell, ...]]:
        """The cells by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """What the cells show, by row."""
        return [tuple(text for text, _ in row) for row in self.cells]

    @property
    def is_sortable(self) -> bool:
        """Whether any cell has a number to sort by."""
        return any(value is not None for column in self.columns for _, value in column.cells)


def table_of_rows(
    name: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: int = 1,
    note: str = "",
    long: int | None = None,
) -> Table:
    """Return an unsortable table of texts; the first `texts` columns are words, column `long` is the long one."""
    columns = [
        TableColumn(word, [(row[place], None) for row in rows], is_text=place < texts, is_long=place == long)
        for place, word in enumerate(head)
    ]
    return Table(name, columns, note=note)


def whole_number(value: float) -> str:
    """Return 15632 as "15 632"."""
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= GROUPED_FROM else f"{value:.0f}"


class TextColumn(NamedTuple):
    """A column of `width` cells, or as wide as its text; numbers are right-aligned."""

    title: str = ""
    width: int | None = None
    is_number: bool = False


def table_lines(
    columns: Sequence[TextColumn], rows: Iterable[Sequence[str]], width: int | None = None
) -> Iterator[str]:
    """Yield the titles, if any, and one line per row; cut cells, and lines longer than `width`."""
    titles = tuple(column.title for column in columns)
    for cells in (titles, *rows) if any(titles) else rows:
        line = "  ".join(_fitted(cell, column) for cell, column in zip(cells, columns, strict=True))
        yield clean(line.rstrip(), width)


def _fitted(cell: str, column: TextColumn) -> str:
    text = clean(cell, column.width)
    return text if column.width is None else text.rjust(column.width) if column.is_number else text.ljust(column.width)


def fact_lines(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield one line per fact: its name and its value."""
    return table_lines((TextColumn(width=FACT_CELLS), TextColumn()), facts)
