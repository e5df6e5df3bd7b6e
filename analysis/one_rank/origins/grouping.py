"""Groups rows by several columns of integers, and numbers the operators, shapes and modules that rows came from.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import NONE

from .call_inputs import CallInputs, inputs_of
from .calls import Calls
from .nesting import values_at

__all__ = ["Groups", "Origin", "Origins", "longest_of", "origins_of"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows with equal values in all columns; `number` is each row's group, `keys` the groups' values by column."""

    number: Index
    keys: tuple[list[int], ...]
    _order: Index
    _bounds: Index

    @classmethod
    def of(cls, *columns: Index) -> Groups:
        """Return the groups of rows, ordered by their values."""
        order = np.lexsort(columns[::-1])
        count = len(order)
        new = np.zeros(count, dtype=np.bool_)
        for column in columns:
            ordered = column[order]
            new[1:] |= ordered[1:] != ordered[:-1]
        new[:1] = True
        number = np.empty(count, dtype=np.int64)
        number[order] = np.cumsum(new) - 1
        firsts = order[np.flatnonzero(new)]
        bounds = np.append(np.flatnonzero(new), count)
        return cls(number, tuple(column[firsts].tolist() for column in columns), order, bounds)

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self._bounds) - 1

    def rows(self, group: int) -> Index:
        """Return the places of a group's rows."""
        found: Index = self._order[self._bounds[group] : self._bounds[group + 1]]
        return found


def longest_of(groups: Groups, durations: Index, values: Index) -> Index:
    """For each group, return the value of its longest row; the first of equally long ones."""
    order = np.lexsort((np.arange(len(durations)), -durations, groups.number))
    firsts = np.searchsorted(groups.number[order], np.arange(groups.count))
    found: Index = values[order[firsts]] if len(order) else np.empty(0, dtype=np.int64)
    return found


class Origin(NamedTuple):
    """An operator with one list of shapes in one module; None for what is not known."""

    operator: str | None
    shapes: str | None
    types: str | None
    module: str | None


class Origins(NamedTuple):
    """The distinct origins, each operator row's number among them (NONE for other rows), and inputs by signature."""

    texts: list[Origin]
    of_host: Index
    inputs: tuple[CallInputs, ...]


def origins_of(calls: Calls) -> Origins:
    """Return the origins; the last of `texts` stands for rows without an operator."""
    host = calls.trace.host_rows
    details = calls.trace.details
    inputs = tuple(inputs_of(signature) for signature in details.signatures) if details is not None else ()
    texts: dict[tuple[str | None, str | None], int] = {}
    # Signatures that differ only in values have the same shapes and count as one.
    shown = np.array(
        [texts.setdefault((each.shapes_text, each.types_text), len(texts)) for each in inputs] or [NONE],
        dtype=np.int64,
    )
    shape = values_at(shown, calls.signature.astype(np.int64))
    rows = np.flatnonzero(calls.is_operator)
    groups = Groups.of(host.name[rows].astype(np.int64), shape[rows], calls.module[rows])
    listed = [*texts, (None, None)]
    origins = []
    for name, its, module in zip(*groups.keys, strict=True):
        shapes, types = listed[its]  # the last, without shapes, stands for NONE
        path = calls.modules[module] if module != NONE else None
        origins.append(Origin(calls.trace.names[name], shapes, types, path))
    of_host = np.full(len(host.start_ns), NONE, dtype=np.int64)
    of_host[rows] = groups.number
    return Origins([*origins, Origin(None, None, None, None)], of_host, inputs)
