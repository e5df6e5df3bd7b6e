"""Measures how long the training thread was ready to run while other programs had the processor (its run delay).

pacecar's own time on the step path is wall time, because the job really waits: for one of our locks, for the GIL, for
another rank at a switch.  But when more threads are ready than there are processors, the wall clock also runs while the
kernel gives the processor to another program.  One such interval of 5 ms in a call of 100 us makes a busy machine look
like an expensive hook.  The processor clock (`time.thread_time_ns`) does not help: it omits the real waits.  The kernel
counts exactly these intervals as each thread's run delay (Documentation/scheduler/sched-stats.rst, the second number).
So pacecar's time is wall time less run delay.

    wall clock      |---- ours ----|- in line -|-- ours --|- waits for a lock -|- ours -|
    charged         |---- ours ----|           |-- ours --|- waits for a lock -|- ours -|

Reading it costs microseconds, so it is not read in per-micro-batch callbacks or at plain boundaries.  Before longer
work (a window, the tuner's exchange with other ranks) `begin` is called; the next step boundary calls `end`.  For the
callbacks only the run delay of the whole step is known (`lap`, read at full boundaries): `step_records` subtracts as
much of it as they took longer than usual.  At plain boundaries run delay is charged to pacecar: it is small, because
they use little of the processor.

Time taken by the host of a virtual machine is not seen.  If the kernel gives no run delay, all wall time is charged.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pacecar.kernel_files.processors import run_delay_ns

__all__ = ["SCHEDSTAT", "Preemption"]

SCHEDSTAT = Path("/proc/thread-self/schedstat")

STAT_BYTES_MAX = 128
"""The file has three numbers of at most twenty digits."""


class Preemption:
    """Measures the run delay of the calling thread from `begin` to `end`; never raises."""

    def __init__(self, path: Path = SCHEDSTAT) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._thread: int | None = None
        self._begun_ns: int | None = None
        self.is_begun = False
        """Whether `begin` was called since the last `end`."""
        self._spared_ns = 0
        self._left_out_ns = 0

    def begin(self) -> None:
        """Start measuring."""
        self._begun_ns, self.is_begun, self._left_out_ns = self._read(), True, 0

    def lap(self) -> int:
        """Return the run delay since the last `lap` or `begin` (0 on the first call) and start measuring again."""
        begun_ns, self._begun_ns = self._begun_ns, self._read()
        return 0 if begun_ns is None or self._begun_ns is None else max(0, self._begun_ns - begun_ns)

    def leave_out(self, duration_ns: int) -> None:
        """Treat `duration_ns` of the time since `begin` as run delay, which is not charged here."""
        self._left_out_ns += duration_ns

    def so_far(self) -> int:
        """Return what `end` would return, and keep measuring."""
        now_ns = None if self._begun_ns is None else self._read()
        delay_ns = 0 if now_ns is None or self._begun_ns is None else max(0, now_ns - self._begun_ns)
        return delay_ns + self._left_out_ns

    def end(self) -> int:
        """Return the run delay in ns since `begin`, plus any time left out; 0 if the kernel does not report it."""
        spared_ns = self.so_far()
        self._begun_ns, self.is_begun, self._left_out_ns = None, False, 0
        self._spared_ns += spared_ns
        return spared_ns

    def own_ns(self, duration_ns: int) -> int:
        """Return `duration_ns` of pacecar's time less the run delay that `end` found since the last call."""
        if not self._spared_ns:
            return duration_ns
        spared_ns, self._spared_ns = self._spared_ns, 0
        return max(0, duration_ns - spared_ns)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor, self._thread = self._descriptor, None, None
        self._begun_ns = None
        if descriptor is not None:
            os.close(descriptor)

    def _read(self) -> int | None:
        if self._thread != threading.get_ident():
            self.close()  # the file belongs to the thread that opened it
            self._thread = threading.get_ident()
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
        if self._descriptor is None:
            return None
        try:
            return run_delay_ns(os.pread(self._descriptor, STAT_BYTES_MAX, 0))
        except OSError:
            return None
