"""Keeps the daemon's memory from growing: one malloc arena for all threads, and a garbage collection now and then.

Memory grows without a leak.  glibc gives threads their own heaps, up to eight per processor, so memory freed by a
thread stays with it.  And a driver session that ends leaves cycles (exceptions with frames, GPU states and threads),
which the interpreter collects only much later.  Measured with eight stand-in GPUs and 18 driver reloads in 75 s: 41.5
to 46.0 MB before, 39.6 to 42.0 MB with one arena and a collection every 2 s.  `make soak-daemon` shows the effect
(docs/measurements/daemon.md).

Left out: memory of libraries, and C libraries without such arenas.
"""

from __future__ import annotations

import ctypes
import gc

from pacecar.clock import NS_PER_SECOND

__all__ = ["HeapTrimming"]

TIDY_SECONDS = 120
"""Seconds between two collections: sessions end rarely, and each stops every thread for ten milliseconds or more."""

M_ARENA_MAX = -8  # malloc.h of glibc
ARENAS_MAX = 1


class HeapTrimming:
    """Limits malloc's arenas and collects garbage.  Belongs to the thread that ticks."""

    def __init__(self) -> None:
        self._tidied_ns: int | None = None

    def settle(self) -> None:
        """Before threads start: use one arena for all, and exempt what is loaded by now from later collections."""
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_ARENA_MAX, ARENAS_MAX)
        gc.collect()
        gc.freeze()

    def tick(self, now_ns: int) -> bool:
        """Collect garbage if that is due; return whether it was."""
        if self._tidied_ns is not None and now_ns - self._tidied_ns < TIDY_SECONDS * NS_PER_SECOND:
            return False
        self._tidied_ns = now_ns
        gc.collect()
        return True
