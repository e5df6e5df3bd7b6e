"""Draws a ledger in a terminal: one full bar with a part for each heading, and a legend below.

`pacecar demo`, `analyze` and `top` all use it, so that a colour or glyph means the same thing everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from pacecar.formatting.ledger_headings import HEADING_COLOURS, HEADING_GLYPHS, HEADING_WORDS
from pacecar.formatting.quantities import percent, short_percent
from pacecar.records import LEDGER_HEADINGS, Ledger

__all__ = ["ledger_bar", "ledger_legend"]

LedgerParts = Ledger | Mapping[str, float]
"""A ledger, or heading -> seconds as in the daemon's document, which may omit headings."""


def ledger_bar(ledger: LedgerParts, width: int, console: Console) -> Text:
    """Return `ledger` as a bar of `width` cells; shares are rounded so that the bar is full."""
    parts = _parts(ledger)
    total = sum(parts.values())
    bar = Text(no_wrap=True)
    edge: float = 0
    for heading in LEDGER_HEADINGS:
        start = _cells(edge, total, width)
        edge += parts.get(heading, 0)
        bar.append(_glyph(heading, console) * (_cells(edge, total, width) - start), style=HEADING_COLOURS[heading])
    return bar


def ledger_legend(ledger: LedgerParts, width: int, console: Console, *, is_narrow: bool = False) -> list[Text]:
    """Return the headings in the bar with their shares, in lines of at most `width` cells.

    `is_narrow` writes "25.0%" and narrows the gap between headings.
    """
    parts = _parts(ledger)
    total = sum(parts.values())
    gap = "  " if is_narrow else "   "
    lines = [Text(no_wrap=is_narrow)]
    for heading in LEDGER_HEADINGS:
        part = parts.get(heading, 0)
        if part <= 0 or total <= 0:
            continue
        share = short_percent(part / total, digits=1) if is_narrow else percent(part / total)
        entry = f" {HEADING_WORDS[heading]} {share}"
        if len(lines[-1]) > 0 and len(lines[-1]) + len(gap) + 1 + len(entry) > width:
            lines.append(Text(no_wrap=is_narrow))
        if len(lines[-1]) > 0:
            lines[-1].append(gap)
        lines[-1].append(_glyph(heading, console), style=HEADING_COLOURS[heading]).append(entry)
    return lines


def _parts(ledger: LedgerParts) -> Mapping[str, float]:
    return ledger.parts() if isinstance(ledger, Ledger) else ledger


def _glyph(heading: str, console: Console) -> str:
    """Return the cell of a heading: a block if the terminal has colour, else the heading's own letter."""
    has_blocks = console.color_system is not None and console.encoding.startswith("utf")
    return "\N{FULL BLOCK}" if has_blocks else HEADING_GLYPHS[heading]


def _cells(part: float, total: float, width: int) -> int:
    return round(part / total * width) if total > 0 else 0
