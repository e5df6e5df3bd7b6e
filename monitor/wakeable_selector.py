"""Waits for sockets to become ready, and for other threads to say that there is something else to do.

A thread that waits in `select` sees neither a flag nor a queue.  So one byte in a pipe wakes it; bytes that nobody has
read yet are one wake-up, and none is lost between the look at the queue and the next `select`.
"""

from __future__ import annotations

import os
import selectors
import threading
from contextlib import suppress

__all__ = ["WakeableSelector"]

WAKE_BYTES_MAX = 65536
"""What a pipe holds (pipe(7)), so that however many wake-ups there were one look forgets them all."""


class WakeableSelector(selectors.DefaultSelector):
    """A selector that `wake` ends the wait of; what woke it is not among the events."""

    def __init__(self) -> None:
        super().__init__()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waking = threading.Lock()
        self._is_closed = False
        self.register(self._woken, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the present wait, or the next one where nobody waits; from any thread.  Harmless when closed."""
        with self._waking, suppress(BlockingIOError):  # the pipe is full: it will wake anyway
            if not self._is_closed:  # the number of a closed pipe is soon another file's
                os.write(self._wake, b"x")

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; empty after `timeout` seconds, or when it was woken."""
        events = super().select(timeout)
        ready = [event for event in events if event[0].fd != self._woken]
        if len(ready) < len(events):
            with suppress(BlockingIOError):
                os.read(self._woken, WAKE_BYTES_MAX)
        return ready

    def close(self) -> None:
        """Close the selector, not what is registered.  Harmless when repeated."""
        with self._waking:
            if self._is_closed:
                return
            self._is_closed = True
            super().close()
            os.close(self._woken)
            os.close(self._wake)
