"""Asks the kernel how well the machine's clock is synchronized: offset, error and state.

Time servers have their own figures (chronyc, ntpq), but each costs a process.  The kernel keeps what any of them
reported, and adjtimex(2) with no mode set returns it without privileges in two microseconds.  Steps of ranks on two
nodes can be compared only as well as their clocks agree.

While nothing corrects the clock, the kernel's maximum error grows by half a millisecond a second, and at 16 s it calls
the clock unsynchronized.  So the state shows a lost time server after nine hours, the maximum error at once.

Left out: setting the clock, and leap seconds.

Source: adjtimex(2); include/uapi/linux/timex.h; kernel/time/ntp.c.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ClockReader", "ClockState", "read_clock"]

STA_UNSYNC = 0x0040
STA_NANO = 0x2000
"""timex.h: the clock is not synchronized; the offset is in nanoseconds, not microseconds."""

_REST_LONGS = 32
"""Room for all fields that the kernel writes after those that are read: 12 longs and 11 ints of padding."""


class ClockState(NamedTuple):
    """The kernel's view of its clock; `offset_ns` is still to be corrected, positive or negative."""

    is_synchronized: bool
    offset_ns: int
    estimated_error_ns: int
    max_error_ns: int


ClockReader = Callable[[], ClockState | None]
"""Returns the state of the clock, None if the kernel does not report it; raises OSError."""


class _Timex(ctypes.Structure):
    """`struct timex` up to the status."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * _REST_LONGS),
    ]


_libc = ctypes.CDLL(None, use_errno=True)


def read_clock() -> ClockState | None:
    """Return the state of the machine's clock, None if the C library has no such call.

    Raises:
        OSError: the kernel, or a sandbox around this process, refuses to answer.
    """
    adjtimex = getattr(_libc, "adjtimex", None)
    if adjtimex is None:
        return None
    timex = _Timex()  # modes 0: nothing is set
    if adjtimex(ctypes.byref(timex)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ClockState(
        is_synchronized=not timex.status & STA_UNSYNC,
        offset_ns=timex.offset * (1 if timex.status & STA_NANO else 1000),
        estimated_error_ns=timex.esterror * 1000,
        max_error_ns=timex.maxerror * 1000,
    )
