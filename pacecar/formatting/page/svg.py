"""Draws the charts of pages as plain SVG, without libraries, scripts, fonts or external files.

Each drawing has a title and a description for people who cannot see it; a table beside it has the figures.  Colours are
classes, to which the page's style gives a light or dark value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

__all__ = [
    "INNER", "LEFT", "RIGHT", "WIDTH", "Bar", "drawing", "length_bars", "line", "rect", "stacked_bars", "text", "ticks",
]  # fmt: skip

WIDTH, LEFT, RIGHT = 960, 64, 16
INNER = WIDTH - LEFT - RIGHT
"""Units of the time axis."""

BAR_TEXT, BARS_TEXT = 90, 190
"""Space for the figures to the right of stacked bars, and of length bars."""


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers (1, 2, 5 times a power of ten) from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def drawing(height: int, title: str, said: str, body: Iterable[str]) -> str:
    """Return a drawing of `WIDTH` by `height`; its title is unique on a page."""
    name = "".join(character for character in title.lower() if character.isalnum())
    return "\n".join(
        (
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{name}-t {name}-d">',
            f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(said)}</desc>',
            *body,
            "</svg>",
        )
    )


def text(x: float, y: float, words: str, classes: str = "") -> str:
    """Return a line of text."""
    named = f' class="{classes}"' if classes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, classes: str, hint: str = "") -> str:
    """Return a rectangle; `hint` is its tooltip."""
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}" class="{classes}">'
        f"{inside}</rect>"
    )


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    """Return a straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}"/>'


class Bar(NamedTuple):
    """A bar of parts, keyed by CSS class; `figure` is written to its right, `hints` are the parts' tooltips."""

    name: str
    parts: Mapping[str, float]
    figure: str
    hints: Mapping[str, str]


def stacked_bars(title: str, said: str, bars: Sequence[Bar], *, left: int = LEFT, every: int = 34) -> str:
    """Draw bars below each other, `every` units apart, on one scale; return "" if all are empty."""
    longest = max((sum(bar.parts.values()) for bar in bars), default=0)
    if longest <= 0:
        return ""
    thick = every - max(4, round(every * 0.3))

    def body() -> Iterator[str]:
        for row, bar in enumerate(bars):
            y, x = 6 + row * every, float(left)
            yield text(left - 8, y + thick / 2 + 5, bar.name, "end")
            for name, value in bar.parts.items():
                width = value / longest * (WIDTH - left - RIGHT - BAR_TEXT)
                if value:
                    yield rect(x, y, width, thick, f"{name} edge", bar.hints.get(name, ""))
                x += width
            yield text(x + 6, y + thick / 2 + 5, bar.figure)

    return drawing(8 + every * len(bars), title, said, body())


def length_bars(title: str, said: str, bars: Sequence[tuple[str, float, str]], *, left: int = 290) -> str:
    """Draw one bar per (name, length, figure); the first is today's."""
    longest = max((value for _, value, _ in bars), default=0)
    if longest <= 0:
        return ""

    def body() -> Iterator[str]:
        for row, (name, value, figure) in enumerate(bars):
            y = 4 + row * 28
            yield text(left - 8, y + 15, name, "end")
            width = value / longest * (WIDTH - left - BARS_TEXT)
            yield rect(left, y, width, 20, "rung" if row else "rung today")
            yield text(left + width + 6, y + 15, figure)

    return drawing(10 + 28 * len(bars), title, said, body())
