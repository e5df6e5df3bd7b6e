"""Parses sizes as users type them (8, 64K, 1.5M, 1G; powers of two, as in nccl-tests), and lists those to measure.

Pure.
"""

from __future__ import annotations

import math
import re

from pacecar.formatting.quantities import size_text

__all__ = ["SIZES_MAX", "SIZE_BYTES_MAX", "SizeError", "parse_size", "steps"]

SIZE_BYTES_MAX = 16 << 30
"""nccl-tests' tables end at 8 or 16 GiB; checking the result takes two and a half times that memory."""

SIZES_MAX = 64
"""Rows of one table; a factor such as 1.01 is a typing error."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)


class SizeError(ValueError):
    """The text is not a size; the message quotes it."""


def parse_size(text: str) -> int:
    """Return the bytes of `text`; raises SizeError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise SizeError(f"{text!r} is not a size: write bytes, or 64K, 1M, 1G")
    size = round(float(found[1]) * _UNITS[found[2].upper()])
    if not 1 <= size <= SIZE_BYTES_MAX:
        raise SizeError(f"{text!r} is out of range: 1 to {size_text(SIZE_BYTES_MAX)}")
    return size


def steps(low: int, high: int, factor: float) -> list[int]:
    """Return the sizes from `low` to `high`, each `factor` times the previous one; raises SizeError."""
    if low > high:
        raise SizeError(f"the smallest size, {size_text(low)}, is above the largest, {size_text(high)}")
    if not 1 < factor < math.inf:
        raise SizeError(f"the factor between two sizes must be above 1, not {factor:g}")
    sizes, size = [low], float(low)
    while (size := size * factor) <= high:
        if round(size) > sizes[-1]:
            sizes.append(round(size))
        if len(sizes) > SIZES_MAX:
            raise SizeError(f"more than {SIZES_MAX} sizes: use a larger factor")
    return sizes
