"""Draws a step of all ranks on one axis, what each instant of each rank was charged to, and the critical path over it.

Each rank is a lane in which area is time (`output.area_lanes`); of exposed communication what was waiting for another
rank is paler than what was on the wire.  The path is a line from rank to rank: level while it is on one, and a step
where another was waited for.

Its size is bounded, however many ranks and events there are: `LANES_MAX` lanes, `CELLS_MAX` columns of all lanes, and
at most `POINTS_MAX` corners of the path.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.page.svg import INNER, LEFT, RIGHT, WIDTH, drawing, line, text, ticks
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration, percent, plural, unit_for
from pacecar.records import LEDGER_HEADINGS

from ...causal.model import RankClockCorrection
from ...ledger.intervals import EMPTY, Intervals, subtract, union
from ...trace.columns import Trace
from ..all_ranks.job_times import JobTimes, PathPiece
from ..output.area_lanes import area_path, coverage
from ..output.timeline import columns_of, timeline_between
from ..reading.parallel_reading import Analysis
from ..report import CollectiveInstance, TraceJob, TraceReport

__all__ = ["LANES_MAX", "RankTimeline", "draw_ranks"]

LANES_MAX = 64
"""The most ranks with a lane: those on the path first, then those that the others waited for longest."""

CELLS_MAX = 20_000
"""Columns of all lanes together: eight ranks have one for each unit, 64 ranks one for each three."""

POINTS_MAX = 4_000
"""The most corners of the path; shorter visits to a rank than allow so many are left out of the line."""

LANE_MIN, LANE_MAX, LANES_HEIGHT = 13, 30, 520
TOP = 26

ONE_OFF_RATIO = 0.5
"""A step that is longer than the median by this share of all that mending would save is the one to look at."""

WAITING = "waiting"
"""The style's class of exposed communication in which a rank did nothing but wait for another."""


UNRECORDED = "lane"
"""The style's class of what lies under all headings: shown where a trace does not reach."""

UNRECORDED_BELOW = 0.99
"""A column of which less is charged to a heading lies partly outside the trace."""


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """The drawing, what of the run it shows, its legend, and what it leaves out."""

    svg: str
    caption: str
    legend: list[tuple[str, str]]
    note: str


@dataclass(frozen=True, slots=True)
class _Lane:
    """A rank's unions on the common clock, by the style's class."""

    name: str
    rank: int | None
    rows: list[tuple[str, Intervals]]


def draw_ranks(analysis: Analysis, step: int | None = None) -> RankTimeline | None:
    """Return the timeline of a step: the one named, or one that shows what the verdict says.

    None where there is nothing to draw.  Raises LookupError where the step is not there, or a trace cannot be read
    again.
    """
    document, times = analysis.document, analysis.times
    clocks = times.clocks if times is not None else {}
    chosen = [
        (report, table)
        for report, table in zip(document.traces, analysis.tables, strict=True)
        if report.span_ns > 0 and (not clocks or report.rank in clocks)
    ]
    if clocks:  # of a rank that came twice the first was compared
        chosen = list({report.rank: (report, table) for report, table in chosen[::-1]}.values())
    if not chosen:
        return None
    name = f"{clean(Path(chosen[0][0].file).name)}: " if not clocks and len(chosen) > 1 else ""
    chosen = chosen if clocks else chosen[:1]  # nothing lays several on one axis
    window, word = _window([report for report, _ in chosen], clocks, document.job, step)
    if window[1] <= window[0]:
        return None
    path = [piece for piece in times.path() if _overlaps(piece, window)] if times is not None else []
    shown = _shown([report for report, _ in chosen], path, document.job)
    waits = _waits(document.job.instances if document.job is not None else [], {report.rank for report in shown})
    tables = {id(report): table for report, table in chosen}
    lanes = [_lane(report, tables[id(report)], _clock(clocks, report.rank), waits, window) for report in shown]
    return _drawn(lanes, path, window, name + word, len(chosen) - len(shown), times)


def _clock(clocks: dict[int, RankClockCorrection], rank: int | None) -> RankClockCorrection:
    return clocks.get(rank, RankClockCorrection(0.0)) if rank is not None else RankClockCorrection(0.0)


def _overlaps(piece: PathPiece, window: tuple[int, int]) -> bool:
    return piece.start_ns < window[1] and piece.end_ns > window[0]


def _window(
    reports: Sequence[TraceReport], clocks: dict[int, RankClockCorrection], job: TraceJob | None, step: int | None
) -> tuple[tuple[int, int], str]:
    """Return what to draw, on the common clock, and its name."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for report in reports:
        clock = _clock(clocks, report.rank)
        for one in report.steps:
            ends = clock.common(np.array([one.start_ns, one.start_ns + one.ledger.wall_ns]))
            steps.setdefault(one.step, []).append((int(ends[0]), int(ends[1])))
    spans = {
        number: (min(start for start, _ in ends), max(end for _, end in ends))
        for number, ends in sorted(steps.items())
        if len(ends) == len(reports)
    }
    if step is not None and step not in spans:
        known = f"steps {min(spans)} to {max(spans)}" if spans else "no steps"
        raise LookupError(f"--step {step}: all ranks together have {known}")
    if not spans:
        edges = [_edges(report, _clock(clocks, report.rank)) for report in reports]
        window = (min(start for start, _ in edges), max(end for _, end in edges))
        return window, f"{duration(window[1] - window[0])} from first to last work"
    number = _telling(spans, job) if step is None else step
    start, end = spans[number]
    return (start, end), f"Step {number}, {duration(end - start)}"


def _edges(report: TraceReport, clock: RankClockCorrection) -> tuple[int, int]:
    start = report.start_ns or 0
    ends = clock.common(np.array([start, start + report.span_ns]))
    return int(ends[0]), int(ends[1])


def _telling(spans: dict[int, tuple[int, int]], job: TraceJob | None) -> int:
    """Return the median step of those in which somebody held the job up; the longest if it was in one only.

    The first and the last are not shown where there are others: what ran before and after them is not recorded.
    """
    named = job.stragglers[0] if job is not None and job.stragglers else None
    since = named.since_step if named is not None else None
    lengths = {number: end - start for number, (start, end) in spans.items() if since is None or number >= since}
    lengths = lengths or {number: end - start for number, (start, end) in spans.items()}
    inner = {number: length for number, length in lengths.items() if min(spans) < number < max(spans)}
    middle = statistics.median_low((inner or lengths).values())
    longest = max(lengths, key=lambda number: lengths[number])
    if named is not None and lengths[longest] - middle >= ONE_OFF_RATIO * named.saved_ns * len(spans) > 0:
        return longest
    return next(number for number, length in (inner or lengths).items() if length == middle)


def _shown(reports: Sequence[TraceReport], path: Sequence[PathPiece], job: TraceJob | None) -> list[TraceReport]:
    on_path: dict[int, int] = {}
    for piece in path:
        on_path[piece.rank] = on_path.get(piece.rank, 0) + piece.end_ns - piece.start_ns
    caused = {share.rank: share.caused_wait_ns for share in job.shares} if job is not None else {}
    named = {rank for one in job.stragglers for rank in one.ranks} if job is not None else set()

    def weight(report: TraceReport) -> tuple[bool, int, int, int]:
        rank = report.rank if report.rank is not None else 0
        return rank not in named, -on_path.get(rank, 0), -caused.get(rank, 0), rank

    return sorted(sorted(reports, key=weight)[:LANES_MAX], key=lambda report: (report.rank or 0, report.file))


def _waits(instances: Sequence[CollectiveInstance], ranks: set[int | None]) -> dict[int, Intervals]:
    """Return when each rank only waited, on the common clock."""
    waits: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks if rank is not None}
    wires: dict[int, list[tuple[int, int]]] = {rank: [] for rank in waits}
    for one in instances:
        for each in one.arrivals:
            if each.rank in waits:
                came = each.start_ns + each.wait_ns
                waits[each.rank].append((each.start_ns, came))
                wires[each.rank].append((came, came + each.wire_ns))
    return {rank: subtract(_merged(waits[rank]), _merged(wires[rank])) for rank in waits}


def _merged(pairs: Sequence[tuple[int, int]]) -> Intervals:
    return union(np.array(pairs, dtype=np.int64).reshape(-1, 2)) if pairs else EMPTY


def _lane(
    report: TraceReport,
    table: Trace | None,
    clock: RankClockCorrection,
    waits: dict[int, Intervals],
    window: tuple[int, int],
) -> _Lane:
    trace = columns_of(report, table)
    # A clock's correction hardly changes within its own size, so this is its inverse to less than a nanosecond.
    own = 2 * np.array(window) - clock.common(np.array(window))
    known = (trace.start_ns, trace.end_ns)
    low = int(own[0]) if known[0] is None else max(int(own[0]), known[0])
    high = int(own[1]) if known[1] is None else min(int(own[1]), known[1])
    found = timeline_between(trace, report, (low, max(low, high)))
    rows = []
    for heading in LEDGER_HEADINGS:
        mine = union(clock.common(found.stretches(heading)))
        if heading == "exposed_communication" and report.rank in waits:
            wire = subtract(mine, waits[report.rank])
            rows.append((WAITING, subtract(mine, wire)))
            mine = wire
        rows.append((heading, mine))
    return _Lane(f"rank {report.rank}" if report.rank is not None else "", report.rank, rows)


def _drawn(
    lanes: Sequence[_Lane],
    path: Sequence[PathPiece],
    window: tuple[int, int],
    word: str,
    left_out: int,
    times: JobTimes | None,
) -> RankTimeline:
    every = min(LANE_MAX, max(LANE_MIN, LANES_HEIGHT // len(lanes)))
    columns = max(1, min(INNER, CELLS_MAX // len(lanes)))
    bottom = TOP + every * len(lanes)
    shares = _path_shares(path, window)
    said = f"{word}: {plural(len(lanes), 'rank')}, each a lane of what its time was charged to. "
    said += "The critical path is not known." if not shares else f"The critical path is {_share_words(shares)}."

    used: dict[str, bool] = {}

    def body() -> Iterator[str]:
        yield from _axis(window, bottom)
        for row, lane in enumerate(lanes):
            y, below = TOP + row * every, np.zeros(columns)
            yield text(LEFT - 8, y + every / 2 + 4, lane.name, "axis end" + (" strong" if lane.rank in shares else ""))
            yield f'<rect class="lane" x="{LEFT}" y="{y}" width="{INNER}" height="{every - 2}"/>'
            for name, rows in lane.rows:
                filled = np.minimum(coverage(rows, window, columns), 1 - below)
                if data := area_path(below, filled, y, every - 2, LEFT, INNER / columns):
                    used[name] = True
                    yield f'<path class="{name}" d="{data}"/>'
                below = below + filled
            used[UNRECORDED] = used.get(UNRECORDED, False) or bool((below < UNRECORDED_BELOW).any())
        middles = {lane.rank: TOP + row * every + (every - 2) / 2 for row, lane in enumerate(lanes)}
        yield from _path(path, middles, window)

    svg = drawing(bottom + 24, f"Timeline of ranks: {word}", said, body())
    words = {**HEADING_WORDS, WAITING: "waiting for another rank", UNRECORDED: "not recorded"}
    order = [name for name in (*LEDGER_HEADINGS[:1], WAITING, *LEDGER_HEADINGS[1:], UNRECORDED) if used.get(name)]
    if WAITING in used:
        words["exposed_communication"] = "other exposed communication"
    legend = [(name, words[name]) for name in order] + ([("path", "critical path")] if shares else [])
    return RankTimeline(svg, word, legend, _note(left_out, bool(shares), times))


def _note(left_out: int, has_path: bool, times: JobTimes | None) -> str:
    notes = ["Area is time: a lane is cut into columns, each filled by the share of its time."]
    if left_out:
        notes.append(f"{plural(left_out, 'rank')} with the least part in it are left out.")
    if times is None:
        notes.append("One trace has no critical path between ranks.")
    elif not has_path:
        notes.append("No critical path is drawn: none is known for this stretch.")
    else:
        notes.append("The path goes to another rank where work waited for that rank; a long stay is no blame.")
    return " ".join(notes)


def _path_shares(path: Sequence[PathPiece], window: tuple[int, int]) -> dict[int | None, float]:
    sums: dict[int | None, float] = {}
    for piece in path:
        lasts = min(piece.end_ns, window[1]) - max(piece.start_ns, window[0])
        sums[piece.rank] = sums.get(piece.rank, 0.0) + lasts / (window[1] - window[0])
    return sums


def _share_words(shares: dict[int | None, float]) -> str:
    most = sorted(shares.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"on rank {rank} for {percent(share)}" for rank, share in most)


def _axis(window: tuple[int, int], bottom: float) -> Iterator[str]:
    wall = window[1] - window[0]
    unit = unit_for([wall])
    for tick in ticks(0, wall / unit.ns, 9):
        x = LEFT + tick * unit.ns / wall * INNER
        yield line(x, TOP - 6, x, bottom + 4, "grid")
        if x < WIDTH - RIGHT - 12:
            yield text(x, bottom + 18, f"{tick:g}" + (f" {unit.name}" if tick == 0 else ""), "axis middle")


def _path(path: Sequence[PathPiece], heights: dict[int | None, float], window: tuple[int, int]) -> Iterator[str]:
    """Yield the line of the path, with a rim so that it shows on every colour."""
    wall = window[1] - window[0]
    stays = _stays([piece for piece in path if piece.rank in heights], window)
    # Of too many stays the shortest are left out, and the line goes straight on.
    longest = sorted(range(len(stays)), key=lambda place: stays[place][1] - stays[place][2])[: POINTS_MAX // 2]
    stays = [stays[place] for place in sorted(longest)]
    if not stays:
        return
    pieces = []
    for number, (rank, start, end) in enumerate(stays):
        x, to = (LEFT + (time - window[0]) / wall * INNER for time in (start, end))
        pieces.append(f"{'L' if number else 'M'}{x:.1f} {heights[rank]:.1f}H{to:.1f}")
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
