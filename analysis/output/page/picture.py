"""Writes the drawing of `rank_timeline` as an SVG file that stands alone: with title, legend and its own style.

The SVG is plain text, written without a library; it follows the reader's light or dark scheme.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

from pacecar.analysis.document.report import TraceReport
from pacecar.analysis.reading.parallel_reading import Analysis
from pacecar.formatting.ledger_headings import HEADING_COLOURS
from pacecar.formatting.page.svg import WIDTH, rect, text
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import plural
from pacecar.safe_files import output

from .rank_lanes import OVERLAPPED, WAITING
from .rank_timeline import RankTimeline, draw_ranks, shortened

__all__ = ["HEAD_HEIGHT", "picture", "write_picture"]

HEAD_HEIGHT, LEGEND_LINE = 48, 20
"""Units for title and facts above the drawing, and between lines of the legend below it."""

LEGEND_COLUMNS, LEGEND_LEFT = 2, 64

NOTE_LINE, NOTE_CHARACTERS_MAX = 16, 140
"""Units between lines of the note at the bottom, and what fits into one."""

FACTS_CHARACTERS_MAX = 118

_PALE = "#EAB08A"
"""Communication that is hidden or only waiting: pale, but opaque so that names on it can be read."""

_STYLE = (
    """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 } .axis { font-size: 12px; fill: #59636e } .small { font-size: 11px }
.name { font-size: 10px; fill: #111111 } .end { text-anchor: end } .middle { text-anchor: middle }
.page { fill: #ffffff } .lane { fill: #f0f2f4 } .grid { stroke: #d1d9e0; stroke-width: 1 }
path.path { fill: none; stroke: #1f2328; stroke-width: 2.2; stroke-linejoin: round } rect.path { fill: #1f2328 }
path.rim { stroke: #ffffff; stroke-width: 5 }
"""
    + "".join(f".{name} {{ fill: {colour} }}\n" for name, colour in HEADING_COLOURS.items())
    + "".join(f".{name} {{ fill: {_PALE} }}\n" for name in (WAITING, OVERLAPPED))
    + """@media (prefers-color-scheme: dark) {
  text, rect.path { fill: #e6edf3 } path.path { stroke: #e6edf3 } .axis { fill: #9198a1 } .name { fill: #0a0a0a }
  .page { fill: #0d1117 } path.rim { stroke: #0d1117 } .lane { fill: #1c2128 } .grid { stroke: #3d444d }
}
"""
)


def write_picture(analysis: Analysis, path: Path, step: int | None = None) -> None:
    """Draw a step into `path`.  Raises OSError; LookupError if the step does not exist or there is nothing to draw."""
    drawn = picture(analysis, step)
    with output(path) as stream:
        stream.write(drawn.encode())


def picture(analysis: Analysis, step: int | None = None) -> str:
    """Return the SVG of a step, the median one by default, or of the window if there are no steps."""
    reports = analysis.document.traces
    drawn = draw_ranks(analysis, step)
    if drawn is None:
        raise LookupError(f"{reports[0].file}: there is nothing to draw, the window is empty")
    legend = list(_legend(drawn))
    note = textwrap.wrap(drawn.note, NOTE_CHARACTERS_MAX)
    note_top = drawn.height + LEGEND_LINE * (-(-len(drawn.legend) // LEGEND_COLUMNS) + 1) + 8
    height = HEAD_HEIGHT + note_top + NOTE_LINE * len(note)
    facts = shortened(", ".join(_facts(reports)), FACTS_CHARACTERS_MAX)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-HEAD_HEIGHT} {WIDTH} {height}" width="{WIDTH}"'
            f' height="{height}" role="img">',
            f"<title>{escape(drawn.caption)}</title><desc>{escape(drawn.description)}</desc>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" y="{-HEAD_HEIGHT}" width="{WIDTH}" height="{height}"/>',
            text(16, 26 - HEAD_HEIGHT, drawn.caption, "title"),
            text(16, 45 - HEAD_HEIGHT, facts, "axis small"),
            *drawn.body,
            *legend,
            *(text(LEGEND_LEFT, note_top + NOTE_LINE * n, line, "axis small") for n, line in enumerate(note)),
            "</svg>",
            "",
        )
    )


def _facts(reports: list[TraceReport]) -> Iterator[str]:
    first = reports[0]
    yield clean(Path(first.file).name) if len(reports) == 1 else plural(len(reports), "trace")
    if first.world_size is not None:
        yield f"{first.world_size} ranks"
    if first.backend is not None:
        yield clean(first.backend)
    yield from list(dict.fromkeys(clean(gpu) for gpu in first.gpus if gpu))[:1]


def _legend(drawn: RankTimeline) -> Iterator[str]:
    """Yield what each colour means, in two columns."""
    for index, (name, words) in enumerate(drawn.legend):
        x = LEGEND_LEFT + index % LEGEND_COLUMNS * (WIDTH - LEGEND_LEFT) // LEGEND_COLUMNS
        y = drawn.height + LEGEND_LINE * (index // LEGEND_COLUMNS + 1)
        yield rect(x, y - 10, 12, 3 if name == "path" else 12, name) + text(x + 20, y, words)
