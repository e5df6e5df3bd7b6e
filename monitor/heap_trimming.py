"""Keeps the daemon's memory from growing: one malloc arena for all threads, and a garbage collection now and then.

Memory grows although nothing leaks.  glibc gives each thread a heap of its own, up to eight a processor: with a thread
for each GPU and each collector, freed memory stays with the thread that had it.  And a driver session that ends leaves
cycles (exceptions with their frames, GPU states and their threads), which the interpreter collects only when enough
others have piled up.  Measured with eight stand-in GPUs and 18 driver reloads in 75 s: 41.5 to 46.0 MB as it was, 39.6
to 42.0 MB with one arena and a collection every 2 s.  `make soak-daemon` shows what this module makes of it
(docs/measurements/daemon.md).

Left out: memory of libraries, and other C libraries than glibc, which have no such arenas.
"""

from __future__ import annotations

import ctypes
import gc

from pacecar.clock import NS_PER_SECOND

__all__ = ["HeapTrimming"]

TIDY_SECONDS = 30
"""Seconds between two collections: sessions end rarely, and each takes a few milliseconds of every thread."""

M_ARENA_MAX = -8  # malloc.h of glibc
ARENAS_MAX = 1


class HeapTrimming:
    """Limits malloc's arenas and collects garbage.  Belongs to the thread that ticks."""

    def __init__(self) -> None:
        self._tidied_ns: int | None = None

    def settle(self) -> None:
        """Call before threads start: use one arena for all, and exempt what is loaded by now from later collections."""
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_ARENA_MAX, ARENAS_MAX)
        gc.collect()
        gc.freeze()

    def tick(self, now_ns: int) -> bool:
        """Collect the garbage that driver sessions left, if it is time; return whether it was."""
        if self._tidied_ns is not None and now_ns - self._tidied_ns < TIDY_SECONDS * NS_PER_SECOND:
            return False
        self._tidied_ns = now_ns
        gc.collect()
        return True
