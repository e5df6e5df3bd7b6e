"""What has really been counted, when the driver's counter wraps, or starts again?

A counter that falls is read by Prometheus as one that started again, so a counter of 32 bits that wraps loses the rest
of its last round each time, which is most of it.  The other way round is worse: a driver that was reloaded starts at
zero, and to take that for a wrap invents four billion bytes.  So a fall is a wrap only when it crosses from the upper
half of the counter's range to the lower one, and only within one life of the driver; every other fall is a new start.

Some counters are declared with 64 bits and wrap at 32 all the same (nvml.h says of fields 197 and 198 only that the
value can wrap), so both widths are tried.
"""

from __future__ import annotations

__all__ = ["Counter"]


class Counter:
    """Adds up a driver's counter; `total` never falls."""

    def __init__(self) -> None:
        self.total = 0
        self._last = 0
        self._may_be_anew = False

    def take(self, value: int, bits: int = 64) -> int:
        """Return the total after the driver's counter was read as `value`, of a type with `bits` bits."""
        if value >= self._last:
            self.total += value - self._last
        else:
            round_length = None if self._may_be_anew else _wrapped_at(self._last, value, bits)
            self.total += value if round_length is None else value + round_length - self._last
        self._last, self._may_be_anew = value, False
        return self.total

    def restart(self) -> None:
        """Note that the driver may have been loaded anew: a fall before the next value is no wrap."""
        self._may_be_anew = True


def _wrapped_at(last: int, value: int, bits: int) -> int | None:
    """Return where a counter wrapped on its way from `last` down to `value`; None: it started again."""
    for width in sorted({32, bits}):
        half = 1 << (width - 1)
        if width <= bits and value < half <= last < 2 * half:
            return 2 * half
    return None
