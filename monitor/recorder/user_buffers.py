"""Keeps the last minutes of the host and of each user's jobs in ring buffers of their own, in bounded bytes together.

In one buffer a flood of one job's records pushes out the host's ticks, and with them what an Xid recording is for.
Here the host's ticks, readings and events have half of the bytes, whoever sends, and more while there is room; users
share the rest: when all buffers together are over the bound, the longest of the users' loses its oldest chunk.

Belongs to one thread: the recorder's.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.records import Sample, Snapshot
from pacecar.records.recording import RecordingEvent

from .ring_buffer import RingBuffer

__all__ = ["UserBuffers"]


class UserBuffers:
    """The ring buffer of the host, and one for each uid (None: not known) whose jobs sent anything in the window."""

    def __init__(self, *, window_ns: int, bytes_max: int, wall_offset_ns: int = 0) -> None:
        self._window_ns = window_ns
        self._bytes_max = bytes_max
        self._host = RingBuffer(window_ns=window_ns, bytes_max=bytes_max, wall_offset_ns=wall_offset_ns)
        self._users: dict[int | None, RingBuffer] = {}
        self._entries_gone = self._dropped_gone = 0

    @property
    def memory_bytes(self) -> int:
        """What the chunks take; of the open ones about."""
        return self._host.memory_bytes + self._of_users

    @property
    def _of_users(self) -> int:
        return sum(buffer.memory_bytes for buffer in list(self._users.values()))

    @property
    def entries(self) -> int:
        """How many entries were taken since the start."""
        return self._host.entries + self._entries_gone + sum(buffer.entries for buffer in list(self._users.values()))

    @property
    def dropped(self) -> int:
        """How many of them left before their time, for want of bytes."""
        return self._host.dropped + self._dropped_gone + sum(buffer.dropped for buffer in list(self._users.values()))

    def span_ns(self, now_ns: int) -> int:
        """Return how far back the host's buffer goes."""
        return self._host.span_ns(now_ns)

    def tick(self, snapshot: Snapshot, at_ns: int) -> None:
        """Take a tick."""
        self._host.tick(snapshot, at_ns)
        self._fit()

    def glance(self, samples: Sequence[Sample], at_ns: int) -> None:
        """Take what a collector read between two ticks."""
        self._host.glance(samples, at_ns)
        self._fit()

    def record(self, uid: int | None, payload: bytes, at_ns: int) -> None:
        """Take a record of a job of `uid` as its hook encoded it."""
        self._user(uid).record(payload, at_ns)
        self._fit()

    def event(self, event: RecordingEvent) -> None:
        """Take an event of the daemon's."""
        self._host.event(event)
        self._fit()

    def event_of(self, uid: int | None, event: RecordingEvent) -> None:
        """Take an event that a job of `uid` caused."""
        self._user(uid).event(event)
        self._fit()

    def expire(self, now_ns: int) -> None:
        """Drop what is older than the window, of users whose jobs send nothing any more."""
        for uid, buffer in list(self._users.items()):
            if buffer.expire(now_ns):
                self._entries_gone += buffer.entries
                self._dropped_gone += buffer.dropped
                del self._users[uid]

    def seal(self, now_ns: int) -> tuple[bytes, ...]:
        """Pack what is open and return all chunks, by the time at which they begin."""
        chunks = [chunk for buffer in (self._host, *self._users.values()) for chunk in buffer.sealed(now_ns)]
        return tuple(chunk.body for chunk in sorted(chunks, key=lambda chunk: chunk.first_ns))

    def _user(self, uid: int | None) -> RingBuffer:
        buffer = self._users.get(uid)
        if buffer is None:
            buffer = self._users[uid] = RingBuffer(window_ns=self._window_ns, bytes_max=self._bytes_max)
        buffer.wall_offset_ns = self._host.wall_offset_ns
        return buffer

    def _fit(self) -> None:
        while self.memory_bytes > self._bytes_max:
            longest = max(self._users.values(), key=lambda buffer: buffer.memory_bytes, default=None)
            if longest is None or self._host.memory_bytes > max(self._bytes_max // 2, self._of_users):
                longest = self._host
            if not longest.drop_oldest():
                return
