"""Draws the lanes of 1 to 64 ranks on one time axis, with the critical path over them.

A bar for each kernel would mislead: most of twenty thousand kernels are thinner than a pixel but drawn one pixel wide,
so a device that idles half the time would look busy.  So a lane is cut into columns, each filled by the share of its
time: *area is time*, at any density.  The path is a line: level while it is on a rank, a step where work waited for
another rank.

The drawing is bounded however many ranks and events there are: `LANES_MAX` ranks, `CELLS_MAX` columns of all lanes,
`POINTS_MAX` corners of the path, `LABELS_MAX` names in a lane.

Pure: an analysis in, SVG out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.all_ranks.job_times import PathPiece
from pacecar.analysis.reading.parallel_reading import Analysis
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.page.svg import RIGHT, WIDTH, drawing, line, text, ticks
from pacecar.formatting.quantities import percent, plural, unit_for
from pacecar.ledger.intervals import Intervals
from pacecar.records import LEDGER_HEADINGS, Ledger

from .rank_lanes import OVERLAPPED, WAITING, Lane, RankLanes, rank_lanes

__all__ = ["CHARGED_HEIGHT", "LEFT", "RankTimeline", "coverage", "draw_ranks", "shortened"]

LANES_MAX = 64
"""The most ranks with a lane (`words.shown_ranks`)."""

CELLS_MAX = 20_000
"""Columns of all lanes together: eight ranks have one for each unit, 64 ranks one for each three."""

POINTS_MAX = 4_000
"""The most corners of the path; of more stays on a rank than that, the shortest are left out of the line."""

LABELS_MAX = 40
"""The most names in one lane: more cannot be read."""

CHARACTER_WIDTH, STUB_CHARACTERS_MIN = 6.0, 10
"""Width of a character of a name in the widest of the usual fonts.  A name cut shorter than the stub is left out."""

LEFT = {True: 128, False: 64}
"""Units left of the time axis: room for "communication" where one rank is drawn, else for a rank's number."""

LANE_MIN, LANE_MAX, LANES_HEIGHT, CHARGED_HEIGHT = 13, 30, 520, 46
"""Heights of a lane, of the lanes of all ranks, and of what the time of a single rank was charged to."""

TOP, AXIS_HEIGHT = 26, 24

UNRECORDED = "lane"
"""The style's class of what lies under all headings: it shows where a trace does not reach."""

UNRECORDED_BELOW = 0.99
"""A column less charged than this lies partly outside the trace."""


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """A drawing: its body and height, a caption, a sentence for people who cannot see it, its legend and notes."""

    body: list[str]
    height: int
    caption: str
    description: str
    legend: list[tuple[str, str]]
    note: str
    ledger: Ledger | None
    """The ledger of the one rank that is drawn; None for several."""

    @property
    def svg(self) -> str:
        """The drawing for a page, which has the style and shows legend and note as text."""
        return drawing(self.height, f"Timeline of ranks: {self.caption}", self.description, self.body)


def draw_ranks(analysis: Analysis, step: int | None = None) -> RankTimeline | None:
    """Return the timeline of a step: the one named, or one that shows what the verdict says.

    None if there is nothing to draw.  Raises LookupError if the step does not exist, or a trace cannot be read again.
    """
    found = rank_lanes(analysis, step, ranks_max=LANES_MAX)
    return _drawn(found) if found is not None else None


def _drawn(found: RankLanes) -> RankTimeline:
    is_one = found.ledger is not None
    axis = _Axis(found.window, LEFT[is_one], max(1, min(WIDTH - LEFT[is_one] - RIGHT, CELLS_MAX // len(found.lanes))))
    every = min(LANE_MAX, max(LANE_MIN, LANES_HEIGHT // len(found.lanes)))
    heights = [CHARGED_HEIGHT if is_one and lane.is_charged else every - 2 for lane in found.lanes]
    gap = 8 if is_one else 2
    tops = [TOP + sum(heights[:row]) + gap * row for row in range(len(heights))]
    bottom = tops[-1] + heights[-1] + 2
    shares = _path_shares(found.path, found.window)
    used: set[str] = set()
    body = [*_grid(axis, bottom)]
    for lane, top, height in zip(found.lanes, tops, heights, strict=True):
        body += _lane(axis, lane, top, height, used, is_strong=not is_one and lane.rank in shares)
    if not is_one:
        middles = {lane.rank: top + height / 2 for lane, top, height in zip(found.lanes, tops, heights, strict=True)}
        body += _path(axis, found.path, middles)
    description = f"{found.caption}: {plural(found.ranks, 'rank')}, with what each one's time was charged to. "
    description += f"The critical path is {_share_words(shares)}." if shares else "The critical path is not known."
    return RankTimeline(
        body,
        bottom + AXIS_HEIGHT,
        found.caption,
        description,
        _legend(found, used, has_path=bool(shares) and not is_one),
        _note(found, has_path=bool(shares)),
        found.ledger,
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """The time axis: its window, where it begins in the drawing, and how many columns it has."""

    window: tuple[int, int]
    left: int
    columns: int

    @property
    def width(self) -> int:
        return WIDTH - self.left - RIGHT

    def x(self, time_ns: float) -> float:
        return self.left + (time_ns - self.window[0]) / (self.window[1] - self.window[0]) * self.width


def _grid(axis: _Axis, bottom: float) -> Iterator[str]:
    """Yield a grid line and a time at round numbers."""
    wall = axis.window[1] - axis.window[0]
    unit = unit_for([wall])
    for tick in ticks(0, wall / unit.ns, 9):
        x = axis.x(axis.window[0] + tick * unit.ns)
        yield line(x, TOP - 6, x, bottom + 4, "grid")
        if x < WIDTH - RIGHT - 12:
            yield text(x, bottom + 18, f"{tick:g}" + (f" {unit.name}" if tick == 0 else ""), "axis middle")


def _lane(axis: _Axis, lane: Lane, top: float, height: float, used: set[str], *, is_strong: bool) -> Iterator[str]:
    """Yield the lane; adds to `used` the style's classes that show."""
    yield text(axis.left - 8, top + height / 2 + 5, lane.name, "axis end" + (" strong" if is_strong else ""))
    yield f'<rect class="lane" x="{axis.left}" y="{top}" width="{axis.width}" height="{height}"/>'
    below = np.zeros(axis.columns)
    for name, rows in lane.layers:
        # Causes of the host may overlap; the later one then gets what is left of the column.
        filled = np.minimum(coverage(rows, axis.window, axis.columns), 1 - below)
        if data := area_path(below, filled, top, height, axis.left, axis.width / axis.columns):
            used.add(name)
            yield f'<path class="{name}" d="{data}"/>'
        below = below + filled
    if lane.is_charged and bool((below < UNRECORDED_BELOW).any()):
        used.add(UNRECORDED)
    yield from _labels(axis, lane, top + height / 2 + 4)


def _labels(axis: _Axis, lane: Lane, y: float) -> Iterator[str]:
    """Yield the names that fit, the longest bars first, none on top of another."""
    taken: list[tuple[float, float]] = []
    for start, end, name in sorted(lane.labels, key=lambda label: label[0] - label[1])[:LABELS_MAX]:
        left, right = axis.x(start), axis.x(end)
        room = int((right - left - 8) / CHARACTER_WIDTH)
        if room < min(len(name), STUB_CHARACTERS_MIN) or any(left < b and a < right for a, b in taken):
            continue
        taken.append((left, right))
        yield text(left + 4, y, shortened(name, room), "name")


def shortened(words: str, room: int) -> str:
    """Return `words`, cut to `room` characters."""
    return words if len(words) <= room else words[: max(room - 1, 1)] + "\N{HORIZONTAL ELLIPSIS}"


def coverage(rows: Intervals, window: tuple[int, int], columns: int) -> NDArray[np.float64]:
    """Return how much of each column a union covers, 0..1."""
    # Relative to the window's start: floats of nanoseconds since the epoch would be too coarse.
    edges = np.linspace(0, window[1] - window[0], columns + 1)
    if len(rows) == 0:
        return np.zeros(columns)
    # The time covered up to an instant is piecewise linear, with its corners at the edges of the rows.
    lengths = np.concatenate(([0], np.cumsum(rows[:, 1] - rows[:, 0])))
    corners = np.stack((lengths[:-1], lengths[1:]), axis=1).ravel()
    covered = np.interp(edges, (rows - window[0]).ravel(), corners, left=0, right=float(lengths[-1]))
    filled: NDArray[np.float64] = np.clip(np.diff(covered) / np.diff(edges), 0, 1)
    return filled


def area_path(
    below: NDArray[np.float64], filled: NDArray[np.float64], top: float, height: float, left: float, wide: float
) -> str:
    """Return the path data that fills each column, `wide` units each, from `below` on by `filled`, 0..1 of the lane."""
    low = np.round(top + height * (1 - below), 2)
    high = np.round(top + height * (1 - below - filled), 2)
    changes = np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1
    pieces = []
    for at, end in zip([0, *changes.tolist()], [*changes.tolist(), len(filled)], strict=True):
        if low[at] > high[at]:
            x, to = round(left + at * wide, 1), round(left + end * wide, 1)
            pieces.append(f"M{x:g} {low[at]:g}H{to:g}V{high[at]:g}H{x:g}Z")
    return "".join(pieces)


def _legend(found: RankLanes, used: set[str], *, has_path: bool) -> list[tuple[str, str]]:
    words = {
        **HEADING_WORDS,
        WAITING: "waiting for another rank",
        OVERLAPPED: "communication under compute",
        UNRECORDED: "not recorded",
    }
    if WAITING in used:
        words["exposed_communication"] = "other exposed communication"
    if found.ledger is not None and (wall := found.ledger.wall_ns):
        unit = unit_for([wall])
        for heading, part_ns in found.ledger.parts().items():
            words[heading] += f": {unit.text(part_ns)}, {percent(part_ns / wall)}"
        words[OVERLAPPED] += f": {unit.text(found.ledger.overlapped_communication_ns)}"
    order = (*LEDGER_HEADINGS[:1], WAITING, *LEDGER_HEADINGS[1:], OVERLAPPED, UNRECORDED)
    return [(name, words[name]) for name in order if name in used] + ([("path", "critical path")] if has_path else [])


def _note(found: RankLanes, *, has_path: bool) -> str:
    notes = ["Area is time: a lane is cut into columns, each filled by the share of its time."]
    if found.ranks_left_out:
        notes.append(f"{plural(found.ranks_left_out, 'rank')} with little part in it are left out.")
    if found.times is None:
        notes.append("One trace has no critical path between ranks.")
    elif not has_path:
        notes.append("No critical path is drawn: none is known for this stretch.")
    else:
        notes.append("The path goes to another rank where work waited for that rank; a long stay is not blame.")
    return " ".join(notes)


def _path_shares(path: Sequence[PathPiece], window: tuple[int, int]) -> dict[int, float]:
    """Return the share of the window that the path spends on each rank."""
    sums: dict[int, float] = {}
    for piece in path:
        lasts = min(piece.end_ns, window[1]) - max(piece.start_ns, window[0])
        sums[piece.rank] = sums.get(piece.rank, 0.0) + lasts / (window[1] - window[0])
    return sums


def _share_words(shares: dict[int, float]) -> str:
    most = sorted(shares.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"on rank {rank} for {percent(share)}" for rank, share in most)


def _path(axis: _Axis, path: Sequence[PathPiece], heights: dict[int | None, float]) -> Iterator[str]:
    """Yield the line of the path, with a rim so that it shows on every colour."""
    stays = _stays([piece for piece in path if piece.rank in heights], axis.window)
    # Of too many stays the shortest are left out, and the line goes straight on.
    longest = sorted(range(len(stays)), key=lambda place: stays[place][1] - stays[place][2])[: POINTS_MAX // 2]
    stays = [stays[place] for place in sorted(longest)]
    if not stays:
        return
    pieces = [
        f"{'L' if number else 'M'}{axis.x(start):.1f} {heights[rank]:.1f}H{axis.x(end):.1f}"
        for number, (rank, start, end) in enumerate(stays)
    ]
    data = "".join(pieces)
    yield f'<path class="path rim" d="{data}"/><path class="path" d="{data}"/>'


def _stays(path: Sequence[PathPiece], window: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Return rank, start and end of each stay of the path on one rank, cut to the window."""
    stays: list[tuple[int, int, int]] = []
    for piece in path:
        start, end = max(piece.start_ns, window[0]), min(piece.end_ns, window[1])
        if stays and stays[-1][0] == piece.rank:
            stays[-1] = (piece.rank, stays[-1][1], end)
        else:
            stays.append((piece.rank, start, end))
    return stays
