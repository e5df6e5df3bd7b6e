"""Renders a report on a terminal with rich, from the same tables as page and markdown; `pacecar demo` ends with it.

It shows the pace, the ledger, the changes, what would help most, and how far to trust that.  The page has the rest.
`pacecar report` does not load this module, so it does not need rich.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar
from pacecar.formatting.tables import Table
from pacecar.formatting.terminal_tables import rich_table

from ..document import Report, RunSide
from . import tables
from .utilization_tables import trust_table

__all__ = ["terminal_report"]

BAR_CELLS_MAX = 79

NAME_CELLS = 9
"""Width of the names before the bars."""

COLUMNS_WIDE = 7
"""Wider tables get multi-line heads and narrow gaps: the table of changes has nine columns in 80 cells."""

WORD_CELLS_MAX = 14
"""Longer words may be folded, so that the columns beside them are not."""


def terminal_report(report: Report, console: Console) -> Iterator[RenderableType]:
    """Yield the tables, the notices, and last, where it stays visible, the headline."""
    yield from _drawn(tables.stability_table(report), console)
    yield from _drawn(tables.ledger_table(report), console)
    for name, side in tables.sides_of(report):
        yield _bar(name, side, console)
    yield from _drawn(tables.changes_table(report), console)
    for place, reason in tables.reasons(report):
        yield _note(f"{place}. {reason}", console)
    yield from _drawn(tables.ladder_table(report), console)
    yield from _drawn(trust_table(report), console)
    yield Text()
    for notice in report.notices:
        yield _text(f"{'lost' if notice.is_damage else 'note'}: {notice.line}", console, "yellow")
    yield _text(tables.headline(report), console, "bold")


def _drawn(table: Table | None, console: Console) -> Iterator[RenderableType]:
    if table is None or not table.rows:
        return
    is_wide = len(table.head) > COLUMNS_WIDE
    drawn = rich_table("")
    drawn.title = _text(table.name, console, "bold")
    drawn.padding = (0, 0 if is_wide else 1, 0, 0)
    drawn.show_header = any(table.head)
    for column in table.columns:
        # Texts that do not fit are folded and not cut off: half a verdict is useless.
        drawn.add_column(
            _text(column.head.replace(" ", "\n") if is_wide else column.head, console),
            justify="left" if column.is_text else "right",
            overflow="fold",
            no_wrap=not column.is_text
            or all(len(text) <= WORD_CELLS_MAX and " " not in text for text, _ in column.cells),
        )
    for row in table.rows:
        drawn.add_row(*(_text(cell, console) for cell in row))
    yield Text()
    yield drawn
    if table.note:
        yield _note(table.note, console)


def _bar(name: str, side: RunSide, console: Console) -> Text:
    """Return a mean step as a bar."""
    width = min(console.width - NAME_CELLS, BAR_CELLS_MAX)
    return Text.assemble((f"{name:<{NAME_CELLS}}", "dim"), ledger_bar(side.ledger_ns, width, console))


def _note(text: str, console: Console) -> Padding:
    return Padding(_text(text, console, "dim"), (0, 0, 0, 2))


def _text(text: str, console: Console, style: str = "") -> Text:
    """Return `text` without markup and without characters that the terminal's encoding lacks."""
    if not console.encoding.startswith("utf"):
        text = text.replace("→", "->").replace("±", "+-")
        text = text.encode(console.encoding, "replace").decode(console.encoding)
    return Text(text, style=style)
