"""Formats times, sizes and rates, with one unit for a column so that its numbers can be compared.

    660.55 ms   3.4 MiB   12.3 GB/s         sizes by powers of two, rates by powers of ten, as nccl-tests writes them

Names of kernels are cleaned here: a trace must not be able to control a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pacecar.formatting.plain_text import clean

__all__ = ["DisplayUnit", "amount", "bandwidth", "duration", "kernel_name", "unit_for"]


class DisplayUnit(NamedTuple):
    """A unit of time and how many digits after the point are worth showing."""

    name: str
    ns: float
    digits: int

    def text(self, value_ns: float | None) -> str:
        """Return "12.34 ms"; a dash for what is unknown, and a smaller unit for what would round to zero."""
        if value_ns is None:
            return "-"
        if value_ns and abs(value_ns) / self.ns < 0.5 * 10**-self.digits and self.name != "ns":
            return duration(value_ns)
        return f"{value_ns / self.ns:.{self.digits}f} {self.name}"


_UNITS = (DisplayUnit("s", 1e9, 3), DisplayUnit("ms", 1e6, 2), DisplayUnit("us", 1e3, 1), DisplayUnit("ns", 1, 0))


def unit_for(values_ns: Iterable[float | None]) -> DisplayUnit:
    """Return the unit in which the largest of `values_ns` has one to four digits before the point."""
    largest = max((abs(value) for value in values_ns if value is not None), default=0)
    for unit in _UNITS[:-1]:
        if largest >= unit.ns * (10 if unit.name == "s" else 1):
            return unit
    return _UNITS[-1]


def duration(value_ns: float | None) -> str:
    """Return a time in its own unit."""
    return unit_for([value_ns]).text(value_ns)


def amount(size_bytes: int | None) -> str:
    """Return "3.4 MiB"."""
    if size_bytes is None:
        return "-"
    for name, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {name}"
    return f"{size_bytes} B"


def bandwidth(bytes_per_second: float | None) -> str:
    """Return "12.3 GB/s"."""
    if bytes_per_second is None:
        return "-"
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    if bytes_per_second >= 1e6:
        return f"{bytes_per_second / 1e6:.1f} MB/s"
    return f"{bytes_per_second / 1e3:.1f} kB/s"


def kernel_name(name: str) -> str:
    """Return a kernel's name without the return type that C++ puts before a template's."""
    return clean(name).removeprefix("void ")
