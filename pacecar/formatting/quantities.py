"""Formats numbers, shares, sizes, speeds and times for people; a missing value is a dash.

    12.3 %   3.4 MiB   12.3 GB/s   660.55 ms        sizes by powers of two, rates by powers of ten
    12%      3.4M      12.3G       661ms            `short_...`: at most six cells, for narrow columns

A column has one unit, chosen by `unit_for`, so that its numbers can be compared.  Times are nanoseconds, except in
`short_duration`, which takes seconds as in the daemon's document.

Left out: values of knobs (`pacecar.knobs.setting`).  Imports only the standard library, because every command loads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    "DASH", "DisplayUnit", "bandwidth", "duration", "gibibytes", "gigabits", "large_count", "percent", "plural",
    "short_count", "short_duration", "short_percent", "short_size", "size_text", "unit_for",
]  # fmt: skip

DASH = "-"


def percent(ratio: float | None, *, digits: int = 1, signed: bool = False) -> str:
    """Return 0.123 as "12.3 %"."""
    return DASH if ratio is None else f"{ratio * 100:{'+' if signed else ''}.{digits}f} %"


def plural(count: int, noun: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def large_count(count: int) -> str:
    """Return 42000000 as "42 M", by powers of 1000."""
    for factor, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= factor:
            return f"{count / factor:.3g} {letter}"
    return str(count)


def size_text(size_bytes: int | None) -> str:
    """Return 1536 as "1.5 KiB"."""
    if size_bytes is None:
        return DASH
    for name, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {name}"
    return f"{size_bytes} B"


def gibibytes(size_bytes: float) -> str:
    """Return a size in whole GiB: "80 GiB"."""
    return f"{size_bytes / 2**30:.0f} GiB"


def gigabits(bits_per_second: float) -> str:
    """Return the speed of a link as vendors write it: "200 Gbit/s"."""
    return f"{bits_per_second / 1e9:g} Gbit/s"


def bandwidth(bytes_per_second: float | None) -> str:
    """Return "12.3 GB/s"."""
    if bytes_per_second is None:
        return DASH
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    if bytes_per_second >= 1e6:
        return f"{bytes_per_second / 1e6:.1f} MB/s"
    return f"{bytes_per_second / 1e3:.1f} kB/s"


class DisplayUnit(NamedTuple):
    """A unit of time, and how many decimals it is shown with."""

    name: str
    ns: float
    digits: int

    def text(self, value_ns: float | None) -> str:
        """Return "12.34 ms"; use a smaller unit if the value would round to zero."""
        if value_ns is None:
            return DASH
        if value_ns and abs(value_ns) / self.ns < 0.5 * 10**-self.digits and self.name != "ns":
            return duration(value_ns)
        return f"{self.number(value_ns)} {self.name}"

    def number(self, value_ns: float) -> str:
        """Return "12.34", for a table whose title names the unit."""
        return f"{value_ns / self.ns:.{self.digits}f}"


_UNITS = (DisplayUnit("s", 1e9, 3), DisplayUnit("ms", 1e6, 2), DisplayUnit("us", 1e3, 1), DisplayUnit("ns", 1, 0))


def unit_for(values_ns: Iterable[float | None]) -> DisplayUnit:
    """Return the unit in which the largest of `values_ns` has one to four digits before the decimal point."""
    largest = max((abs(value) for value in values_ns if value is not None), default=0)
    for unit in _UNITS[:-1]:
        if largest >= unit.ns * (10 if unit.name == "s" else 1):
            return unit
    return _UNITS[-1]


def duration(value_ns: float | None) -> str:
    """Return a time in the unit that fits it."""
    return unit_for([value_ns]).text(value_ns)


def short_count(value: float | None, unit: str = "") -> str:
    """Return 1234567 as "1.2M"; `unit` follows."""
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P"), unit)


def short_size(size_bytes: float | None) -> str:
    """Return bytes as "93.8G", by powers of 1024 as in htop."""
    return _scaled(size_bytes, 1024.0, ("B", "K", "M", "G", "T", "P"), "")


def _scaled(value: float | None, base: float, signs: tuple[str, ...], unit: str) -> str:
    if value is None:
        return DASH
    left, step = float(value), 0
    while abs(left) >= base and step < len(signs) - 1:
        left, step = left / base, step + 1
    digits = 0 if abs(left) >= 100 or (step == 0 and left == int(left)) else 1
    return f"{left:.{digits}f}{signs[step]}{unit}"


def short_percent(ratio: float | None, *, digits: int = 0, signed: bool = False) -> str:
    """Return 0.43 as "43%"."""
    return DASH if ratio is None else f"{ratio * 100:{'+' if signed else ''}.{digits}f}%"


_SHORT_UNITS = (
    (1e-3, 1e6, "us", 0),
    (0.1, 1e3, "ms", 1),
    (1.0, 1e3, "ms", 0),
    (120.0, 1.0, "s", 1),
    (7200.0, 1 / 60, "min", 0),
)


def short_duration(seconds: float | None) -> str:
    """Return seconds in the unit that fits: "12.3ms"."""
    if seconds is None:
        return DASH
    for limit, factor, unit, digits in _SHORT_UNITS:
        if abs(seconds) < limit:
            return f"{seconds * factor:.{digits}f}{unit}"
    return f"{seconds / 3600:.1f}h"
