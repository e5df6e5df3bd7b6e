"""Reads from the kernel how long this rank's sockets were busy and how long it and the machine waited for processors.

Three totals of the kernel are read a few times a second, and their growth is taken over the time between:

    sockets    tcpi_busy_time of the rank's TCP sockets (see `sockets`)
    turn       how long the training thread was runnable and did not run (proc(5), /proc/PID/task/TID/schedstat)
    machine    for how long any task of the machine waited for a processor (/proc/pressure/cpu, "some")

A ratio over less than READ_SECONDS would be noise: several ranges are cut at once, a fraction of a millisecond apart.
Ranges that are cut sooner share the last reading, which is of the time that they ended in.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from pacecar.clock import NS_PER_SECOND

from .phase_sums_message import HostPressure
from .tcp_busy_time import BusySockets

__all__ = ["READ_SECONDS", "HostPressureReader", "parse_pressure", "parse_schedstat"]

READ_SECONDS = 0.1

_TEXT_BYTES = 256
"""Both files are one or two short lines."""


def parse_schedstat(text: bytes) -> int:
    """Return the ns that a task waited for a processor: the second of three numbers (proc(5)).

    Raises:
        ValueError: it is not that.
    """
    fields = text.split()
    if len(fields) != 3:
        raise ValueError(f"schedstat has {len(fields)} numbers: {text!r}")
    return int(fields[1])


def parse_pressure(text: bytes) -> int:
    """Return the ns in which some task waited: `total`, in us, of the line "some" (Documentation/accounting/psi.rst).

    Raises:
        ValueError: it is not that.
    """
    line = text.partition(b"\n")[0]
    if not line.startswith(b"some ") or b" total=" not in line:
        raise ValueError(f"no total of some: {line!r}")
    return int(line.rpartition(b" total=")[2]) * 1000


class HostPressureReader:
    """Reads the three totals for one thread; `open` and `close` belong on the thread that reads."""

    def __init__(self, now_ns: Callable[[], int], *, sockets: BusySockets | None = None, proc: str = "/proc") -> None:
        self._now_ns = now_ns
        self._sockets = sockets or BusySockets(now_ns)
        self._proc = proc
        self._turn: int | None = None
        self._pressure: int | None = None
        self._last: tuple[int | None, int | None, int | None] | None = None
        self._last_ns = 0
        self._latest = HostPressure()

    def open(self, native_id: int) -> None:
        """Open the kernel's files for the thread `native_id` and keep them open; a missing one is left out."""
        self._turn = _open(f"{self._proc}/self/task/{native_id}/schedstat")
        self._pressure = _open(f"{self._proc}/pressure/cpu")
        self.latest()

    def latest(self, seconds: float = READ_SECONDS) -> HostPressure:
        """Return the ratios since the last reading; the last answer again if that is less than `seconds` ago."""
        now = self._now_ns()
        if self._last is not None and now - self._last_ns < seconds * NS_PER_SECOND:
            return self._latest
        totals = self._sockets.total_ns(), _read(self._turn, parse_schedstat), _read(self._pressure, parse_pressure)
        if self._last is not None:
            ratios = [
                None if new is None or old is None else max(0, new - old) / (now - self._last_ns)
                for new, old in zip(totals, self._last, strict=True)
            ]
            self._latest = HostPressure(*ratios)
        self._last, self._last_ns = totals, now
        return self._latest

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._turn, self._pressure):
            if descriptor is not None:
                os.close(descriptor)
        self._turn = self._pressure = None


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(descriptor: int | None, parse: Callable[[bytes], int]) -> int | None:
    if descriptor is None:
        return None
    try:
        return parse(os.pread(descriptor, _TEXT_BYTES, 0))
    except (OSError, ValueError):  # the thread ended, or the kernel writes another format
        return None
