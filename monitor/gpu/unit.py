"""Is this GPU well?  One GPU with its thread, what came of asking it, and since when it is down.

`up` is 1 when the last tick read something of it.  Why it is not is one word of REASONS, so that it can be a label; the
driver's own words go to the log, once when a GPU goes down and once when it is back.

A driver that is only slow, so that its answers miss the deadline but come before the next tick, is served one tick
late: thrown away, they would make a slow GPU look dead for ever.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.monitor.gpu.device import Device, Facts, Reading
from pacecar.monitor.gpu.driver import DriverMissingError, DriverStoppedError, GpuLostError, Nvml
from pacecar.monitor.gpu.session import Found
from pacecar.monitor.gpu.worker import Worker
from pacecar.records import Sample

__all__ = ["REASONS", "Unit"]

REASONS = ("hung", "lost", "reset_required", "vanished", "driver", "error")
"""Why a GPU is down: a call does not return, the driver calls it lost, wants a reset, does not list it, is gone itself,
or every question fails."""

_RESET_REQUIRED = 16  # NVML_ERROR_RESET_REQUIRED

_log = logging.getLogger(__name__)


class Unit:
    """A GPU that the daemon has seen; it stays, with its label and its counters, when the GPU goes and comes back."""

    def __init__(self, label: str, nvml: Nvml, clock: Clock, returned: threading.Condition) -> None:
        self.label = label
        self.device = Device(label, nvml, clock)
        self.worker: Worker[Reading] = Worker(f"gpu-{label}", self.device.read, clock, returned)
        self.reason: str | None = None
        self.words = ""
        self.down_since_ns: int | None = None
        self.facts: Facts | None = None
        self.was_asked = False
        self._awaits_tick = False
        self.is_glancing = False
        self._clock = clock
        self._late: Reading | None = None
        self._is_attached = False
        self._sought_as: str | None = None
        self._waiting: Found | None = None
        self._succeeded_wall_ns: int | None = None
        self._in_a_row = 0
        self._failures: Counter[str] = Counter()
        self._read_failures = 0
        self._is_failing = False

    @property
    def is_up(self) -> bool:
        """Whether the last tick read something."""
        return self.reason is None and self._succeeded_wall_ns is not None

    @property
    def was_ever_up(self) -> bool:
        """Whether anything was read of it since the daemon started."""
        return self._succeeded_wall_ns is not None

    def attach(self, found: Found) -> None:
        """Take the handle of a new session, as soon as no call hangs in the old one."""
        self._waiting, self._sought_as, self.facts = found, None, found.facts
        self._is_attached = False
        self._settle()

    def seek(self, found: Found, reason: str, words: str) -> None:
        """Look at every tick whether it is back at its index; until then it is down for that reason."""
        self.attach(found)
        self._sought_as = reason
        self._go_down(reason, words)

    def detach(self, reason: str, words: str) -> None:
        """Ask no more until there is a new handle."""
        self._is_attached, self._waiting = False, None
        self._go_down(reason, words)

    def await_driver(self) -> None:
        """Note a tick in which nothing could be asked because the driver is being opened."""
        self._go_down("driver", "the driver is being opened")

    def ask(self) -> None:
        """Ask, unless it is busy or has no handle."""
        self._settle()
        is_idle = self._is_attached and self.worker.busy_since_ns is None
        # What was asked at the last tick and came after it; a glance, or another session's answer, is none.
        late = self.worker.take() if is_idle and self._awaits_tick else None
        self._late = late if isinstance(late, Reading) else None
        self.was_asked = is_idle
        if self.was_asked:
            self._awaits_tick = True
            self.worker.ask()

    def ask_to_glance(self) -> None:
        """Ask for a glance if it is up and idle and has a call to spare: waking a thread for nothing costs as much."""
        is_idle = self._is_attached and self.is_up and self.worker.busy_since_ns is None
        self.is_glancing = is_idle and self.device.is_glance_due
        if self.is_glancing:
            self._awaits_tick = False
            self.worker.ask(self.device.glance)

    def gather_glance(self) -> list[Sample]:
        """Return what a glance saw; what went wrong is met again, and named, by the next tick."""
        result = self.worker.take() if self.is_glancing else None
        return result.samples if isinstance(result, Reading) else []

    def gather(self) -> tuple[list[Sample], list[str], bool]:
        """Return what came in this tick, what failed, and whether the driver has stopped."""
        result = self.worker.take() if self.was_asked else None
        if result is None and self._late is not None:
            result, self._late = self._late, None
        if isinstance(result, Reading):
            self._come_up()
            self._note_failures(result.failures)
            return result.samples, [f"gpu {self.label}: {failure}" for failure in result.failures], False
        if isinstance(result, Exception):
            reason, words = _named(result)
            self._go_down(reason if reason == "driver" else self._sought_as or reason, words)
        elif self.worker.busy_since_ns is not None:
            busy_ns = self._clock.monotonic_ns() - self.worker.busy_since_ns
            self._go_down("hung", f"no answer for {busy_ns / NS_PER_SECOND:.1f} s")
        else:
            self._go_down(self.reason or "driver", self.words or "the driver is being opened")
        stopped = isinstance(result, (DriverStoppedError, DriverMissingError))
        return [], [f"gpu {self.label}: {self.reason}: {self.words}"], stopped

    def health(self) -> Iterator[Sample]:
        """Yield whether it is up, why not, and for how long."""
        gpu = (self.label,)
        yield Sample("pacecar_gpu_up", gpu, int(self.is_up))
        for reason in REASONS:
            yield Sample("pacecar_gpu_down", (self.label, reason), int(self.reason == reason))
            yield Sample("pacecar_gpu_failures_total", (self.label, reason), self._failures[reason])
        if self._succeeded_wall_ns is not None:
            yield Sample("pacecar_gpu_last_success_time_seconds", gpu, self._succeeded_wall_ns)
        yield Sample("pacecar_gpu_consecutive_failures", gpu, self._in_a_row)
        yield Sample("pacecar_gpu_read_failures_total", gpu, self._read_failures)
        yield Sample("pacecar_gpu_driver_calls_total", gpu, self.device.calls)

    def _settle(self) -> None:
        if self._waiting is not None and self.worker.busy_since_ns is None:
            self.worker.take()  # an answer from the old session is worth nothing
            self.device.attach(*self._waiting)
            self._waiting, self._is_attached, self._awaits_tick = None, True, False

    def _come_up(self) -> None:
        if self.reason is not None:
            _log.info("gpu %s: back", self.label)
        self.reason, self.words, self.down_since_ns, self._in_a_row = None, "", None, 0
        self._sought_as = None
        self._succeeded_wall_ns = self._clock.wall_ns()

    def _go_down(self, reason: str, words: str) -> None:
        if reason != self.reason:
            _log.warning("gpu %s: down: %s: %s", self.label, reason, words)
        if self.down_since_ns is None:
            self.down_since_ns = self._clock.monotonic_ns()
        self.reason, self.words = reason, words
        self._in_a_row += 1
        self._failures[reason] += 1

    def _note_failures(self, failures: list[str]) -> None:
        self._read_failures += len(failures)
        if bool(failures) != self._is_failing:
            self._is_failing = bool(failures)
            if failures:
                _log.warning("gpu %s: %d of its numbers fail: %s", self.label, len(failures), failures[0])
            else:
                _log.info("gpu %s: all its numbers are read again", self.label)


def _named(error: Exception) -> tuple[str, str]:
    if isinstance(error, GpuLostError):
        return "reset_required" if error.code == _RESET_REQUIRED else "lost", str(error)
    if isinstance(error, (DriverStoppedError, DriverMissingError)):
        return "driver", str(error)
    return "error", f"{type(error).__name__}: {error}"
