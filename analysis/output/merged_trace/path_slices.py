"""Writes the critical path of a job: one track with all of it, a track in each of its ranks, and arrows between them.

On the first track each slice names its rank.  In a rank's process the same slices are above its streams, next to the
kernel or the stretch of python that the job waited for.  An arrow marks each change of rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pacecar.analysis.all_ranks.job_times import PathPiece
from pacecar.analysis.one_rank.kernel_families import kernel_name

from ..words import path_words
from .trace_events import FIRST_PID, ROWS_CHUNK, arrow, json_bytes, named, slice_event

__all__ = ["PATH_TID", "path_events"]

PATH_PID = FIRST_PID - 1
PATH_TID = 20
"""The track of the path in a rank's process: below the ledger, above the streams."""

CATEGORY = b"critical_path"


def path_events(path: Sequence[PathPiece], pids: dict[int, int]) -> Iterator[bytes]:
    """Yield the events in chunks of a JSON list; `pids` are the processes of the ranks that were written."""
    if not path:
        return
    ranks = sorted({piece.rank for piece in path if piece.rank in pids})
    yield b",\n".join(
        (
            named("process_name", PATH_PID, 0, name="pacecar critical path of the job"),
            named("process_sort_index", PATH_PID, 0, sort_index=-2),
            named("thread_name", PATH_PID, 0, name="critical path"),
            *(named("thread_name", pids[rank], PATH_TID, name="critical path") for rank in ranks),
            *(named("thread_sort_index", pids[rank], PATH_TID, sort_index=PATH_TID) for rank in ranks),
        )
    )
    rows = (row for piece in path for row in _slices(piece, pids.get(piece.rank)))
    yield from _chunks(rows)
    yield from _chunks(_arrows(path, pids))


def _slices(piece: PathPiece, pid: int | None) -> Iterator[bytes]:
    cause = path_words(piece.cause)
    what = piece.operation or (kernel_name(piece.name) if piece.name is not None else cause)
    args = json_bytes({"rank": piece.rank, "cause": cause, "work": piece.name})
    whole = json_bytes(f"rank {piece.rank}: {what}")
    yield slice_event(whole, PATH_PID, 0, piece.start_ns, piece.end_ns, CATEGORY, args)
    if pid is not None:
        yield slice_event(json_bytes(what), pid, PATH_TID, piece.start_ns, piece.end_ns, CATEGORY, args)


def _arrows(path: Sequence[PathPiece], pids: dict[int, int]) -> Iterator[bytes]:
    for number, (before, after) in enumerate(pairwise(path)):
        if before.rank != after.rank and before.rank in pids and after.rank in pids:
            # A slice is still open in its last nanosecond, but not at its end.
            source = (pids[before.rank], PATH_TID, before.end_ns - 1)
            yield arrow(number, source, (pids[after.rank], PATH_TID, after.start_ns))


def _chunks(rows: Iterator[bytes]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == ROWS_CHUNK:
            yield b",\n".join(chunk)
            chunk = []
    if chunk:
        yield b",\n".join(chunk)
