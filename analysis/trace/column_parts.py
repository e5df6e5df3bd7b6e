"""Collects columns of numbers batch by batch, and numbers distinct values.

Left out: what the columns are (`columns`, `details.detail_columns`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .columns import NONE

__all__ = ["Column", "Columns", "Numbers", "whole_column"]

Column = NDArray[np.int64]

Thing = TypeVar("Thing")


class Numbers(dict[Thing, int]):
    """Numbers distinct things in the order of their first occurrence."""

    def __missing__(self, thing: Thing) -> int:
        number = self[thing] = len(self)
        return number


class Columns:
    """Arrays of a few columns, batch by batch."""

    def __init__(self, *names: str) -> None:
        self._parts: dict[str, list[NDArray[np.generic]]] = {name: [] for name in names}

    def add(self, **parts: NDArray[np.generic]) -> None:
        """Add one batch's arrays."""
        for name, part in parts.items():
            self._parts[name].append(part)

    def pop(self, name: str, dtype: type[np.generic] = np.int64) -> Column:
        """Return one column and free its parts; each column can be popped once."""
        parts = self._parts.pop(name)
        return cast(Column, np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype=dtype))


def whole_column(values: Iterable[int]) -> Column:
    """Return integers as a column; one that does not fit 64 bits becomes NONE."""
    listed = list(values)
    try:
        return np.array(listed, dtype=np.int64)
    except OverflowError:
        return np.array([value if abs(value) < 1 << 63 else NONE for value in listed], dtype=np.int64)
