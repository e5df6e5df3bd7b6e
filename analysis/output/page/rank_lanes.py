"""Chooses a step and the ranks to draw, and computes their lanes: when each was charged to what.

One rank gets a lane for each kind of work, one for what the host did, and one for what its time was charged to.
Several ranks get a lane each, on the common clock; there, waiting for another rank is apart from other exposed
communication.

Pure: an analysis in, unions of intervals out.  Left out: how lanes are drawn (`rank_timeline`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pacecar.analysis.align.clock_fit import RankClockCorrection
from pacecar.analysis.all_ranks.job_times import JobTimes, PathPiece
from pacecar.analysis.document.report import CollectiveInstance, TraceJob, TraceReport
from pacecar.analysis.one_rank.kernel_families import kernel_name
from pacecar.analysis.reading.parallel_reading import Analysis
from pacecar.analysis.trace.columns import WORKS, DeviceRows, HostKind, HostRows, Trace
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration
from pacecar.ledger.attribution import LossCause, Work
from pacecar.ledger.intervals import EMPTY, Intervals, clip, subtract, union
from pacecar.records import LEDGER_HEADINGS, Ledger

from ..timeline import TraceTimeline, columns_of, timeline, timeline_between
from ..words import shown_ranks

__all__ = ["LABEL_SHARE_MIN", "OVERLAPPED", "WAITING", "Lane", "RankLanes", "rank_lanes"]

WAITING = "waiting"
"""The style's class of exposed communication in which a rank only waited for another."""

OVERLAPPED = "overlapped"
"""The style's class of communication under compute."""

LABEL_SHARE_MIN = 0.05
"""A row shorter than this share of the window has no room for a name."""

ONE_OFF_RATIO = 0.5
"""Draw the longest step if it exceeds the median by this share of all that fixing the late rank would save."""

_WORK_CLASSES = {
    Work.COMPUTE: "compute",
    Work.COMMUNICATION: "exposed_communication",
    Work.COPY: "exposed_copy",
    Work.OTHER: "unknown",
}
_WORK_WORDS = {Work.OTHER: "unknown work"}
_CAUSE_WORDS = {LossCause.OPTIMIZER: "optimizer"}


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane: its layers from the bottom up (the style's class and a union on the common clock), and names inside.

    `is_charged` marks a lane of headings, which fill it wherever the trace reaches.
    """

    name: str
    rank: int | None
    layers: list[tuple[str, Intervals]]
    labels: list[tuple[int, int, str]] = field(default_factory=list)
    is_charged: bool = True


@dataclass(frozen=True, slots=True)
class RankLanes:
    """What is drawn, on the common clock; `ledger` is that of the window where one rank is drawn, else None."""

    caption: str
    window: tuple[int, int]
    lanes: list[Lane]
    ranks: int
    ranks_left_out: int
    path: list[PathPiece]
    ledger: Ledger | None
    times: JobTimes | None


def rank_lanes(analysis: Analysis, step: int | None = None, *, ranks_max: int) -> RankLanes | None:
    """Return the lanes of a step: the one named, or one that shows what the verdict says.

    None if there is nothing to draw.  Raises LookupError if the step does not exist, or a trace cannot be read again.
    """
    document, times = analysis.document, analysis.times
    clocks = times.clocks if times is not None else {}
    chosen = [
        (report, table)
        for report, table in zip(document.traces, analysis.tables, strict=True)
        if report.span_ns > 0 and (not clocks or report.rank in clocks)
    ]
    if clocks:  # the comparison used the first trace of each rank
        chosen = list({report.rank: (report, table) for report, table in chosen[::-1]}.values())
    if not chosen:
        return None
    name = f"{clean(Path(chosen[0][0].file).name)}: " if not clocks and len(chosen) > 1 else ""
    chosen = chosen if clocks else chosen[:1]  # without clocks, several traces have no common axis
    reports = [report for report, _ in chosen]
    window, number = _window(reports, clocks, document.job, step)
    if window[1] <= window[0]:
        return None
    path = [piece for piece in times.path() if _overlaps(piece, window)] if times is not None else []
    lasts = duration(window[1] - window[0])
    if len(chosen) == 1:
        report, table = chosen[0]
        part = next((one for one in report.steps if one.step == number), None)
        start, ledger = (part.start_ns, part.ledger) if part is not None else (report.start_ns or 0, report.ledger)
        lanes = _lanes_of_one(report, columns_of(report, table), _clock(clocks, report.rank), (start, ledger))
        rank = f" of rank {report.rank}" if report.rank is not None else ""
        caption = f"{lasts} from first to last work" if number is None else f"Step {number}{rank}, {lasts}"
        return RankLanes(name + caption, window, lanes, 1, 0, path, ledger, times)
    on_path: dict[int, float] = {}
    for piece in path:
        seen_ns = min(piece.end_ns, window[1]) - max(piece.start_ns, window[0])
        on_path[piece.rank] = on_path.get(piece.rank, 0) + seen_ns
    shown = shown_ranks(reports, document.job, on_path, ranks_max)
    waits = _waits(document.job.instances if document.job is not None else [], {report.rank for report in shown})
    tables = {id(report): table for report, table in chosen}
    lanes = [_lane(report, tables[id(report)], _clock(clocks, report.rank), waits, window) for report in shown]
    caption = f"{lasts} from first to last work" if number is None else f"Step {number}, {lasts}"
    return RankLanes(caption, window, lanes, len(shown), len(chosen) - len(shown), path, None, times)


def _clock(clocks: dict[int, RankClockCorrection], rank: int | None) -> RankClockCorrection:
    return clocks.get(rank, RankClockCorrection(0.0)) if rank is not None else RankClockCorrection(0.0)


def _overlaps(piece: PathPiece, window: tuple[int, int]) -> bool:
    return piece.start_ns < window[1] and piece.end_ns > window[0]


def _window(
    reports: Sequence[TraceReport], clocks: dict[int, RankClockCorrection], job: TraceJob | None, step: int | None
) -> tuple[tuple[int, int], int | None]:
    """Return what to draw, on the common clock, and the step's number; None for the whole window."""
    steps: dict[int, dict[int, tuple[int, int]]] = {}
    for place, report in enumerate(reports):
        clock = _clock(clocks, report.rank)
        for one in report.steps:
            steps.setdefault(one.step, {}).setdefault(place, _common(clock, one.start_ns, one.ledger.wall_ns))
    spans = {
        number: (min(start for start, _ in ends.values()), max(end for _, end in ends.values()))
        for number, ends in sorted(steps.items())
        if len(ends) == len(reports)
    }
    if step is not None and step not in spans:
        who = f"{reports[0].file} has" if len(reports) == 1 else "all ranks together have"
        known = f"steps {min(spans)} to {max(spans)}" if spans else "no steps"
        raise LookupError(f"--step {step}: {who} {known}")
    if not spans:
        edges = [_common(_clock(clocks, report.rank), report.start_ns or 0, report.span_ns) for report in reports]
        return (min(start for start, _ in edges), max(end for _, end in edges)), None
    number = _most_telling(spans, job) if step is None else step
    return spans[number], number


def _common(clock: RankClockCorrection, start_ns: int, lasts_ns: int) -> tuple[int, int]:
    start, end = clock.common(np.array([start_ns, start_ns + lasts_ns])).tolist()
    return start, end


def _most_telling(spans: dict[int, tuple[int, int]], job: TraceJob | None) -> int:
    """Return the median of the steps in which a rank held the job up, or the longest if one step explains the verdict.

    The first and the last step are skipped if there are others: what ran before and after them is not recorded.
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


def _waits(instances: Sequence[CollectiveInstance], ranks: set[int | None]) -> dict[int, Intervals]:
    """Return when each rank only waited, on the common clock."""
    waits: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks if rank is not None}
    wires: dict[int, list[tuple[int, int]]] = {rank: [] for rank in waits}
    for one in instances:
        for each in one.arrivals:
            if each.rank in waits:
                arrived = each.start_ns + each.wait_ns
                waits[each.rank].append((each.start_ns, arrived))
                wires[each.rank].append((arrived, arrived + each.wire_ns))
    return {rank: subtract(_merged(waits[rank]), _merged(wires[rank])) for rank in waits}


def _merged(pairs: Sequence[tuple[int, int]]) -> Intervals:
    return union(np.array(pairs, dtype=np.int64).reshape(-1, 2)) if pairs else EMPTY


def _lane(
    report: TraceReport,
    table: Trace | None,
    clock: RankClockCorrection,
    waits: dict[int, Intervals],
    window: tuple[int, int],
) -> Lane:
    """Return the lane of one of several ranks."""
    trace = columns_of(report, table)
    # A clock's correction hardly changes within its own size, so this is its inverse to less than a nanosecond.
    low, high = (2 * np.array(window) - clock.common(np.array(window))).tolist()
    low = low if trace.start_ns is None else max(low, trace.start_ns)
    high = high if trace.end_ns is None else min(high, trace.end_ns)
    found = timeline_between(trace, report, (low, max(low, high)))
    layers = []
    for heading, rows in _charged(found, clock):
        if heading == "exposed_communication" and report.rank in waits:
            wire = subtract(rows, waits[report.rank])
            layers += [(WAITING, subtract(rows, wire)), (heading, wire)]
        else:
            layers.append((heading, rows))
    return Lane(f"rank {report.rank}" if report.rank is not None else "", report.rank, layers)


def _charged(found: TraceTimeline, clock: RankClockCorrection) -> Iterator[tuple[str, Intervals]]:
    for heading in LEDGER_HEADINGS:
        yield heading, union(clock.common(found.stretches(heading)))


def _lanes_of_one(
    report: TraceReport, trace: Trace, clock: RankClockCorrection, part: tuple[int, Ledger]
) -> list[Lane]:
    """Return the lanes of a rank that is drawn alone: its work, its host and what its time was charged to."""
    found = timeline(trace, report, part)
    window = found.window
    spans = {kind: union(clip(rows, *window)) for kind, rows in found.work.items()}
    compute = spans.get(Work.COMPUTE, EMPTY)
    lanes = []
    for kind in Work:
        rows = spans.get(kind, EMPTY)
        if not len(rows) and kind is not Work.COMPUTE:
            continue
        layers = [(_WORK_CLASSES[kind], rows)]
        if kind is Work.COMMUNICATION:
            exposed = subtract(rows, compute)
            layers = [(_WORK_CLASSES[kind], exposed), (OVERLAPPED, subtract(rows, exposed))]
        lanes.append((_WORK_WORDS.get(kind, kind.value), layers, _row_labels(trace, kind, window)))
    causes = {cause: union(clip(rows, *window)) for cause, rows in found.causes.items()}
    causes = {cause: rows for cause, rows in causes.items() if len(rows)}
    if causes:
        labels = [
            (start, end, _CAUSE_WORDS.get(cause, HEADING_WORDS[cause.value]))
            for cause, rows in causes.items()
            for start, end in rows.tolist()
        ]
        lanes.append(("host", [(cause.value, rows) for cause, rows in causes.items()], labels))
    drawn = [
        Lane(
            name,
            report.rank,
            [(style, clock.common(rows)) for style, rows in layers],
            [(*clock.common(np.array([start, end])).tolist(), text) for start, end, text in labels],
            is_charged=False,
        )
        for name, layers, labels in lanes
    ]
    return [*drawn, Lane("charged to", report.rank, list(_charged(found, clock)))]


def _row_labels(trace: Trace, kind: Work, window: tuple[int, int]) -> list[tuple[int, int, str]]:
    """Return the rows of a kind that are long enough to carry a name, clipped to the window."""
    rows: DeviceRows | HostRows
    if trace.has_device:
        rows, mine = trace.device, trace.device.work == WORKS.index(kind)
    elif kind is Work.COMMUNICATION:
        rows, mine = trace.host_rows, trace.host_rows.kind == HostKind.COLLECTIVE_WORK
    else:
        return []  # operators nest, and the outermost one's name says little
    start, end = np.maximum(rows.start_ns, window[0]), np.minimum(rows.end_ns, window[1])
    chosen = np.flatnonzero(mine & (end - start >= (window[1] - window[0]) * LABEL_SHARE_MIN)).tolist()
    return [(int(start[row]), int(end[row]), _row_name(trace, rows, row)) for row in chosen]


def _row_name(trace: Trace, rows: DeviceRows | HostRows, row: int) -> str:
    collective = int(rows.collective[row])
    if collective >= 0:
        return clean(trace.collectives[collective].operation)
    return kernel_name(trace.names[int(rows.name[row])])
