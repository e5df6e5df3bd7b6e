"""Writes the ledgers of all ranks as a trace in Chrome's format, to be viewed beside the original or in its place.

Perfetto, chrome://tracing and TensorBoard read the format.  Each rank is a process with a track for each heading, whose
slices add up to the ledger exactly, a track for steps, and counters at each step: milliseconds by heading, and the
overlap ratio.  Several ranks also get their kernels and host rows (`rank_rows`) and the critical path (`path_slices`),
because the originals have different clocks and cannot be opened together.

One trace keeps its own times, so that it can be opened together with the original.  Several are on the common clock,
with offset and drift; drift stretches a rank's slices by some millionths.

The file is written row by row, with one rank's timeline in memory, under another name until it is complete.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from pacecar.analysis.align.clock_fit import RankClockCorrection
from pacecar.analysis.document.report import StepReport, TraceReport
from pacecar.analysis.reading.parallel_reading import Analysis
from pacecar.analysis.trace.columns import Trace
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.records import LEDGER_HEADINGS
from pacecar.safe_files import output

from ..timeline import TraceTimeline, columns_of, timeline
from .path_slices import path_events
from .rank_rows import ROWS_MAX, row_events
from .trace_events import FIRST_PID, ROWS_CHUNK, counter, json_bytes, named, slice_event

__all__ = ["write_perfetto"]

STEPS_TID = 0


def write_perfetto(analysis: Analysis, path: Path) -> None:
    """Write the ledgers of all traces to `path`, gzipped if it ends so.

    Raises OSError; LookupError if a trace cannot be read again.
    """
    base, clocks = _axis(analysis)
    with _whole_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceName":"pacecar ledger"')
        if base is not None:
            file.write(b',"baseTimeNanoseconds":%d' % base)
        file.write(b',"traceEvents":[\n')
        for number, chunk in enumerate(_all_chunks(analysis, clocks)):
            file.write((b",\n" if number else b"") + chunk)
        file.write(b"\n]}\n")


def _all_chunks(analysis: Analysis, clocks: Sequence[RankClockCorrection]) -> Iterator[bytes]:
    """Yield the events of all ranks and of the path in chunks of a JSON list."""
    traces = analysis.document.traces
    pids: dict[int, int] = {}
    for index, (report, kept) in enumerate(zip(traces, analysis.tables, strict=True)):
        table, pid = columns_of(report, kept), FIRST_PID + index
        yield from _chunks(report, table, pid, clocks[index])
        if len(traces) > 1:
            yield from row_events(table, clocks[index], pid, ROWS_MAX // len(traces))
        if report.rank is not None:
            pids.setdefault(report.rank, pid)
    if analysis.times is not None:
        yield from path_events(analysis.times.path(), pids)


def _axis(analysis: Analysis) -> tuple[int | None, list[RankClockCorrection]]:
    """Return the zero of the common axis, in nanoseconds since the epoch, and each trace's correction to that axis.

    The job's clocks lead to the axis of the first of them; a trace without a clock is shifted by its own base.
    """
    clocks = analysis.times.clocks if analysis.times is not None else {}
    bases = [table.wall_offset_ns if table is not None else None for table in analysis.tables]
    ranks = [report.rank for report in analysis.document.traces]
    first = next((ranks.index(rank) for rank in clocks if rank in ranks), 0)
    base = bases[first] if bases else None
    found = []
    for rank, own in zip(ranks, bases, strict=True):
        by_base = RankClockCorrection(float(own - base) if own is not None and base is not None else 0.0)
        found.append(clocks.get(rank, by_base) if rank is not None else by_base)
    return base, found


def _chunks(report: TraceReport, trace: Trace, pid: int, clock: RankClockCorrection) -> Iterator[bytes]:
    """Yield the ledger of one rank in chunks of a JSON list."""
    found = timeline(trace, report)
    yield b",\n".join(_names(report, found, pid))
    for heading in LEDGER_HEADINGS:
        rows = clock.common(found.stretches(heading)).tolist()
        word, tid = json_bytes(HEADING_WORDS[heading]), _tid(heading)
        for at in range(0, len(rows), ROWS_CHUNK):
            yield b",\n".join(slice_event(word, pid, tid, *row) for row in rows[at : at + ROWS_CHUNK])
    if report.steps:
        yield b",\n".join(_steps(report.steps, pid, clock))
    yield b",\n".join(_counters(report, found, pid, clock))


def _names(report: TraceReport, found: TraceTimeline, pid: int) -> Iterator[bytes]:
    who = f"rank {report.rank}" if report.rank is not None else Path(report.file).name
    yield named("process_name", pid, STEPS_TID, name=f"pacecar ledger, {who}")
    # Shown above the processes of the original trace, which torch sorts from 0 upwards.
    yield named("process_sort_index", pid, STEPS_TID, sort_index=-1)
    yield named("thread_name", pid, STEPS_TID, name="steps")
    for heading in LEDGER_HEADINGS:
        if len(found.stretches(heading)):
            yield named("thread_name", pid, _tid(heading), name=HEADING_WORDS[heading])
            yield named("thread_sort_index", pid, _tid(heading), sort_index=_tid(heading))


def _tid(heading: str) -> int:
    return 1 + LEDGER_HEADINGS.index(heading)


def _steps(steps: Sequence[StepReport], pid: int, clock: RankClockCorrection) -> Iterator[bytes]:
    for step in steps:
        start, end = clock.common(np.array([step.start_ns, step.start_ns + step.ledger.wall_ns])).tolist()
        yield slice_event(json_bytes(f"step {step.step}"), pid, STEPS_TID, start, end)


def _counters(report: TraceReport, found: TraceTimeline, pid: int, clock: RankClockCorrection) -> Iterator[bytes]:
    """Yield counters at the start of each step, or of the window if there are no steps, and zeros at the end."""
    parts = [(step.start_ns, step.ledger) for step in report.steps] or [(found.window[0], report.ledger)]
    edges = [start for start, _ in parts] + [parts[-1][0] + parts[-1][1].wall_ns]
    *starts, end = clock.common(np.array(edges, dtype=np.int64)).tolist()
    shown = [heading for heading in LEDGER_HEADINGS if report.ledger.parts().get(heading)]
    for start, (_, ledger) in zip(starts, parts, strict=True):
        values = {HEADING_WORDS[heading]: ledger.parts().get(heading, 0) / 1e6 for heading in shown}
        yield counter("ledger (ms)", pid, start, values)
        if ledger.overlap_ratio is not None:
            yield counter("overlap ratio", pid, start, {"ratio": ledger.overlap_ratio})
    yield counter("ledger (ms)", pid, end, dict.fromkeys((HEADING_WORDS[heading] for heading in shown), 0.0))


@contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that becomes `path` when complete, as `output` does, compressed if its name says so.

    A pipe or /dev/stdout is written uncompressed.
    """
    with output(path) as raw:
        if path.suffix == ".gz" and raw.seekable():
            # Without time and name in the header, the same analysis gives the same bytes.
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as packed:
                yield cast("IO[bytes]", packed)
        else:
            yield raw
