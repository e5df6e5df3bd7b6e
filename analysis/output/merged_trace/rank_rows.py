"""Writes a rank's kernels by stream and host rows by thread into a merged trace of several ranks.

Slices of one track must nest, or a viewer drops them.  But kernels of one stream may overlap by a microsecond, and rows
of a thread by rounding, so rows that do not nest go to another track of the same stream or thread.

Bounded by `ROWS_MAX` rows of all ranks together: beyond that the shortest are left out, and the process says how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.align.clock_fit import RankClockCorrection
from pacecar.analysis.one_rank.kernel_families import kernel_name
from pacecar.analysis.trace.columns import NONE, DeviceRows, HostRows, Trace
from pacecar.formatting.plain_text import clean

from .trace_events import ROWS_CHUNK, json_bytes, named, slice_event

__all__ = ["ROWS_MAX", "nested", "row_events"]

ROWS_MAX = 2_000_000
"""The most rows of all ranks together, some 300 MB of JSON, which a browser can still open."""

STREAM_TID, THREAD_TID = 100, 100_000
"""The first tracks of streams, and of threads."""

LANES_MAX = 8
"""The most tracks of one stream or thread; a row that nests in none is cut to fit the last."""

Index = NDArray[np.int64]


def row_events(trace: Trace, clock: RankClockCorrection, pid: int, rows_max: int) -> Iterator[bytes]:
    """Yield the rows of one rank on the common clock in chunks of a JSON list."""
    device, host = trace.device, trace.host_rows
    lasts = np.concatenate((device.end_ns - device.start_ns, host.end_ns - host.start_ns))
    keep = np.ones(len(lasts), dtype=np.bool_)
    if len(lasts) > rows_max:
        keep[np.argsort(lasts, kind="stable")[: len(lasts) - rows_max]] = False
        said = f"the {len(lasts) - rows_max} shortest of {len(lasts)} rows are left out"
        yield named("process_labels", pid, 0, labels=said)
    names = [json_bytes(kernel_name(name)) for name in trace.names]
    streams, number = np.unique(np.stack((device.device, device.stream), axis=1), axis=0, return_inverse=True)
    words = [_stream_words(*stream) for stream in streams.tolist()]
    tracks = _Tracks(trace, clock, pid, names)
    yield from tracks.events(device, number.reshape(-1), keep[: len(number.reshape(-1))], words, STREAM_TID)
    threads = [f"thread {clean(tid)}" for _, tid in trace.threads]
    yield from tracks.events(host, host.thread.astype(np.int64), keep[len(device.start_ns) :], threads, THREAD_TID)


def _stream_words(device: int, stream: int) -> str:
    return (f"stream {stream}" if stream != NONE else "stream unknown") + (f", device {device}" if device > 0 else "")


@dataclass(frozen=True, slots=True)
class _Tracks:
    """Encodes rows of one trace on the common clock; `names` are the trace's, as JSON."""

    trace: Trace
    clock: RankClockCorrection
    pid: int
    names: list[bytes]

    def events(
        self,
        rows: DeviceRows | HostRows,
        number: NDArray[np.int64],
        keep: NDArray[np.bool_],
        words: list[str],
        tid: int,
    ) -> Iterator[bytes]:
        """Yield the tracks and slices of rows; `number` is the stream or thread of each."""
        category = b"rank_device" if isinstance(rows, DeviceRows) else b"rank_host"
        for each, word in enumerate(words):
            mine = np.flatnonzero(keep & (number == each))
            if not len(mine):
                continue
            start, end = self.clock.common(rows.start_ns[mine]), self.clock.common(rows.end_ns[mine])
            order = np.lexsort((-end, start))
            mine, start, end = mine[order], start[order], np.maximum(end, start)[order]
            lane, end = nested(start, end)
            for track in range(int(lane.max()) + 1):
                at = tid + each * LANES_MAX + track
                yield named("thread_name", self.pid, at, name=word + (f" ({track + 1})" if track else ""))
                yield named("thread_sort_index", self.pid, at, sort_index=at)
            tracks = (tid + each * LANES_MAX + lane).tolist()
            columns = (rows.name[mine].tolist(), rows.collective[mine].tolist(), tracks, start.tolist(), end.tolist())
            for low in range(0, len(mine), ROWS_CHUNK):
                part = zip(*(column[low : low + ROWS_CHUNK] for column in columns), strict=True)
                yield b",\n".join(
                    slice_event(self.names[name], self.pid, at, first, last, category, self._args(collective))
                    for name, collective, at, first, last in part
                )

    def _args(self, collective: int) -> bytes:
        if collective == NONE:
            return b""
        meta = self.trace.collectives[collective]
        known = {"collective": meta.operation, "bytes": meta.bytes, "group": meta.group}
        return json_bytes({name: value for name, value in known.items() if value is not None})


def nested(start: Index, end: Index) -> tuple[Index, Index]:
    """Return the lane of each row, so that rows of one lane nest, and the rows' ends, cut if no lane is left.

    Rows are sorted by start, the longest first among equal starts.
    """
    if not len(start) or bool((start[1:] >= end[:-1]).all()):
        return np.zeros(len(start), dtype=np.int64), end
    open_ends: list[list[int]] = [[] for _ in range(LANES_MAX)]
    lanes, ends = [], []
    for first, last in zip(start.tolist(), end.tolist(), strict=True):
        lane = next((each for each, stack in enumerate(open_ends) if _nests(stack, first, last)), LANES_MAX - 1)
        stack = open_ends[lane]
        ends.append(min(last, stack[-1]) if stack else last)
        stack.append(ends[-1])
        lanes.append(lane)
    return np.array(lanes, dtype=np.int64), np.array(ends, dtype=np.int64)


def _nests(stack: list[int], first: int, last: int) -> bool:
    """Return whether a row fits inside the open ones; drop those that have ended."""
    while stack and stack[-1] <= first:
        stack.pop()
    return not stack or last <= stack[-1]
