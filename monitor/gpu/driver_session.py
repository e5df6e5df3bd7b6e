"""Opens the driver, counts the GPUs and takes their handles: one driver session.

A session ends when the driver is reloaded or a GPU vanishes; its handles, event set and sample buffers are then
void.  NVML counts initializations, so each `start` needs a `stop`.  But a shutdown waits for locks that a hung call may
hold. So while a call hangs the driver is started again without a stop; the missing stops follow at the next opening
that finds no call hanging.

The first query to a GPU may also hang, so each GPU is searched on its own thread.  The session begins with the GPUs
that answer within FIND_SECONDS; the others are added when they answer.

Left out: when to open the driver.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import NamedTuple

from pacecar.clock import Clock

from .device import DeviceFacts
from .driver import Handle, Identity, Nvml, NvmlError
from .driver_thread import DriverThread

__all__ = ["GPUS_MAX", "DriverSession", "DriverSessions", "FoundDevice"]

GPUS_MAX = 64

FIND_SECONDS = 1.0
"""How long an opening waits for handles and names; a GPU without persistence mode takes most of a second."""


class FoundDevice(NamedTuple):
    """A GPU that answered when the driver was opened; without a handle, one to look for at that index."""

    handle: Handle | None
    facts: DeviceFacts


class DriverSession(NamedTuple):
    """The result of an opening; `problems` are GPUs that failed, `hanging` the indices of those that have not answered.

    `watched` are the indices of GPUs whose Xids the driver reports as events.
    """

    found: tuple[FoundDevice, ...]
    problems: tuple[tuple[FoundDevice, NvmlError], ...]
    hanging: tuple[int, ...]
    left_out: int
    watched: frozenset[int]


class DriverSessions:
    """Opens the driver, again and again.  Used by one thread at a time."""

    def __init__(self, nvml: Nvml, clock: Clock) -> None:
        self._nvml = nvml
        self._clock = clock
        self._returned = threading.Condition()
        self._finders: dict[int, tuple[int, DriverThread[FoundDevice]]] = {}  # index -> (opening, thread)
        self._starts = 0
        self.openings = 0

    def open(self, *, stop_first: bool) -> DriverSession:
        """Return the GPUs of a new session; raises NvmlError if the driver cannot be opened."""
        if stop_first:
            self.close()
        self._nvml.start()
        self._starts += 1
        self.openings += 1
        driver = self._nvml.driver_version()
        try:
            cuda = self._nvml.cuda_version()
        except NvmlError:
            cuda = ""
        count = self._nvml.device_count()
        results = self._find_all(range(min(count, GPUS_MAX)), driver, cuda)
        found = [result for result in results.values() if isinstance(result, FoundDevice)]
        unknown = Identity("", "", "")
        problems = [
            (FoundDevice(None, DeviceFacts(index, unknown, driver, cuda)), result)
            for index, result in results.items()
            if isinstance(result, NvmlError)
        ]
        return DriverSession(
            tuple(found), tuple(problems), tuple(self._finders), max(0, count - GPUS_MAX), self._watch(found)
        )

    def searching_ns(self) -> dict[int, int]:
        """Return index -> how long the search has taken, for each GPU that has not answered."""
        now = self._clock.monotonic_ns()
        since = {index: worker.busy_since_ns for index, (_, worker) in self._finders.items()}
        return {index: now - begun for index, begun in since.items() if begun is not None}

    def is_any_hanging(self) -> bool:
        """Return whether a search for a GPU has not returned."""
        return any(worker.busy_since_ns is not None for _, worker in self._finders.values())

    def abandon(self) -> None:
        """Let each hung search end its thread when it returns; do not open the driver after this."""
        for _, worker in list(self._finders.values()):
            worker.stop(0.0)

    def late(self) -> list[FoundDevice]:
        """Return the GPUs that answered after the opening was over, without those of an earlier opening."""
        results = {index: (opening, worker.result()) for index, (opening, worker) in self._finders.items()}
        found: list[FoundDevice] = []
        for index, (opening, result) in results.items():
            if result is not None:
                self._finders.pop(index)[1].stop(0.0)
                if isinstance(result, FoundDevice) and opening == self.openings:
                    found.append(result)
        return found

    def _find_all(self, indices: range, driver: str, cuda: str) -> dict[int, FoundDevice | Exception]:
        self.late()
        asked: dict[int, DriverThread[FoundDevice]] = {}
        for index in indices:
            if index not in self._finders:  # a second search would hang beside the first
                find = partial(self._find, index, driver, cuda)
                asked[index] = DriverThread(f"gpu-find-{index}", find, self._clock, self._returned)
                asked[index].ask()
        with self._returned:
            self._returned.wait_for(lambda: all(w.busy_since_ns is None for w in asked.values()), FIND_SECONDS)
        results: dict[int, FoundDevice | Exception] = {}
        for index, worker in asked.items():
            result = worker.result()
            if result is None:
                self._finders[index] = (self.openings, worker)
            else:
                worker.stop(FIND_SECONDS)
                results[index] = result
        for result in results.values():
            if isinstance(result, Exception) and not isinstance(result, NvmlError):
                raise result
        return results

    def _find(self, index: int, driver: str, cuda: str) -> FoundDevice:
        handle = self._nvml.device(index)
        return FoundDevice(handle, DeviceFacts(index, self._nvml.identity(handle), driver, cuda))

    def close(self) -> None:
        """Stop the driver as often as it was started."""
        while self._starts > 0:
            self._starts -= 1
            self._nvml.stop()

    def _watch(self, found: list[FoundDevice]) -> frozenset[int]:
        handles = [(each.facts.gpu_index, each.handle) for each in found if each.handle is not None]
        if not handles:
            return frozenset()
        try:
            answers = self._nvml.watch(handles)
        except NvmlError:
            return frozenset()
        return frozenset(index for (index, _), answer in zip(handles, answers, strict=True) if answer is None)
