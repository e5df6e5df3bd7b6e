"""Asks the kernel how well the machine's clock follows the time server: offset, error and whether it is synchronized.

The time server's own figures (chronyc, ntpq) are of one program each and cost a process.  The kernel keeps what any of
them told it, and adjtimex(2) with no mode set returns it without any privilege, in two microseconds.  Steps of ranks on
two nodes can be laid side by side only as well as their clocks agree.

The kernel lets the greatest error grow by half a millisecond a second while nobody corrects the clock, and calls it not
synchronized at 16 s; so a machine whose time server is gone says so after nine hours.  The greatest error shows it at
once.

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
"""timex.h: nobody keeps the clock; the offset is in nanoseconds, not microseconds."""

_REST_LONGS = 32
"""Room behind the fields that are read, for all that the kernel writes there: 12 longs and 11 ints of padding."""


class ClockState(NamedTuple):
    """What the kernel knows of its clock; `offset_ns` is what is still to be corrected, ahead or behind."""

    is_synchronized: bool
    offset_ns: int
    estimated_error_ns: int
    max_error_ns: int


ClockReader = Callable[[], ClockState | None]
"""Returns the state of the clock, None where the kernel does not say; raises OSError."""


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
    """Return the state of the machine's clock, None where the C library has no such call.

    Raises:
        OSError: the kernel, or the sandbox around this process, refuses to say.
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
