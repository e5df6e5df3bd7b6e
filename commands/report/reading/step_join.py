"""Joins the records of all ranks by step: merges their sorted streams, with one step in memory at a time.

Sorting by wall-clock time would mix steps where clocks differ, and holding all steps would take gigabytes.  Each file
is already in order, so a merge by (life, step) is enough.

If a file is not in order (a restart whose hello was lost, a file concatenated by hand), a new life begins there.  Steps
of that rank may then not match those of the others, and count as incomplete.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from pacecar.records import StepRecord, Vitals

from .inputs import Row
from .notices import ReportNotices
from .run_index import Key

__all__ = ["Measured", "join_steps"]

Measured = StepRecord | Vitals

NUMBER_END = 1 << 63
"""The end of the range of signed 64-bit integers, which hooks and daemons use."""


def join_steps(
    streams: Iterable[Iterator[Row]], job: str, notices: ReportNotices
) -> Iterator[tuple[Key, list[tuple[int, Measured]]]]:
    """Yield (life, step), in ascending order, and what the ranks of `job` measured there."""
    merged = heapq.merge(*(_ordered(stream, job, notices) for stream in streams), key=lambda item: item[0])
    key: Key | None = None
    together: list[tuple[int, Measured]] = []
    for (life, step, rank), record in merged:
        if key is not None and key != (life, step):
            yield key, together
            together = []
        key = (life, step)
        together.append((rank, record))
    if key is not None:
        yield key, together


def _ordered(
    stream: Iterator[Row], job: str, notices: ReportNotices
) -> Iterator[tuple[tuple[int, int, int], Measured]]:
    """Yield the rows of one rank with ascending keys."""
    extra, last = 0, (0, -1)
    for rank, life, number, record in stream:
        if record.job != job or not isinstance(record, StepRecord | Vitals):
            continue
        if isinstance(record, Vitals):
            # Written between two steps, it describes the time before: it belongs to the last one.
            yield (*max(last, (life + extra, 0)), rank), record
            continue
        if not _is_possible(record):
            notices.add(*_where(rank, number, "range", "a number out of the range for a step"))
            continue
        key = (life + extra, record.step)
        if key == last:
            text = f"step {record.step} appears twice; only the first counts"
            notices.add(*_where(rank, number, "twice", text))
            continue
        if key < last:
            extra += 1
            key = (life + extra, record.step)
            text = f"step {record.step} comes after step {last[1]}: taken as a new start of the job"
            notices.add(*_where(rank, number, "order", text))
        last = key
        yield (*key, rank), record


def _where(rank: int, number: int, kind: str, text: str) -> tuple[str, str, str]:
    """Return place, kind and text of a fault; a recording has no line numbers."""
    return (f"rank{rank}.jsonl", kind, f"line {number}: {text}") if number else (f"rank {rank}", kind, text)


def _is_possible(record: StepRecord) -> bool:
    """Return whether every number that is summed is in the range of a count or time."""
    counts = (
        record.step, record.wall_ns, record.ended_wall_ns, record.samples, record.tokens, record.total_steps,
        record.total_samples, record.total_tokens, record.total_overhead_ns, record.total_windows,
        record.dropped_records, record.totals.wall_ns, record.window_price_ns,
    )  # fmt: skip
    return all(count is None or 0 <= count < NUMBER_END for count in counts)
