"""Tracks whether one GPU is up, slow or down, and why; keeps its last reading.

A GPU is up if the last tick read anything from it.  The reason for being down is one of REASONS, so that it can be a
label; the driver's message goes to the log, once when the GPU goes down and once when it is back.

A slow driver is not down.  A GPU hangs if the call in flight is overdue (`call_deadlines`); while calls return, however
late, it is up.  A GPU whose readings take longer than a tick waits is `slow`: it is read less often, so that calls take
at most SHARE_MAX of the time; no tick waits for it, and its last reading is served until the next, for at most
HELD_SECONDS.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample

from ..worker_pool import WorkerPool
from .call_deadlines import CallTimes, timed
from .change_log import GpuChangeLog
from .device import CALLS_PER_TICK_MAX, Device, DeviceFacts, DeviceReading
from .driver import DriverMissingError, DriverStoppedError, GpuLostError, Nvml
from .driver_session import FoundDevice
from .driver_thread import DriverThread

__all__ = ["REASONS", "GpuState"]

REASONS = ("hung", "lost", "reset_required", "vanished", "driver", "error")
"""Why a GPU is down: a call does not return, the driver calls it lost, the driver requests a reset, the driver no
longer lists it, the driver itself is gone, or every query fails."""

SHARE_MAX = 0.5
"""Share of time that readings of one GPU may take: a slow driver holds a lock that the job needs too."""

FAST_READINGS = 3
"""After this many readings in a row within half of a tick's wait, a GPU is no longer slow."""

HELD_SECONDS = 60.0
"""How long a reading is served: at half a second a call, one takes six seconds and comes every twelve."""

_RESET_REQUIRED = 16  # NVML_ERROR_RESET_REQUIRED


class GpuState:
    """A GPU that the daemon has seen.  It keeps its label and its counters when the GPU goes and comes back."""

    def __init__(
        self,
        label: str,
        nvml: Nvml,
        clock: Clock,
        returned: threading.Condition,
        changes: GpuChangeLog,
        *,
        deadline_ns: int,
        pool: WorkerPool | None = None,
    ) -> None:
        """Calls are made on threads of `pool`, or on a thread of its own."""
        self.label = label
        self._times = CallTimes(clock)
        self.device = Device(label, timed(nvml, self._times), clock)
        self.worker: DriverThread[DeviceReading] = DriverThread(f"gpu-{label}", self.device.read, clock, returned, pool)
        self.reason: str | None = None
        self.words = ""
        self.down_since_ns: int | None = None
        self.facts: DeviceFacts | None = None
        self.was_asked = False
        self._awaits_tick = False
        self.is_glancing = False
        self.is_slow = False
        self._fast_readings = 0
        self._clock = clock
        self._changes = changes
        self._deadline_ns = deadline_ns
        self._asked_ns = self._due_ns = self._interval_ns = 0
        self._arrived: DeviceReading | Exception | None = None
        self._held: tuple[DeviceReading, int] | None = None
        self._is_attached = False
        self._expected_reason: str | None = None
        self._waiting: FoundDevice | None = None
        self._succeeded_wall_ns: int | None = None
        self._in_a_row = 0
        self._failures: Counter[str] = Counter()
        self._read_failures = 0
        self.refused: list[str] = []
        """Why samples of the last reading were left out as impossible."""
        self._is_failing = False
        self._sampled_state: tuple[bool, str | None, int, int, bool] | None = None
        self._kept_state_samples: list[Sample] = []

    @property
    def is_up(self) -> bool:
        """Whether the last tick read anything."""
        return self.reason is None and self._succeeded_wall_ns is not None

    @property
    def was_ever_up(self) -> bool:
        """Whether anything was read from it since the daemon started."""
        return self._succeeded_wall_ns is not None

    def attach(self, found: FoundDevice) -> None:
        """Use the handle of a new session as soon as no call hangs in the old one."""
        self._waiting, self._expected_reason, self.facts = found, None, found.facts
        self._is_attached = False
        self._settle()

    def await_return(self, found: FoundDevice, reason: str, words: str) -> None:
        """Check at every tick whether the GPU is back at its index; until then it is down for that reason."""
        self.attach(found)
        self._expected_reason = reason
        self._go_down(reason, words)

    def detach(self, reason: str, words: str) -> None:
        """Ask nothing until there is a new handle."""
        self._is_attached, self._waiting = False, None
        self._go_down(reason, words)

    def await_driver(self) -> None:
        """Record a tick without queries, because the driver is being opened."""
        self._go_down("driver", "the driver is being opened")

    def ask(self, *, everything: bool = True) -> None:
        """Start a reading, unless the GPU is busy, has no handle or is too slow to be due."""
        self._settle()
        now = self._clock.monotonic_ns()
        is_idle = self._is_attached and self.worker.busy_since_ns is None
        if is_idle:
            self._collect()
        self.was_asked = is_idle and now >= self._due_ns
        if self.was_asked:
            if self._asked_ns:
                self._interval_ns = now - self._asked_ns
            self._awaits_tick, self._asked_ns = True, now
            self.worker.ask(partial(self.device.read, everything=everything))

    def prepare_glance(self) -> bool:
        """Return whether it is up, idle and has a call to spare: waking a thread in vain costs as much as a call."""
        is_idle = self._is_attached and self.is_up and not self.is_slow and self.worker.busy_since_ns is None
        self.is_glancing = is_idle and self.device.is_glance_due
        return self.is_glancing

    def ask_to_glance(self) -> None:
        """Start the glance that was prepared."""
        self._collect()
        self._awaits_tick = False
        self.worker.ask(self.device.glance)

    def gather_glance(self) -> list[Sample]:
        """Return what a glance read; the next tick meets the same error and reports it."""
        result = self.worker.result() if self.is_glancing else None
        return result.samples if isinstance(result, DeviceReading) else []

    def gather(self) -> tuple[list[Sample], list[str], bool]:
        """Return the samples of this tick, the failures, and whether the driver has stopped."""
        self._collect()
        result, self._arrived = self._arrived, None
        if isinstance(result, DeviceReading):
            self._come_up()
            self._held = (result, self._clock.monotonic_ns())
            self._note_failures(result.failures + self.refused, result.withdrawn)
            return result.samples, [f"gpu {self.label}: {failure}" for failure in result.failures], False
        if isinstance(result, Exception):
            reason, words = _named(result)
            self._go_down(reason if reason == "driver" else self._expected_reason or reason, words)
        elif (held := self._between_readings()) is not None:
            return held, [], False
        stopped = isinstance(result, (DriverStoppedError, DriverMissingError))
        return [], [f"gpu {self.label}: {self.reason}: {self.words}"], stopped

    def _collect(self) -> None:
        """Take a finished reading and compute when the next is due; the result of a glance is not a reading."""
        result = self.worker.result() if self._awaits_tick else None
        if result is None:
            return
        self._arrived = result
        took_ns = result.took_ns if isinstance(result, DeviceReading) else 0
        self._due_ns = self._asked_ns + int(took_ns / SHARE_MAX)
        # A probe makes more calls than a tick, so scale it to the calls of a tick.
        calls = result.calls if isinstance(result, DeviceReading) else 0
        of_a_tick_ns = took_ns * CALLS_PER_TICK_MAX // max(calls, CALLS_PER_TICK_MAX)
        if isinstance(result, DeviceReading) and of_a_tick_ns > self._deadline_ns and not self.is_slow:
            call, longest_ns = self._times.slowest
            self.is_slow = True
            self._changes.record(
                logging.WARNING, "slow", self.label,
                f"a reading of {result.calls} calls takes {took_ns / NS_PER_SECOND:.2f} s ({call!r} alone"
                f" {longest_ns / NS_PER_SECOND:.3f} s): it is read every {took_ns / SHARE_MAX / NS_PER_SECOND:.1f} s",
            )  # fmt: skip
        self._fast_readings = self._fast_readings + 1 if of_a_tick_ns <= self._deadline_ns / 2 else 0
        if self.is_slow and self._fast_readings >= FAST_READINGS:
            self.is_slow = False
            self._changes.record(logging.INFO, "as fast as a tick again", self.label)

    def _between_readings(self) -> list[Sample] | None:
        """Return the samples to serve while there is no new reading; None if the GPU is down."""
        now = self._clock.monotonic_ns()
        busy_since_ns = self.worker.busy_since_ns
        overdue = self._times.overdue(now) if busy_since_ns is not None else None
        if overdue is not None:
            self._go_down("hung", f"no answer for {overdue.age_ns / NS_PER_SECOND:.1f} s to {overdue.call!r}")
        elif self.reason is None and self._held is not None and now - self._held[1] < HELD_SECONDS * NS_PER_SECOND:
            return self._held[0].samples
        elif busy_since_ns is not None and self.reason is None and not self.was_ever_up:
            return []  # its calls return: the first reading is under way
        elif busy_since_ns is not None and self.reason is None:
            self._go_down("hung", f"no reading for {(now - busy_since_ns) / NS_PER_SECOND:.1f} s")
        else:
            self._go_down(self.reason or "driver", self.words or "the driver is being opened")
        return None

    def health(self) -> Iterator[Sample]:
        """Yield its facts, whether it is up, why not, and since when."""
        gpu = (self.label,)
        if self.device.info is not None:  # name and address help to find a GPU that is down
            yield self.device.info
        state = (self.is_up, self.reason, self._in_a_row, self._read_failures, self.is_slow)
        if state != self._sampled_state:
            self._sampled_state, self._kept_state_samples = state, list(self._state_samples())
        yield from self._kept_state_samples
        if self._succeeded_wall_ns is not None:
            yield Sample("pacecar_gpu_last_success_time_seconds", gpu, self._succeeded_wall_ns)
        yield Sample("pacecar_gpu_driver_calls_total", gpu, self.device.calls)
        yield Sample("pacecar_gpu_driver_call_seconds_total", gpu, self._times.total_ns)
        if self._interval_ns:
            yield Sample("pacecar_gpu_read_interval_seconds", gpu, self._interval_ns)

    def _state_samples(self) -> Iterator[Sample]:
        """Yield what changes only when the GPU goes down, comes back or fails."""
        gpu = (self.label,)
        yield Sample("pacecar_gpu_up", gpu, int(self.is_up))
        for reason in REASONS:
            yield Sample("pacecar_gpu_down", (self.label, reason), int(self.reason == reason))
            yield Sample("pacecar_gpu_failures_total", (self.label, reason), self._failures[reason])
        yield Sample("pacecar_gpu_consecutive_failures", gpu, self._in_a_row)
        yield Sample("pacecar_gpu_read_failures_total", gpu, self._read_failures)
        yield Sample("pacecar_gpu_driver_slow", gpu, int(self.is_slow and self.is_up))

    def _settle(self) -> None:
        if self._waiting is not None and self.worker.busy_since_ns is None:
            self.worker.result()  # drop an answer from the old session
            self.device.attach(*self._waiting)
            self._waiting, self._is_attached, self._awaits_tick = None, True, False
            self._arrived = self._held = None
            self._due_ns = 0

    def _come_up(self) -> None:
        if self.reason is not None:
            self._changes.record(logging.INFO, "back", self.label)
        self.reason, self.words, self.down_since_ns, self._in_a_row = None, "", None, 0
        self._expected_reason = None
        self._succeeded_wall_ns = self._clock.wall_ns()

    def _go_down(self, reason: str, words: str) -> None:
        if reason != self.reason:
            self._changes.record(logging.WARNING, f"down: {reason}", self.label, words, self._identity())
        self._held = None
        if self.down_since_ns is None:
            self.down_since_ns = self._clock.monotonic_ns()
        self.reason, self.words = reason, words
        self._in_a_row += 1
        self._failures[reason] += 1

    def _identity(self) -> str:
        """Return name, UUID and PCI address; the empty text while they are unknown."""
        if self.facts is None:
            return ""
        identity = self.facts.identity
        return " ".join(text for text in (identity.name, identity.uuid, identity.pci_bus_id) if text)

    def _note_failures(self, failures: list[str], withdrawn: int) -> None:
        self._read_failures += len(failures)
        is_failing = bool(failures) or (self._is_failing and withdrawn > 0)  # refused numbers are retried later
        if is_failing != self._is_failing:
            self._is_failing = is_failing
            if failures:
                self._changes.record(logging.WARNING, "not all numbers are read", self.label, _first_of(failures))
            else:
                self._changes.record(logging.INFO, "all numbers are read again", self.label)


def _first_of(failures: list[str]) -> str:
    return failures[0] + (f", and {len(failures) - 1} more" if len(failures) > 1 else "")


def _named(error: Exception) -> tuple[str, str]:
    if isinstance(error, GpuLostError):
        return "reset_required" if error.code == _RESET_REQUIRED else "lost", str(error)
    if isinstance(error, (DriverStoppedError, DriverMissingError)):
        return "driver", str(error)
    return "error", f"{type(error).__name__}: {error}"
