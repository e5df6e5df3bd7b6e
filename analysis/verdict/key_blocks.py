"""Computes something of many ranks' pieces that are alike, some pieces at a time, so that memory has a bound.

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["in_blocks"]

Index = NDArray[np.int64]

PIECES_MAX = 2**21
"""The most pieces of all ranks at a time; sorting them takes some 100 bytes each."""

SAMPLED = 64
"""Of so many pieces one is looked at to divide the keys evenly."""


def in_blocks(
    function: Callable[[Sequence[Index], Sequence[Index]], list[Index]],
    keys: Sequence[Index],
    values: Sequence[Index],
) -> list[Index]:
    """Return `function(keys, values)`, a column for each rank, where the result of a key depends on that key alone.

    `keys` and `values` are read again for each block, so they may be made when they are read.
    """
    blocks = -(-sum(len(key) for key in keys) // PIECES_MAX)
    if blocks < 2:
        return function(list(keys), list(values))
    sample = np.sort(np.concatenate([key[::SAMPLED] for key in keys]))
    bounds = sample[np.arange(1, blocks) * len(sample) // blocks].tolist()
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    found: list[Index] = []
    for low, high in itertools.pairwise([least, *bounds, most]):
        chosen = [np.flatnonzero((key >= low) & (key < high)) for key in keys]
        its_keys = [key[at] for key, at in zip(keys, chosen, strict=True)]
        its_values = [value[at] for value, at in zip(values, chosen, strict=True)]
        parts = function(its_keys, its_values)
        found = found or [np.empty(len(key), dtype=parts[0].dtype) for key in keys]
        for mine, at, part in zip(found, chosen, parts, strict=True):
            mine[at] = part
    return found
