"""Writes the ledgers of all ranks as a trace in Chrome's format, to be viewed beside the original trace.

Perfetto, chrome://tracing and TensorBoard read the format ("Trace Event Format", Google 2016).  Each rank is a process
of its own, with a track for each heading, whose slices add up to the ledger exactly, one track for its steps, and
counters at each step: milliseconds by heading, and the overlap ratio.

Times are the trace's own, so that both files opened together have one time axis; several ranks are shifted to their
common clock.  Perfetto joins files by itself (`Open multiple trace files`, or `cat`-ing events into one list).

The file is written row by row, one rank's timeline in memory at a time, under another name until it is complete.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.records import LEDGER_HEADINGS
from pacecar.safe_files import output

from ...trace.columns import Trace
from ..reading.parallel_reading import Analysis
from ..report import StepReport, TraceReport
from .timeline import TraceTimeline, timeline

__all__ = ["FIRST_PID", "write_perfetto"]

FIRST_PID = 1_000_000_000
"""Above every process number of Linux (at most 2^22), so that no track is confused with one of the original's."""

ROWS_CHUNK = 4096
"""How many slices are encoded at once."""

STEPS_TID = 0

_encoder = msgspec.json.Encoder()


def write_perfetto(analysis: Analysis, path: Path) -> None:
    """Write the ledgers of all traces to `path`, gzipped if it ends so.  Raises OSError; LookupError: see `_table`."""
    document = analysis.document
    base, shifts = _axis(analysis)
    with _whole_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceName":"pacecar ledger"')
        if base is not None:
            file.write(b',"baseTimeNanoseconds":%d' % base)
        file.write(b',"traceEvents":[\n')
        for index, (report, table) in enumerate(zip(document.traces, analysis.tables, strict=True)):
            for number, chunk in enumerate(_chunks(report, _table(report, table), FIRST_PID + index, shifts[index])):
                file.write((b",\n" if index or number else b"") + chunk)
        file.write(b"\n]}\n")


def _axis(analysis: Analysis) -> tuple[int | None, list[int]]:
    """Return the zero of the common axis, in nanoseconds since the epoch, and the shift of each trace to that axis.

    The job's clocks give shifts to the axis of the first of them; a trace without a clock is shifted by its own base.
    """
    document = analysis.document
    clocks = {clock.rank: clock.offset_ns for clock in document.job.clocks} if document.job is not None else {}
    bases = [table.wall_offset_ns if table is not None else None for table in analysis.tables]
    ranks = [report.rank for report in document.traces]
    first = next((ranks.index(rank) for rank in clocks if rank in ranks), 0)
    base = bases[first] if bases else None
    shifts = []
    for rank, own in zip(ranks, bases, strict=True):
        by_base = own - base if own is not None and base is not None else 0
        shifts.append(clocks.get(rank, by_base) if rank is not None else by_base)
    return base, shifts


def _table(report: TraceReport, table: Trace | None) -> Trace:
    """Return the columns, read again where they were too many to keep."""
    if table is not None:
        return table
    from ...trace.reader import TraceError, read_trace

    try:
        return read_trace(Path(report.file))
    except TraceError as error:
        raise LookupError(f"{report.file}: cannot be read again: {error}") from error


def _chunks(report: TraceReport, trace: Trace, pid: int, shift: int) -> Iterator[bytes]:
    """Yield the events of one rank, each chunk some rows of a JSON list."""
    found = timeline(trace, report)
    yield b",\n".join(_encoder.encode(event) for event in _names(report, found, pid))
    for heading in LEDGER_HEADINGS:
        rows = (found.stretches(heading) + shift).tolist()
        word, tid = HEADING_WORDS[heading], _tid(heading)
        for at in range(0, len(rows), ROWS_CHUNK):
            yield b",\n".join(_slice(word, pid, tid, *row) for row in rows[at : at + ROWS_CHUNK])
    if report.steps:
        yield b",\n".join(_steps(report.steps, pid, shift))
    yield b",\n".join(_counters(report, found, pid, shift))


def _names(report: TraceReport, found: TraceTimeline, pid: int) -> Iterator[dict[str, Any]]:
    who = f"rank {report.rank}" if report.rank is not None else Path(report.file).name

    def meta(kind: str, tid: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}

    yield meta("process_name", STEPS_TID, name=f"pacecar ledger, {who}")
    # Shown above the processes of the original trace, which torch sorts from 0 upwards.
    yield meta("process_sort_index", STEPS_TID, sort_index=-1)
    yield meta("thread_name", STEPS_TID, name="steps")
    for heading in LEDGER_HEADINGS:
        if len(found.stretches(heading)):
            yield meta("thread_name", _tid(heading), name=HEADING_WORDS[heading])
            yield meta("thread_sort_index", _tid(heading), sort_index=_tid(heading))


def _tid(heading: str) -> int:
    return 1 + LEDGER_HEADINGS.index(heading)


def _slice(name: str, pid: int, tid: int, start_ns: int, end_ns: int) -> bytes:
    return b'{"ph":"X","cat":"ledger","name":"%s","pid":%d,"tid":%d,"ts":%s,"dur":%s}' % (
        name.encode(), pid, tid, _microseconds(start_ns), _microseconds(end_ns - start_ns),
    )  # fmt: skip


def _microseconds(time_ns: int) -> bytes:
    """Return whole nanoseconds as the format's microseconds, exactly: three digits and never a float."""
    sign = b"-" if time_ns < 0 else b""
    return b"%s%d.%03d" % (sign, *divmod(abs(time_ns), 1000))


def _steps(steps: Sequence[StepReport], pid: int, shift: int) -> Iterator[bytes]:
    for step in steps:
        start = step.start_ns + shift
        yield _slice(f"step {step.step}", pid, STEPS_TID, start, start + step.ledger.wall_ns)


def _counters(report: TraceReport, found: TraceTimeline, pid: int, shift: int) -> Iterator[bytes]:
    """Yield counters at the start of each step, or of the window where there are no steps, and zeros at its end."""
    parts = [(step.start_ns, step.ledger) for step in report.steps] or [(found.window[0], report.ledger)]
    end = parts[-1][0] + parts[-1][1].wall_ns
    shown = [heading for heading in LEDGER_HEADINGS if report.ledger.parts().get(heading, 0)]
    for start, ledger in parts:
        values = {HEADING_WORDS[heading]: ledger.parts().get(heading, 0) / 1e6 for heading in shown}
        yield _counter("ledger (ms)", pid, start + shift, values)
        if ledger.overlap_ratio is not None:
            yield _counter("overlap ratio", pid, start + shift, {"ratio": ledger.overlap_ratio})
    yield _counter("ledger (ms)", pid, end + shift, dict.fromkeys((HEADING_WORDS[heading] for heading in shown), 0))


def _counter(name: str, pid: int, at_ns: int, values: dict[str, float]) -> bytes:
    return b'{"ph":"C","name":"%s","pid":%d,"ts":%s,"args":%s}' % (
        name.encode(), pid, _microseconds(at_ns), _encoder.encode(values),
    )  # fmt: skip


@contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that becomes `path` when all is written, as `output` does, compressed where its name says so.

    A pipe or /dev/stdout is written uncompressed.
    """
    with output(path) as raw:
        if path.suffix == ".gz" and raw.seekable():
            # No time and no name in the header, so that the same analysis gives the same bytes.
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as packed:
                yield cast("IO[bytes]", packed)
        else:
            yield raw
