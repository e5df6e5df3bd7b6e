"""Keeps the last minutes in few bytes: a ring of chunks compressed by zlib, with ticks stored as differences.

A deque of 300 snapshots with 2000 samples would take a hundred megabytes of objects.  But four fifths of the samples do
not change from tick to tick, and the names repeat.  So a tick is kept as its changes, and after CHUNK_SECONDS the open
chunk is packed, to some kilobytes per tick.

A chunk is dropped when its youngest entry is older than the window, so the window is always complete; or, and this is
counted, when all chunks together exceed the bytes allowed.  Belongs to one thread: the recorder's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress
from operator import is_not
from typing import NamedTuple

import msgspec

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Sample, Snapshot
from pacecar.records.recording import Chunk, GlanceRow, RecordingEvent, RecordRow, Series, TickRow, pack

__all__ = ["CHUNK_OPEN_BYTES", "CHUNK_SECONDS", "RingBuffer"]

CHUNK_SECONDS = 10
CHUNK_OPEN_BYTES = 1 << 20
"""A chunk is packed when its rows reach this size: a flood of records must not stay unpacked for ten seconds."""

SERIES_MAX = 65_536
"""Series of one chunk; labels that come and go end it early."""

_VALUE_BYTES, _SERIES_BYTES = 12, 120
"""Approximate bytes of a value and a series in a chunk before it is packed."""


class _Packed(NamedTuple):
    first_ns: int
    last_ns: int
    entries: int
    body: bytes


class RingBuffer:
    """The last `window_ns` of everything, in at most `bytes_max` of packed chunks and one that is open."""

    def __init__(self, *, window_ns: int, bytes_max: int, wall_offset_ns: int = 0) -> None:
        self._window_ns = window_ns
        self._bytes_max = bytes_max
        self._packed: deque[_Packed] = deque()
        self.packed_bytes = 0
        self.entries = 0
        self.dropped = 0
        self.wall_offset_ns = wall_offset_ns
        self._numbers: dict[Series, int] = {}
        self._latest: tuple[tuple[Sample, ...], list[int]] = ((), [])
        self._begin()

    def _begin(self) -> None:
        self._first_ns: int | None = None
        self._last_ns = 0
        _, numbers = self._latest
        if len(numbers) != len(self._numbers):  # else the next chunk most likely has the same series
            self._numbers, self._latest = {}, ((), [])
        self._open_bytes = _SERIES_BYTES * len(self._numbers)
        self._values: dict[int, int | float] = {}
        self._outcomes: dict[str, tuple[str, str]] = {}
        self._ticks: list[TickRow] = []
        self._glances: list[GlanceRow] = []
        self._records: list[RecordRow] = []
        self._events: list[RecordingEvent] = []

    @property
    def memory_bytes(self) -> int:
        """The bytes of the chunks; estimated for the open one."""
        return self.packed_bytes + self._open_bytes

    def span_ns(self, now_ns: int) -> int:
        """Return how far back the buffer goes; 0 if it is empty."""
        first = self._packed[0].first_ns if self._packed else self._first_ns
        return 0 if first is None else max(0, now_ns - first)

    def tick(self, snapshot: Snapshot, at_ns: int) -> None:
        """Add a tick."""
        self.wall_offset_ns = snapshot.wall_ns - at_ns
        changed = self._changes(snapshot.samples())
        outcomes = {
            name: (str(outcome.__struct_config__.tag), outcome.reason) for name, outcome in snapshot.outcomes.items()
        }
        changed_outcomes = {name: outcome for name, outcome in outcomes.items() if self._outcomes.get(name) != outcome}
        self._outcomes |= changed_outcomes
        row = TickRow(at_ns, snapshot.tick, snapshot.lateness_ns, changed, changed_outcomes, snapshot.durations_ns)
        self._ticks.append(row)
        self._added(at_ns, _VALUE_BYTES * len(changed) + 24 * len(outcomes))

    def _changes(self, samples: tuple[Sample, ...]) -> dict[int, int | float | None]:
        """Return number -> value for series that changed since the previous tick, None for those that are gone.

        Most ticks have the same series in the same order as the previous one, and many the same sample objects; so they
        are compared place by place, without a lookup.
        """
        changed: dict[int, int | float | None] = {}
        before, numbers = self._latest
        if before and len(before) == len(samples):
            values, is_first = self._values, not self._values
            for place in compress(range(len(samples)), map(is_not, samples, before)):
                sample, old, number = samples[place], before[place], numbers[place]
                if sample.labels != old.labels or sample.metric != old.metric:
                    break
                if not is_first and sample.value != values[number]:
                    values[number] = changed[number] = sample.value
            else:
                self._latest = (samples, numbers)
                if is_first:
                    values.update(zip(numbers, [sample.value for sample in samples], strict=True))
                    changed |= values
                return changed
        numbers = []
        for sample in samples:
            number = self._number(sample)
            numbers.append(number)
            if self._values.get(number) != sample.value:
                self._values[number] = changed[number] = sample.value
        seen = set(numbers)
        if len(seen) < len(self._values):
            for number in self._values.keys() - seen:
                changed[number] = None
                del self._values[number]
        # A series that appears twice has its later value; compared place by place it would seem to change.
        self._latest = (samples, numbers) if len(seen) == len(numbers) else ((), [])
        return changed

    def glance(self, samples: Sequence[Sample], at_ns: int) -> None:
        """Add what a collector read between two ticks."""
        self._glances.append(GlanceRow(at_ns, {self._number(sample): sample.value for sample in samples}))
        self._added(at_ns, _VALUE_BYTES * (1 + len(samples)))

    def record(self, payload: bytes, at_ns: int) -> None:
        """Add a job's record as its hook encoded it."""
        self._records.append(RecordRow(at_ns, msgspec.Raw(payload)))
        self._added(at_ns, len(payload) + 16)

    def event(self, event: RecordingEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self._added(event.at_ns, len(event.text) + 32)

    def seal(self, now_ns: int) -> tuple[_Packed, ...]:
        """Pack what is open and return all chunks, oldest first."""
        self._pack(now_ns)
        return tuple(self._packed)

    def expire(self, now_ns: int) -> bool:
        """Drop what is older than the window even if nothing new comes; return whether the buffer is empty."""
        if self._first_ns is not None and self._last_ns < now_ns - self._window_ns:
            self._begin()
        while self._packed and self._packed[0].last_ns < now_ns - self._window_ns:
            self._drop()
        return not self._packed and self._first_ns is None

    def drop_oldest(self) -> bool:
        """Drop the oldest chunk before its time, and count it; return whether there was one."""
        if not self._packed:
            self._pack(self._last_ns)
        if not self._packed:
            return False
        self.dropped += self._packed[0].entries
        self._drop()
        return True

    def _number(self, sample: Sample) -> int:
        series = (sample.metric, sample.labels)
        number = self._numbers.get(series)
        if number is None:
            number = self._numbers[series] = len(self._numbers)
            self._open_bytes += _SERIES_BYTES
        return number

    def _added(self, at_ns: int, size: int) -> None:
        self.entries += 1
        self._open_bytes += size
        self._first_ns = at_ns if self._first_ns is None else min(self._first_ns, at_ns)
        self._last_ns = max(self._last_ns, at_ns)
        if (
            self._last_ns - self._first_ns >= CHUNK_SECONDS * NS_PER_SECOND
            or self._open_bytes >= CHUNK_OPEN_BYTES
            or len(self._numbers) >= SERIES_MAX
        ):
            self._pack(self._last_ns)

    def _pack(self, now_ns: int) -> None:
        if self._first_ns is not None:
            rows = (tuple(self._ticks), tuple(self._glances), tuple(self._records), tuple(self._events))
            chunk = Chunk(self._first_ns, self._last_ns, self.wall_offset_ns, tuple(self._numbers), *rows)
            body = pack(chunk)
            self._packed.append(_Packed(self._first_ns, self._last_ns, sum(map(len, rows)), body))
            self.packed_bytes += len(body)
            self._begin()
        while self._packed and self._packed[0].last_ns < now_ns - self._window_ns:
            self._drop()
        while self.packed_bytes > self._bytes_max and len(self._packed) > 1:
            self.dropped += self._packed[0].entries
            self._drop()

    def _drop(self) -> None:
        self.packed_bytes -= len(self._packed.popleft().body)
