"""Waits for sockets, and for other threads that have something else to do.

A thread in `select` sees neither a flag nor a queue, so a byte in a pipe wakes it.  Unread bytes are one wake-up, and
none is lost between a check of the queue and the next `select`.
"""

from __future__ import annotations

import os
import selectors
import threading
from contextlib import suppress

__all__ = ["WakeableSelector"]

WAKE_BYTES_MAX = 65536
"""The size of a pipe (pipe(7)), so that one read takes all wake-ups."""


class WakeableSelector(selectors.DefaultSelector):
    """A selector whose wait `wake` ends; the wake-up is not among the events."""

    def __init__(self) -> None:
        super().__init__()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waking = threading.Lock()
        self._is_closed = False
        self.register(self._woken, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the current wait, or the next one.  From any thread; harmless when closed."""
        with self._waking, suppress(BlockingIOError):  # the pipe is full: it will wake anyway
            if not self._is_closed:  # a closed descriptor may belong to another file by now
                os.write(self._wake, b"x")

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; empty after `timeout` seconds or a wake-up."""
        events = super().select(timeout)
        ready = [event for event in events if event[0].fd != self._woken]
        if len(ready) < len(events):
            with suppress(BlockingIOError):
                os.read(self._woken, WAKE_BYTES_MAX)
        return ready

    def close(self) -> None:
        """Close the selector, but not what is registered.  Harmless when repeated."""
        with self._waking:
            if self._is_closed:
                return
            self._is_closed = True
            super().close()
            os.close(self._woken)
            os.close(self._wake)
