"""Fits the rows of a table to a width: drops the least important columns first, and lets one column grow.

rich's tables wrap and shrink cells, so that a live view would jump at every tick.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pacecar.formatting.plain_text import clean

__all__ = ["PaneColumn", "cut", "gauge", "rows"]

T = TypeVar("T")


class PaneColumn(NamedTuple, Generic[T]):
    """One column: `rank` 0 always stays, and the highest is dropped first; `grows` takes the spare width."""

    title: str
    width: int
    cell: Callable[[T], str | Text]
    rank: int = 0
    is_text: bool = False
    grows: bool = False


def rows(columns: Sequence[PaneColumn[T]], items: Sequence[T], width: int, *, chosen: int | None = None) -> list[Text]:
    """Return a head and one line per item, each at most `width` cells; line `chosen` is reversed."""
    kept = list(columns)
    while len(kept) > 1 and _total(kept) > width and max(column.rank for column in kept) > 0:
        kept.remove(max(reversed(kept), key=lambda column: column.rank))
    spare = max(0, width - _total(kept))
    widths = [column.width + (spare if column.grows else 0) for column in kept]
    head = Text(style="bold", no_wrap=True)
    for column, size in zip(kept, widths, strict=True):
        _append(head, _fitted(column.title, size, is_text=column.is_text))
    lines = [cut(head, width)]
    for number, item in enumerate(items):
        line = Text(no_wrap=True, style="reverse" if number == chosen else "")
        for column, size in zip(kept, widths, strict=True):
            _append(line, _fitted(column.cell(item), size, is_text=column.is_text))
        lines.append(cut(line, width))
    return lines


def _total(columns: Sequence[PaneColumn[T]]) -> int:
    return sum(column.width for column in columns) + len(columns) - 1


def _append(line: Text, cell: Text) -> None:
    if len(line):
        line.append(" ")
    line.append_text(cell)


def _fitted(cell: str | Text, width: int, *, is_text: bool) -> Text:
    text = cell.copy() if isinstance(cell, Text) else Text(clean(cell))
    size = text.cell_len
    if size > width:
        return cut(text, width)
    room = " " * (width - size)
    return text + room if is_text else Text(room) + text


def cut(text: Text, width: int) -> Text:
    """Return `text` cut to `width` cells, with an ellipsis."""
    text = text.copy()
    text.truncate(max(0, width), overflow="ellipsis")
    return text


def gauge(ratio: float | None, width: int, label: str = "") -> Text:
    """Return a bar of `width` cells in brackets like htop's, with `label` at its right end."""
    inside = max(0, width - 2)
    if cell_len(label) > inside:
        label = set_cell_size(label, inside)
    filled = 0 if ratio is None else round(min(1.0, max(0.0, ratio)) * inside)
    line = ("|" * filled).ljust(inside)
    line = line[: inside - len(label)] + label
    colour = (
        "red" if ratio is not None and ratio >= 0.9 else "yellow" if ratio is not None and ratio >= 0.7 else "green"
    )
    text = Text("[", style="bold")
    text.append(line[:filled], style=colour).append(line[filled:], style="dim" if ratio is None else "")
    return text.append("]", style="bold")
