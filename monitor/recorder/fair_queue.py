"""Queues entries for the flight recorder, bounded in number and bytes, with a share for the host and each user.

In one plain queue the user who sends most would crowd out the host's ticks.  So half of the queue is reserved for the
host, and users share the rest by max-min fairness (`fair_share`).  When one user displaces another's entry, it is the
newest, and it counts as dropped.

Thread-safe: the lock is held only to append an entry or to swap the whole queue.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, NamedTuple, TypeVar

from ..fair_share import yielding_holder

__all__ = ["HOST", "FairQueue"]

HOST = "host"
"""Owner of the host's entries; the owner of a user's entries is the uid (None: unknown)."""

T = TypeVar("T")

Owner = int | str | None


class Queued(NamedTuple, Generic[T]):
    """An entry, its time, owner and bytes."""

    at_ns: int
    owner: Owner
    entry: T
    size: int


class FairQueue(Generic[T]):
    """Entries waiting for the recorder's thread."""

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.dropped = 0
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._waiting: dict[Owner, deque[Queued[T]]] = {}
        self._entries: dict[Owner, int] = {}
        self._bytes: dict[Owner, int] = {}

    @property
    def entries(self) -> int:
        """How many entries wait."""
        return sum(self._entries.values())

    @property
    def bytes(self) -> int:
        """Their bytes."""
        return sum(self._bytes.values())

    def put(self, entry: T, at_ns: int, owner: Owner, size: int) -> bool:
        """Add `entry` of `size` bytes; return whether it fitted."""
        with self._lock:
            while self.entries >= self.entries_max or self.bytes + size > self.bytes_max:
                is_long = self.entries >= self.entries_max
                held, most = (self._entries, self.entries_max) if is_long else (self._bytes, self.bytes_max)
                giver = self._holder(owner, held, 1 if is_long else size, most)
                if giver is None:
                    self.dropped += 1
                    return False
                gone = self._waiting[giver].pop()
                self._count(giver, -1, -gone.size)
                self.dropped += 1
            self._waiting.setdefault(owner, deque()).append(Queued(at_ns, owner, entry, size))
            self._count(owner, 1, size)
            return True

    def _holder(self, owner: Owner, held: dict[Owner, int], amount: int, most: int) -> Owner | None:
        of_users = {other: count for other, count in held.items() if other != HOST}
        of_host = held.get(HOST, 0)
        if owner == HOST:
            is_entitled = of_host + amount <= most // 2
            return max(of_users, key=lambda other: of_users[other]) if is_entitled and of_users else None
        if of_host > most // 2:
            return HOST
        return yielding_holder(owner, of_users, amount)

    def _count(self, owner: Owner, entries: int, size: int) -> None:
        self._entries[owner] = self._entries.get(owner, 0) + entries
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        if not self._entries[owner]:
            del self._entries[owner], self._bytes[owner], self._waiting[owner]

    def drain(self) -> list[Queued[T]]:
        """Remove all entries and return them in the order in which they came."""
        with self._lock:
            waiting = self._waiting
            self._clear()
        return sorted((one for entries in waiting.values() for one in entries), key=lambda one: one.at_ns)

    @property
    def is_filling(self) -> bool:
        """Whether more than half is taken."""
        return 2 * self.entries > self.entries_max or 2 * self.bytes > self.bytes_max
