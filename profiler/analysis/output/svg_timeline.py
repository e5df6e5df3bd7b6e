"""Draws one step of a trace as an SVG file: a lane for each kind of work, and the ledger below.

Drawing each kernel as a rectangle is the obvious way and misleads: of twenty thousand kernels on nine hundred pixels
most would be thinner than a pixel but drawn one pixel wide, and a device that idles half the time would look busy.
Here every lane is cut into columns one pixel wide, and each column is filled as high as the work in it lasted, so that
*area is time* at any density: full height is a full column.  The lane "charged to" stacks the headings in the same way,
and its areas are the shares of the legend.

    compute         kernels, those of all streams together
    communication   pale where compute hides it
    copy            memory copies
    host            why the host gave the device nothing to do, where it said so
    charged to      the ledger

The SVG is plain text, written without a library; it follows the reader's light or dark scheme.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from pacecar.formatting.ledger_headings import HEADING_COLOURS, HEADING_WORDS
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import percent, unit_for
from pacecar.records import LEDGER_HEADINGS, Ledger
from pacecar.safe_files import output

from ...ledger.attribution import LossCause, Work
from ...ledger.intervals import EMPTY, Intervals, clip, subtract, union
from ...trace.columns import WORKS, DeviceRows, HostKind, HostRows, Trace
from ..one_rank.kernel_families import kernel_name
from ..reading.parallel_reading import Analysis
from ..report import TraceReport
from .area_lanes import area_path, coverage
from .timeline import TraceTimeline, timeline

__all__ = ["draw", "write_picture"]

WIDTH, LEFT, RIGHT = 900, 128, 20
COLUMNS = WIDTH - LEFT - RIGHT
"""Pixels of the time axis, each a column."""

LANE, LANE_GAP, CHARGED, TOP = 30, 8, 46, 62
LABEL_PIXELS_MIN = 40
CHARACTER_PIXELS = 6.0
"""Width of a character of the names in bars, at 10 pixels in the widest of the usual fonts, so that none overflows."""

TITLE_CHARACTERS_MAX = 118
STUB_CHARACTERS_MIN = 10
"""A name that must be cut shorter than this is left out."""

LABELS_MAX = 40
"""The most names in one lane: more cannot be read."""

_COLOURS = {
    Work.COMPUTE: HEADING_COLOURS["compute"],
    Work.COMMUNICATION: HEADING_COLOURS["exposed_communication"],
    Work.COPY: HEADING_COLOURS["exposed_copy"],
    Work.OTHER: HEADING_COLOURS["unknown"],
}
HIDDEN_COLOUR = "#EAB08A"
"""Communication under compute: a pale variant as an opaque colour, so that names on it can be read."""

_LANE_WORDS = {Work.OTHER: "unknown work"}

_STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328 }
  .page { fill: #ffffff } .lane { fill: #f0f2f4 } .grid { stroke: #d1d9e0; stroke-width: 1 }
  .title { font-size: 15px; font-weight: 600 } .dim { fill: #59636e } .small { font-size: 11px }
  .name { font-size: 10px; fill: #111111 } .number { text-anchor: end } .middle { text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #0d1117 } .lane { fill: #1c2128 } .grid { stroke: #3d444d }
    .dim { fill: #9198a1 } .name { fill: #0a0a0a }
  }
"""


def write_picture(analysis: Analysis, path: Path, step: int | None = None) -> None:
    """Draw one step of the one trace that was analysed.  Raises OSError; LookupError when there is nothing to draw."""
    if len(analysis.document.traces) != 1 or analysis.tables[0] is None:
        raise LookupError(f"--picture draws one trace, and these are {len(analysis.document.traces)}")
    report, trace = analysis.document.traces[0], analysis.tables[0]
    with output(path) as stream:
        stream.write(draw(trace, report, step).encode())


def draw(trace: Trace, report: TraceReport, step: int | None = None) -> str:
    """Return the SVG of a step, the median one if none is named, or of the window where there are no steps."""
    part, word = _part(report, step)
    if (part[1] if part is not None else report.ledger).wall_ns == 0:
        raise LookupError(f"{report.file}: there is nothing to draw, the window is empty")
    found = timeline(trace, report, part)
    ledger = part[1] if part is not None else report.ledger
    lanes = list(_lanes(trace, found))
    bottom = TOP + sum(LANE + LANE_GAP for _ in lanes)
    legend = list(_legend(ledger, bottom + CHARGED + 44))
    height = bottom + CHARGED + 44 + 20 * ((len(legend) + 1) // 2) + 26
    who = clean(Path(report.file).name)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            ' role="img">',
            f"<title>{escape(word)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            _text(16, 26, word, "title"),
            _text(16, 45, _shortened(", ".join((who, *_facts(report))), TITLE_CHARACTERS_MAX), "dim small"),
            *_axis(found.window, bottom + CHARGED),
            *(line for index, lane in enumerate(lanes) for line in _lane(lane, TOP + index * (LANE + LANE_GAP))),
            *_charged(found, bottom),
            *legend,
            *_notes(ledger, height - 16),
            "</svg>",
            "",
        )
    )


def _part(report: TraceReport, step: int | None) -> tuple[tuple[int, Ledger] | None, str]:
    """Return what to draw, None for the whole window, and its title."""
    unit = unit_for([report.span_ns])
    if not report.steps:
        if step is not None:
            raise LookupError(f"--step {step}: {report.file} has no steps")
        return None, f"{unit.text(report.span_ns)} from first to last work"
    if step is None:
        middle = statistics.median_low(one.ledger.wall_ns for one in report.steps)
        chosen = next(one for one in report.steps if one.ledger.wall_ns == middle)
    else:
        matches = [one for one in report.steps if one.step == step]
        if not matches:
            numbers = [one.step for one in report.steps]
            raise LookupError(f"--step {step}: {report.file} has steps {min(numbers)} to {max(numbers)}")
        chosen = matches[0]
    rank = f" of rank {report.rank}" if report.rank is not None else ""
    wall = unit_for([chosen.ledger.wall_ns]).text(chosen.ledger.wall_ns)
    return (chosen.start_ns, chosen.ledger), f"Step {chosen.step}{rank}: {wall}"


def _facts(report: TraceReport) -> Iterator[str]:
    if report.world_size is not None:
        yield f"{report.world_size} ranks"
    if report.backend is not None:
        yield clean(report.backend)
    yield from list(dict.fromkeys(clean(gpu) for gpu in report.gpus if gpu))[:1]


@dataclass(frozen=True, slots=True)
class _Lane:
    """One lane: its name, its layers from the bottom up (a union and its colour), and the names inside."""

    word: str
    layers: list[tuple[Intervals, str]]
    labels: list[tuple[int, int, str]]
    window: tuple[int, int]


def _lanes(trace: Trace, found: TraceTimeline) -> Iterator[_Lane]:
    window = found.window
    spans = {kind: union(clip(rows, *window)) for kind, rows in found.work.items()}
    compute = spans.get(Work.COMPUTE, EMPTY)
    for kind in Work:
        rows = spans.get(kind, EMPTY)
        if not len(rows) and kind is not Work.COMPUTE:
            continue
        layers = [(rows, _COLOURS[kind])]
        if kind is Work.COMMUNICATION:
            exposed = subtract(rows, compute)
            layers = [(exposed, _COLOURS[kind]), (subtract(rows, exposed), HIDDEN_COLOUR)]
        yield _Lane(_LANE_WORDS.get(kind, kind.value), layers, _names(trace, kind, window), window)
    causes = {cause: union(clip(rows, *window)) for cause, rows in found.causes.items()}
    causes = {cause: rows for cause, rows in causes.items() if len(rows)}
    if causes:
        layers = [(rows, HEADING_COLOURS[cause.value]) for cause, rows in causes.items()]
        labels = [(start, end, _cause_word(cause)) for cause, rows in causes.items() for start, end in rows.tolist()]
        yield _Lane("host", layers, labels, window)


def _cause_word(cause: LossCause) -> str:
    return {LossCause.OPTIMIZER: "optimizer"}.get(cause, HEADING_WORDS[cause.value])


def _names(trace: Trace, kind: Work, window: tuple[int, int]) -> list[tuple[int, int, str]]:
    """Return the rows of a kind that are long enough to carry a name, clipped to the window."""
    rows: DeviceRows | HostRows
    if trace.has_device:
        rows, mine = trace.device, trace.device.work == WORKS.index(kind)
    elif kind is Work.COMMUNICATION:
        rows, mine = trace.host_rows, trace.host_rows.kind == HostKind.COLLECTIVE_WORK
    else:
        return []  # operators nest: a name would be that of the outermost, which says little
    start, end = np.maximum(rows.start_ns, window[0]), np.minimum(rows.end_ns, window[1])
    long = (window[1] - window[0]) * LABEL_PIXELS_MIN // COLUMNS
    chosen = np.flatnonzero(mine & (end - start >= long)).tolist()
    return [(int(start[row]), int(end[row]), _row_name(trace, rows, row)) for row in chosen]


def _row_name(trace: Trace, rows: DeviceRows | HostRows, row: int) -> str:
    collective = int(rows.collective[row])
    name = kernel_name(trace.names[int(rows.name[row])])
    return clean(trace.collectives[collective].operation) if collective >= 0 else name


def _lane(lane: _Lane, top: int) -> Iterator[str]:
    yield _text(LEFT - 10, top + LANE // 2 + 4, lane.word, "number")
    yield f'<rect class="lane" x="{LEFT}" y="{top}" width="{COLUMNS}" height="{LANE}"/>'
    below = np.zeros(COLUMNS)
    for rows, colour in lane.layers:
        filled = coverage(rows, lane.window, COLUMNS)
        # Causes of the host may overlap each other; then the later one gets what is left of the column.
        filled = np.minimum(filled, 1 - below)
        yield from _area(below, filled, top, LANE, colour)
        below = below + filled
    yield from _labels(lane, top)


def _labels(lane: _Lane, top: int) -> Iterator[str]:
    """Yield the names that fit, the longest bars first, none on top of another."""
    taken: list[tuple[float, float]] = []
    scale = COLUMNS / (lane.window[1] - lane.window[0])
    for start, end, name in sorted(lane.labels, key=lambda label: label[0] - label[1])[:LABELS_MAX]:
        left, right = (LEFT + (time - lane.window[0]) * scale for time in (start, end))
        room = int((right - left - 8) / CHARACTER_PIXELS)
        if room < min(len(name), STUB_CHARACTERS_MIN) or any(left < b and a < right for a, b in taken):
            continue
        taken.append((left, right))
        yield _text(round(left + 4, 1), top + LANE // 2 + 4, _shortened(name, room), "name")


def _area(below: NDArray[np.float64], filled: NDArray[np.float64], top: int, height: int, colour: str) -> Iterator[str]:
    if path := area_path(below, filled, top, height, LEFT):
        yield f'<path fill="{colour}" d="{path}"/>'


def _charged(found: TraceTimeline, top: int) -> Iterator[str]:
    yield _text(LEFT - 10, top + CHARGED // 2 + 4, "charged to", "number")
    below = np.zeros(COLUMNS)
    for heading in LEDGER_HEADINGS:
        filled = coverage(found.stretches(heading), found.window, COLUMNS)
        yield from _area(below, filled, top, CHARGED, HEADING_COLOURS[heading])
        below = below + filled


def _axis(window: tuple[int, int], bottom: int) -> Iterator[str]:
    """Yield a grid line and a time at round numbers."""
    wall = window[1] - window[0]
    unit = unit_for([wall])
    every = _round_number(wall / 8)
    digits = max(0, -int(np.floor(np.log10(every / unit.ns) + 1e-9)))
    for tick in range(int(wall // every) + 1):
        x = round(LEFT + tick * every / wall * COLUMNS, 1)
        yield f'<line class="grid" x1="{x}" y1="{TOP - 4}" x2="{x}" y2="{bottom + 5}"/>'
        if x < WIDTH - RIGHT - 10:
            label = f"{tick * every / unit.ns:.{digits}f}" + (f" {unit.name}" if tick == 0 else "")
            yield _text(x, bottom + 18, label, "dim small middle")


def _round_number(value: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `value`."""
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9)))


def _legend(ledger: Ledger, top: int) -> Iterator[str]:
    """Yield the headings that are in the ledger, in two columns, with their figures."""
    unit = unit_for([ledger.wall_ns])
    shown = [(heading, part) for heading, part in ledger.parts().items() if part]
    for index, (heading, part) in enumerate(shown):
        x, y = LEFT + (index % 2) * 380, top + (index // 2) * 20
        yield (
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{HEADING_COLOURS[heading]}"/>'
            + _text(x + 20, y, HEADING_WORDS[heading])
            + _text(x + 260, y, unit.text(part), "number")
            + _text(x + 330, y, percent(part / ledger.wall_ns), "number dim")
        )


def _notes(ledger: Ledger, y: int) -> Iterator[str]:
    unit = unit_for([ledger.wall_ns])
    text = "Area is time: a column is as high as the work in it lasted."
    if ledger.communication_ns:
        text = (
            f"Communication {unit.text(ledger.communication_ns)}, {percent(ledger.overlap_ratio)} of it under compute"
            f" (pale).  {text}"
        )
    yield _text(LEFT, y, text, "dim small")


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 1)] + "\N{HORIZONTAL ELLIPSIS}"


def _text(x: float, y: float, text: str, classes: str = "") -> str:
    named = f' class="{classes}"' if classes else ""
    return f'<text x="{x:g}" y="{y:g}"{named}>{escape(text)}</text>'
