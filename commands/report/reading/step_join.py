"""Joins the records of all ranks by step: a merge of their sorted streams, with one step in memory at a time.

To sort by time of day would mix steps where clocks differ; to keep all steps until a rank's file is at hand would take
gigabytes.  Each file is in order by itself, so that merging is enough: the lowest (life, step) of all ranks goes next.

Where a file is not in order (a restart whose hello was lost, a file that was put together by hand) a new life begins
there, and steps of this rank then match those of the others only by luck: they are counted as incomplete.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from pacecar.records import StepRecord, Vitals

from .inputs import Row
from .notices import ReportNotices
from .run_index import Key

__all__ = ["Measured", "weave"]

Measured = StepRecord | Vitals

NUMBER_END = 1 << 63
"""The end of signed 64-bit integers, in which hooks and daemons count."""


def weave(
    streams: Iterable[Iterator[Row]], job: str, notices: ReportNotices
) -> Iterator[tuple[Key, list[tuple[int, Measured]]]]:
    """Yield, ascending, (life, step) and what the ranks of `job` measured there."""
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
    """Yield the rows of one rank with keys that never fall."""
    extra, last = 0, (0, -1)
    for rank, life, number, record in stream:
        if record.job != job or not isinstance(record, StepRecord | Vitals):
            continue
        if isinstance(record, Vitals):
            # Written between two steps, about those before: it goes with the last one.
            yield (*max(last, (life + extra, 0)), rank), record
            continue
        if not _is_possible(record):
            notices.add(*_where(rank, number, "range", "a number that no step can have"))
            continue
        key = (life + extra, record.step)
        if key == last:
            text = f"step {record.step} a second time; only the first counts"
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
    """Return place, kind and text of a fault; a recording has no lines."""
    return (f"rank{rank}.jsonl", kind, f"line {number}: {text}") if number else (f"rank {rank}", kind, text)


def _is_possible(record: StepRecord) -> bool:
    """Return whether every number that is added up is in the range of a count or a time."""
    counts = (
        record.step, record.wall_ns, record.ended_wall_ns, record.samples, record.tokens, record.total_steps,
        record.total_samples, record.total_tokens, record.total_overhead_ns, record.total_windows,
        record.dropped_records, record.totals.wall_ns, record.window_price_ns,
    )  # fmt: skip
    return all(count is None or 0 <= count < NUMBER_END for count in counts)
