"""Reads from the kernel how long this rank's sockets were busy and how long it and the machine waited for processors.

Three totals of the kernel are read a few times a second; a ratio is their growth over the time between:

    sockets    tcpi_busy_time of the rank's TCP sockets (`BusySockets`)
    turn       how long the training thread was runnable but did not run (proc(5), /proc/PID/task/TID/schedstat)
    machine    how long any task of the machine waited for a processor (/proc/pressure/cpu, "some")

Several ranges may be cut a fraction of a millisecond apart, and a ratio over less than READ_SECONDS would be noise.
Such ranges share the last reading.

Timers cannot show which rank is behind a slow link: in a ring every rank waits for its neighbour, so all wait alike.
But for each socket the kernel counts the time with unacknowledged data (`tcpi_busy_time` of TCP_INFO, linux/tcp.h,
since Linux 4.10), and the part of it in which the receiver's window or the own buffer was the limit.  A slow link
delays the data one way and the acknowledgements the other, so *all* sockets of the rank behind it are busy, but only
one socket of each of its peers.  Hence the sum over a rank's sockets stands out.

The sockets are read with getsockopt on the numbers in /proc/self/fd.  The descriptors belong to the job, so they are
never duplicated or closed here.  A descriptor that is not a TCP socket returns an error, so the numbers of TCP sockets
are reused for FIND_SECONDS.  If a number means something else by then, it returns an error or counts from a smaller
value.  NVLink, InfiniBand and shared memory are not visible, and a process without TCP has no figure.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable

from pacecar.clock import NS_PER_SECOND
from pacecar.kernel_files.processors import parse_pressure_line, run_delay_ns

from .exchange.phase_sums_message import HostPressure

__all__ = [
    "FIND_SECONDS",
    "READ_SECONDS",
    "SOCKETS_MAX",
    "BusySockets",
    "HostPressureReader",
    "find_descriptors",
    "parse_pressure",
    "read_tcp_times",
]

READ_SECONDS = 0.1

_TEXT_BYTES = 256
"""Both files are one or two short lines."""


SOCKETS_MAX = 4096
"""The most descriptors checked in one reading; a job with more is not worth the time."""

FIND_SECONDS = 5.0
"""Time between two searches for sockets: a search of 200 descriptors costs 0.2 ms, reading ten sockets 20 us."""

_INFO_BYTES = 192

_BUSY_OFFSET = 168  # offsetof(struct tcp_info, tcpi_busy_time); then rwnd_limited and sndbuf_limited, each u64 of us


def parse_pressure(text: bytes) -> int | None:
    """Return the ns in which some task waited; None for another beginning, ValueError without a number."""
    line = text.partition(b"\n")[0].decode("ascii", "replace")
    if not line.startswith("some "):
        return None
    return parse_pressure_line(line)[1]


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
        totals = self._sockets.total_ns(), _read(self._turn, run_delay_ns), _read(self._pressure, parse_pressure)
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


def _read(descriptor: int | None, parse: Callable[[bytes], int | None]) -> int | None:
    if descriptor is None:
        return None
    try:
        return parse(os.pread(descriptor, _TEXT_BYTES, 0))
    except (OSError, ValueError):  # the thread ended, or the kernel writes another format
        return None


_IPPROTO_TCP, _TCP_INFO, _ESTABLISHED = 6, 11, 1


def find_descriptors() -> list[int]:
    """Return the open descriptors of this process, at most SOCKETS_MAX."""
    return [int(name) for name in os.listdir("/proc/self/fd")[:SOCKETS_MAX]]


def read_tcp_times(descriptors: Iterable[int]) -> dict[int, int]:
    """Return, for each TCP socket, descriptor -> ns busy and not limited by the receiver since it was opened."""
    found = {}
    info, length = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint()
    for descriptor in descriptors:
        length.value = _INFO_BYTES
        failed = _getsockopt(descriptor, _IPPROTO_TCP, _TCP_INFO, info, ctypes.byref(length))
        if failed or length.value < _INFO_BYTES or info.raw[0] != _ESTABLISHED:
            continue
        busy, receiver, _ = struct.unpack_from("QQQ", info.raw, _BUSY_OFFSET)
        found[descriptor] = max(0, busy - receiver) * 1000
    return found


class BusySockets:
    """The busy time of all TCP sockets of this process."""

    def __init__(
        self,
        now_ns: Callable[[], int],
        *,
        find: Callable[[], list[int]] = find_descriptors,
        read: Callable[[Iterable[int]], dict[int, int]] = read_tcp_times,
    ) -> None:
        self._now_ns = now_ns
        self._find = find
        self._read = read
        self._known: Iterable[int] = ()
        self._found_ns: int | None = None
        self._last: dict[int, int] = {}
        self._total_ns = 0

    def total_ns(self) -> int | None:
        """Return their busy time since the first reading; None if there are none."""
        now = self._now_ns()
        try:
            if self._found_ns is None or now - self._found_ns >= FIND_SECONDS * NS_PER_SECOND:
                self._known, is_first, self._found_ns = self._find(), self._found_ns is None, now
            else:
                is_first = False
            current = self._read(self._known)
        except OSError:
            return None
        for descriptor, busy in current.items():
            # A new socket was opened since then; a smaller time belongs to another socket with the same descriptor.
            old = self._last.get(descriptor, 0)
            if not is_first:
                self._total_ns += busy - old if busy >= old else busy
        self._last, self._known = current, list(current)
        return self._total_ns if current else None


def _load() -> Callable[..., int]:
    function = ctypes.CDLL(None).getsockopt
    function.restype = ctypes.c_int
    return function


_getsockopt = _load()
