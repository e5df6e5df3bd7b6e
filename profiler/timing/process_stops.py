"""Detects when this process did not run at all, and bounds the processor time it used in an interval.

Phases are timed with the wall clock, which goes on while a process is stopped (by a signal, a debugger or a frozen
control group), throttled by its quota or waiting for a processor.  A rank stopped for 167 s would be recorded as
computing for most of that time.  Nothing on the training thread can see this, and a SIGCONT handler belongs to the job.
So a thread of ours reads two clocks every PERIOD_SECONDS.  If it wakes late and the processor clock of the whole
process (all threads) has hardly moved, no thread of this process ran.

    wall clock       |--|--|--|-------------------------------|--|--|
    process's clock   .2 .2 .2              .05                .2 .2
    stopped                      ==============================

The processor time in between bounds when the stop began: the process ran for at most that long before it.  Several
threads use processor time faster than the wall clock advances, so the stop is underestimated.  Of the remaining time,
only as much counts as the job's own time as the same clock moved (`processor_ns`).

Not detected: stops shorter than LATE_NS_MIN; a suspended machine, which also stops the clock that times steps; a single
thread that waits, for paged-out memory say, while others could run.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pacecar.kernel_files.cgroups import v2_group
from pacecar.kernel_files.processors import run_delay_ns
from pacecar.kernel_files.reader import KernelFiles, row
from pacecar.records import StopCause

__all__ = ["LATE_NS_MIN", "PERIOD_SECONDS", "KernelCounts", "Stop", "StopDetector", "cause_of"]

PERIOD_SECONDS = 0.2
"""Time between two readings: five a second take about 100 us of processor time, and the processor clock locates a stop
more precisely than that."""

LATE_NS_MIN = 250_000_000
"""The shortest stop: a thread rarely waits longer for the GIL in a busy process, or for a processor on a busy
machine."""

STOPS_MAX = 256
"""The most stops kept for steps without a record yet; the oldest are dropped."""

LOOKS_MAX = 512
"""The most readings kept; beyond this every other old one is dropped: a step of hours does not need them all."""

COUNTS_EVERY = 10
"""The kernel's counters are read once per this many readings of the clocks: they grow little in two seconds, compared
with a stop's share in them."""

CAUSE_SHARE_MIN = 0.5
"""A kernel counter must grow by this share of a stop to be named as its cause."""

LOCK_SECONDS = 1.0
"""The longest wait for the lock, which may never be released in a forked child."""


class Stop(NamedTuple):
    """An interval (monotonic ns) in which the process did not run; `cause` is None if the kernel does not show why."""

    start_ns: int
    end_ns: int
    cause: StopCause | None

    @property
    def stretch(self) -> tuple[int, int]:
        """Its start and end."""
        return self.start_ns, self.end_ns

    def within(self, start_ns: int, end_ns: int) -> int:
        """Return how much of it lies between two times."""
        return max(0, min(self.end_ns, end_ns) - max(self.start_ns, start_ns))


class Counts(NamedTuple):
    """Kernel totals in nanoseconds (None where not reported), and whether a debugger is attached."""

    throttled_ns: int | None = None
    frozen_ns: int | None = None
    run_delay_ns: int | None = None
    is_traced: bool = False


def cause_of(stopped_ns: int, before: Counts, after: Counts) -> StopCause | None:
    """Return the cause of a stop of `stopped_ns` between two readings of the kernel's counters; None if unknown."""
    causes: tuple[tuple[StopCause, int | None, int | None], ...] = (
        ("throttled", before.throttled_ns, after.throttled_ns),
        ("frozen", before.frozen_ns, after.frozen_ns),
        ("preempted", before.run_delay_ns, after.run_delay_ns),
    )
    for cause, old, new in causes:
        if old is not None and new is not None and new - old >= CAUSE_SHARE_MIN * stopped_ns:
            return cause
    return "traced" if after.is_traced else None


class KernelCounts:
    """Reads the kernel's counters for this process; call `open` on the training thread, whose run delay it reads.

    Quota and freezer counters are those of the process's own control group
    (Documentation/admin-guide/cgroup-v2.rst: `throttled_usec` in cpu.stat and, if the kernel has it, `frozen_usec` in
    cgroup.stat.local).
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._files = KernelFiles(proc)
        self._cgroups = cgroups
        self._group: Path | None = None
        self._thread: Path | None = None

    def open(self) -> None:
        """Find the files; missing ones are not read."""
        self._thread = self._files.proc / "self" / "task" / str(threading.get_native_id()) / "schedstat"
        path = v2_group(self._text(self._files.proc / "self" / "cgroup"))
        self._group = None if path is None else self._cgroups / path.lstrip("/")

    def read(self) -> Counts:
        """Return the kernel's totals now."""
        tracer = _count(self._text(self._files.proc / "self" / "status"), "TracerPid:")
        return Counts(
            throttled_ns=self._microseconds("cpu.stat", "throttled_usec"),
            frozen_ns=self._microseconds("cgroup.stat.local", "frozen_usec"),
            run_delay_ns=None if self._thread is None else run_delay_ns(self._text(self._thread)),
            is_traced=bool(tracer),
        )

    def _microseconds(self, name: str, field: str) -> int | None:
        found = None if self._group is None else _count(self._text(self._group / name), field)
        return None if found is None else found * 1000

    def _text(self, path: Path) -> str:
        return self._files.text(path) or ""


def _count(text: str, key: str) -> int | None:
    """Return the number after `key` at the beginning of a line; None if there is none."""
    words = row(text, key)
    return int(words[0]) if words and words[0].isdigit() else None


class StopDetector:
    """Reads the clocks from its own thread, and whenever the record of a long step is about to be written.

    `charge` is called with the thread's processor time.  All methods except `start` work on any thread.
    """

    def __init__(
        self,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        processor_ns: Callable[[], int] = time.process_time_ns,
        counts: KernelCounts | None = None,
        charge: Callable[[int], None] = lambda duration_ns: None,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._now_ns = now_ns
        self._processor_ns = processor_ns
        self._kernel = counts or KernelCounts()
        self._charge = charge
        self._period_seconds = period_seconds
        self._lock = threading.Lock()
        self._stops: deque[Stop] = deque(maxlen=STOPS_MAX)
        self._at: list[int] = []
        self._took: list[int] = []
        self._looks = 0
        self._counts = Counts()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_looking = False
        """Whether stops are detected: between `start` and `close`."""

    def start(self) -> None:
        """Start the thread; call on the training thread."""
        self._kernel.open()
        self._counts = self._kernel.read()
        self.is_looking = True
        self.look()
        self._thread = threading.Thread(target=self._run, name="pacecar-stops", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread without waiting for it.  May be called repeatedly."""
        self.is_looking = False
        self._closing.set()

    def forked(self) -> None:
        """Close in a forked child, which does not have the thread."""
        self.is_looking = False

    def look(self) -> None:
        """Compare the clocks with the last reading; never raises."""
        if not self.is_looking or not self._lock.acquire(timeout=LOCK_SECONDS):
            return
        try:
            self._look(self._now_ns(), self._processor_ns())
        finally:
            self._lock.release()

    def stops(self, start_ns: int, end_ns: int) -> list[Stop]:
        """Return the stops between two times, clipped to them."""
        return [
            Stop(max(stop.start_ns, start_ns), min(stop.end_ns, end_ns), stop.cause)
            for stop in list(self._stops)
            if stop.within(start_ns, end_ns)
        ]

    @property
    def went_on_ns(self) -> int | None:
        """When the process resumed after its last stop; None: it was never stopped."""
        return self._stops[-1].end_ns if self._stops else None

    def processor_ns(self, start_ns: int, end_ns: int) -> int | None:
        """Return an upper bound of this process's processor time between two times; None if unknown.

        The bound is measured from the last reading before to the first one after, so it is never too low.
        """
        with self._lock:
            first = bisect.bisect_right(self._at, start_ns) - 1
            last = bisect.bisect_left(self._at, end_ns)
            if first < 0 or last >= len(self._at):
                return None
            return self._took[last] - self._took[first]

    def _look(self, now_ns: int, took_ns: int) -> None:
        if self._at:
            gap_ns = now_ns - self._at[-1]
            stopped_ns = gap_ns - max(0, took_ns - self._took[-1])
            if gap_ns - round(self._period_seconds * 1e9) >= LATE_NS_MIN and stopped_ns >= LATE_NS_MIN:
                counts = self._kernel.read()
                self._stops.append(Stop(now_ns - stopped_ns, now_ns, cause_of(stopped_ns, self._counts, counts)))
                self._counts, self._looks = counts, 0
        self._at.append(now_ns)
        self._took.append(took_ns)
        if len(self._at) > LOOKS_MAX:  # drop every other one of the older half
            half = LOOKS_MAX // 2
            del self._at[1:half:2], self._took[1:half:2]
        self._looks += 1
        if self._looks >= COUNTS_EVERY:
            self._counts, self._looks = self._kernel.read(), 0

    def _run(self) -> None:
        while not self._closing.wait(self._period_seconds):
            begun = time.thread_time_ns()
            self.look()
            self._charge(time.thread_time_ns() - begun)
