"""Which rank stands behind a slow link?  Its TCP sockets know: they are busy, and everybody else's only wait.

The timers cannot tell.  In a ring every rank waits for its neighbour, so one slow link makes all ranks wait alike.  But
the kernel counts, for each socket, the time in which it had data that the other side had not acknowledged
(`tcpi_busy_time` of TCP_INFO, linux/tcp.h, since Linux 4.10), and in what part of it the receiver's window or our own
buffer was the limit.  A slow link delays the data one way and the acknowledgements the other, so *all* sockets of the
rank behind it are busy, and one socket of each of its peers.  Hence the sum over a rank's sockets is what stands out.

Read with getsockopt on the numbers in /proc/self/fd, from a thread of ours: the descriptors belong to the job, so
nothing here duplicates, keeps or closes one.  What is not a TCP socket refuses the question, which costs a
microsecond.  Nothing is seen of NVLink, InfiniBand or shared memory, and no figure is given of a process without TCP.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator

__all__ = ["SOCKETS_MAX", "BusySockets", "read_tcp_times"]

SOCKETS_MAX = 4096
"""Descriptors looked at in one reading; a job with more is not worth the time."""

_IPPROTO_TCP, _TCP_INFO, _ESTABLISHED = 6, 11, 1
_INFO_BYTES = 192
_BUSY_OFFSET = 168  # offsetof(struct tcp_info, tcpi_busy_time); then rwnd_limited and sndbuf_limited, each u64 of us


def read_tcp_times() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, ns busy and not limited by the receiver since it was opened) of each TCP socket."""
    info, length = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint()
    for name in os.listdir("/proc/self/fd")[:SOCKETS_MAX]:
        length.value = _INFO_BYTES
        failed = _getsockopt(int(name), _IPPROTO_TCP, _TCP_INFO, info, ctypes.byref(length))
        if failed or length.value < _INFO_BYTES or info.raw[0] != _ESTABLISHED:
            continue
        busy, receiver, _ = struct.unpack_from("QQQ", info.raw, _BUSY_OFFSET)
        yield int(name), max(0, busy - receiver) * 1000


class BusySockets:
    """How busy this process's TCP sockets were since the last look."""

    def __init__(
        self, now_ns: Callable[[], int], read: Callable[[], Iterator[tuple[int, int]]] = read_tcp_times
    ) -> None:
        self._now_ns = now_ns
        self._read = read
        self._last: dict[int, int] | None = None
        self._last_ns = 0

    def ratio(self) -> float | None:
        """Return busy time of all sockets added up over time; None on the first look and without any socket."""
        now, before = self._now_ns(), self._last
        try:
            self._last = dict(self._read())
        except OSError:
            self._last = None
        elapsed, self._last_ns = now - self._last_ns, now
        if not before or not self._last or elapsed <= 0:
            return None
        # A number that fell is another socket under the same descriptor.
        gone = ((busy, before.get(fd, 0)) for fd, busy in self._last.items())
        return sum(busy - old if busy >= old else busy for busy, old in gone) / elapsed


def _load() -> Callable[..., int]:
    function = ctypes.CDLL(None).getsockopt
    function.restype = ctypes.c_int
    return function


_getsockopt = _load()
