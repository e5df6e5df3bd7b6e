"""Which GPUs are there, and how does the daemon get at them?  Open the driver, count, take handles.

A session ends when the driver is reloaded or a GPU vanishes, and then everything in it is void: handles, event set,
sample buffers.  NVML counts its initializations, so each `start` needs its `stop`.  But a shutdown waits for locks
that a hung call may hold, so while a call hangs the driver is started once more without being stopped, and the debt is
paid at the next opening that finds nobody hanging.

Left out on purpose: deciding when to open.
"""

from __future__ import annotations

from typing import NamedTuple

from pacecar.monitor.gpu.device import Facts
from pacecar.monitor.gpu.driver import Handle, Nvml, NvmlError

__all__ = ["GPUS_MAX", "Found", "Session", "Sessions"]

GPUS_MAX = 64


class Found(NamedTuple):
    """A GPU that answered when the driver was opened."""

    handle: Handle
    facts: Facts


class Session(NamedTuple):
    """What an opening found; `problems` are (index, error) of GPUs that did not answer."""

    found: tuple[Found, ...]
    problems: tuple[tuple[int, NvmlError], ...]
    left_out: int
    has_events: bool


class Sessions:
    """Opens the driver, again and again.  Used by one thread at a time."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._starts = 0
        self.openings = 0

    def open(self, *, stop_first: bool) -> Session:
        """Return the GPUs of a new session; raises NvmlError when the driver cannot be opened."""
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
        found: list[Found] = []
        problems: list[tuple[int, NvmlError]] = []
        for index in range(min(count, GPUS_MAX)):
            try:
                handle = self._nvml.device(index)
                found.append(Found(handle, Facts(index, self._nvml.identity(handle), driver, cuda)))
            except NvmlError as error:
                problems.append((index, error))
        return Session(tuple(found), tuple(problems), max(0, count - GPUS_MAX), self._watch(found))

    def close(self) -> None:
        """Let go of the driver as often as it was started."""
        while self._starts > 0:
            self._starts -= 1
            self._nvml.stop()

    def _watch(self, found: list[Found]) -> bool:
        if not found:
            return False
        try:
            answers = self._nvml.watch([(each.facts.gpu_index, each.handle) for each in found])
        except NvmlError:
            return False
        return any(answer is None for answer in answers)
