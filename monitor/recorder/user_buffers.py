"""Keeps the last minutes of the host and of each user's jobs in separate ring buffers, in bounded bytes together.

In one buffer a flood of one job's records would push out the host's ticks, which an Xid recording is for.  Here the
host's ticks, readings and events may use half of the bytes, and more while there is room; users share the rest.  When
all buffers together exceed the bound, the longest of the users' loses its oldest chunk.

Belongs to one thread: the recorder's.
"""

from __future__ import annotations

from .ring_buffer import RingBuffer

__all__ = ["UserBuffers"]


class UserBuffers:
    """The `host`'s ring buffer, and one for each uid (None: unknown) whose jobs sent anything in the window.

    Call `fit` after adding to a buffer.
    """

    def __init__(self, *, window_ns: int, bytes_max: int, wall_offset_ns: int = 0) -> None:
        self._window_ns = window_ns
        self._bytes_max = bytes_max
        self.host = RingBuffer(window_ns=window_ns, bytes_max=bytes_max, wall_offset_ns=wall_offset_ns)
        self._users: dict[int | None, RingBuffer] = {}
        self._entries_gone = self._dropped_gone = 0

    def of_user(self, uid: int | None) -> RingBuffer:
        """Return the buffer of the jobs of `uid`."""
        buffer = self._users.get(uid)
        if buffer is None:
            buffer = self._users[uid] = RingBuffer(window_ns=self._window_ns, bytes_max=self._bytes_max)
        buffer.wall_offset_ns = self.host.wall_offset_ns
        return buffer

    @property
    def memory_bytes(self) -> int:
        """The bytes of all chunks; estimated for open ones."""
        return self.host.memory_bytes + self._user_bytes

    @property
    def _user_bytes(self) -> int:
        return sum(buffer.memory_bytes for buffer in list(self._users.values()))

    @property
    def entries(self) -> int:
        """How many entries were added since the start."""
        return self.host.entries + self._entries_gone + sum(buffer.entries for buffer in list(self._users.values()))

    @property
    def dropped(self) -> int:
        """How many of them were dropped before their time, to save bytes."""
        return self.host.dropped + self._dropped_gone + sum(buffer.dropped for buffer in list(self._users.values()))

    def expire(self, now_ns: int) -> None:
        """Drop what is older than the window from users whose jobs no longer send anything."""
        for uid, buffer in list(self._users.items()):
            if buffer.expire(now_ns):
                self._entries_gone += buffer.entries
                self._dropped_gone += buffer.dropped
                del self._users[uid]

    def seal(self, now_ns: int) -> tuple[bytes, ...]:
        """Pack what is open and return all chunks, by the time at which they begin."""
        chunks = [chunk for buffer in (self.host, *self._users.values()) for chunk in buffer.seal(now_ns)]
        return tuple(chunk.body for chunk in sorted(chunks, key=lambda chunk: chunk.first_ns))

    def fit(self) -> None:
        """Drop the oldest chunks until all buffers together are within the bound."""
        while self.memory_bytes > self._bytes_max:
            longest = max(self._users.values(), key=lambda buffer: buffer.memory_bytes, default=None)
            if longest is None or self.host.memory_bytes > max(self._bytes_max // 2, self._user_bytes):
                longest = self.host
            if not longest.drop_oldest():
                return
