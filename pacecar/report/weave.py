"""What did all ranks do in the same step?  Their streams laid side by side, one step in memory at a time.

To sort by time of day would mix steps where clocks differ; to keep all steps until a rank's file is at hand is
gigabytes. Each file is in order by itself, so that merging is enough: the lowest (life, step) of all ranks goes next.

Where a file is not in order (a restart whose hello was lost, a file that was put together by hand) a new life begins
there, and steps of this rank then match those of the others only by luck: they are counted as incomplete.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from pacecar.records import StepRecord, Vitals
from pacecar.report.gather import Key
from pacecar.report.inputs import Row
from pacecar.report.notices import Notices

__all__ = ["Measured", "weave"]

Measured = StepRecord | Vitals


def weave(
    streams: Iterable[Iterator[Row]], job: str, notices: Notices
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


def _ordered(stream: Iterator[Row], job: str, notices: Notices) -> Iterator[tuple[tuple[int, int, int], Measured]]:
    """Yield the rows of one rank with keys that never fall."""
    extra, last = 0, (0, -1)
    for rank, life, number, record in stream:
        if record.job != job or not isinstance(record, StepRecord | Vitals):
            continue
        if isinstance(record, Vitals):
            # Said between two steps, of those before: stands with the last one.
            yield (*max(last, (life + extra, 0)), rank), record
            continue
        key = (life + extra, record.step)
        if key == last:
            text = f"line {number}: step {record.step} a second time; only the first counts"
            notices.add(f"rank{rank}.jsonl", "twice", text)
            continue
        if key < last:
            extra += 1
            key = (life + extra, record.step)
            text = f"line {number}: step {record.step} comes after step {last[1]}: taken as a new start of the job"
            notices.add(f"rank{rank}.jsonl", "order", text)
        last = key
        yield (*key, rank), record
