"""Charges the device's busy time to its rows, each instant to exactly one, by the ledger's order of kinds.

Sums of durations count an instant at which two rows run twice, so they do not say what a kernel costs.  The ledger
charges an instant to compute before communication before copies.  Here of several rows of that kind the one that began
first gets it, so that the rows of a heading add up to the heading.

    stream 7    aaaaaa..bbbb
    stream 9    ..nnnnnnnn..     compute a, b; communication n
    charged     aaaaaannbbbb

Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....ledger.intervals import EMPTY, Intervals, union
from ....trace.columns import WORKS
from ..collectives import coverage

__all__ = ["charged_ns"]

Index = NDArray[np.int64]


def charged_ns(start_ns: Index, end_ns: Index, work: NDArray[np.uint8]) -> Index:
    """Return how much of each row's time is charged to it; the rows are sorted by start, `work` indexes WORKS."""
    charged = np.zeros(len(start_ns), dtype=np.int64)
    above: Intervals = EMPTY
    for kind in range(len(WORKS)):
        rows = np.flatnonzero((work == kind) & (end_ns > start_ns))
        if len(rows) == 0:
            continue
        start, end = start_ns[rows], end_ns[rows]
        reach = np.maximum.accumulate(end)
        begin = np.maximum(start, np.concatenate((start[:1], reach[:-1])))
        begin = np.minimum(begin, np.maximum(end, start))
        hidden = coverage(above, end) - coverage(above, begin)
        charged[rows] = end - begin - hidden
        above = union(np.concatenate((above, np.stack((start, end), axis=1))))
    return charged
