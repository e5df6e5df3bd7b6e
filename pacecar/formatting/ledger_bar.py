"""Draws a ledger in a terminal as one full bar, each heading with its share, and a legend below.

The demo and `pacecar analyze` draw with this, so that a colour or a glyph means the same thing in both.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from pacecar.formatting.ledger_headings import HEADING_COLOURS, HEADING_GLYPHS, HEADING_WORDS
from pacecar.formatting.quantities import percent
from pacecar.records import Ledger

__all__ = ["glyph", "ledger_bar", "ledger_legend"]


def ledger_bar(ledger: Ledger, width: int, console: Console) -> Text:
    """Return `ledger` as a bar of `width` cells; each heading gets its share, rounded so that the bar is full."""
    bar = Text(no_wrap=True)
    edge_ns = 0
    for heading, part_ns in ledger.parts().items():
        start = _cells(edge_ns, ledger.wall_ns, width)
        edge_ns += part_ns
        cells = _cells(edge_ns, ledger.wall_ns, width) - start
        bar.append(glyph(heading, console) * cells, style=HEADING_COLOURS[heading])
    return bar


def ledger_legend(ledger: Ledger, width: int, console: Console) -> list[Text]:
    """Return the headings that the bar shows, with their shares, in lines of at most `width` cells."""
    lines = [Text()]
    for heading, part_ns in ledger.parts().items():
        if part_ns == 0:
            continue
        entry = f" {HEADING_WORDS[heading]} {percent(part_ns / ledger.wall_ns)}"
        if len(lines[-1]) > 0 and len(lines[-1]) + 3 + 1 + len(entry) > width:
            lines.append(Text())
        if len(lines[-1]) > 0:
            lines[-1].append("   ")
        lines[-1].append(glyph(heading, console), style=HEADING_COLOURS[heading]).append(entry)
    return lines


def glyph(heading: str, console: Console) -> str:
    """Return the cell of a heading: a block where there is colour, else its own letter."""
    has_blocks = console.color_system is not None and console.encoding.startswith("utf")
    return "\N{FULL BLOCK}" if has_blocks else HEADING_GLYPHS[heading]


def _cells(part_ns: int, wall_ns: int, width: int) -> int:
    return round(part_ns / wall_ns * width) if wall_ns > 0 else 0
