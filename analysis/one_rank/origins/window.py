"""Cuts a trace to the window that its tables are about.

Device rows count as far as they run in the window.  Calls of the host count where they began in it.  Where the window
is the whole trace, from the first work to the last, all of them do: what launched the first kernel began before it.

Sums of durations count an instant at which two rows run twice.  So each instant of busy time is also charged to exactly
one row: as in the ledger, compute goes before communication before copies, and among rows of that kind the first to
begin.  The charged times of a heading's rows add up to the heading.

    stream 7    aaaaaa..bbbb
    stream 9    ..nnnnnnnn..     compute a, b; communication n
    charged     aaaaaannbbbb

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import WORKS, Trace
from pacecar.ledger.intervals import EMPTY, Intervals, union

from ..collectives import coverage

__all__ = ["TableWindow", "charged_ns", "window_of"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableWindow:
    """The window of some tables.

    `start_ns`, `end_ns`, `duration_ns` and `charged_ns` are of the device rows, cut to the window; `rows` are those in
    it, `has_host` says which host rows are.
    """

    start_ns: Index
    end_ns: Index
    duration_ns: Index
    charged_ns: Index
    rows: Index
    has_host: NDArray[np.bool_]


def window_of(trace: Trace, start_ns: Index, end_ns: Index, host: tuple[int, int] | None) -> TableWindow:
    """Return the window with these starts and ends of device rows, and host rows that begin in `host`, or all."""
    rows = np.flatnonzero(end_ns > start_ns)
    begins = trace.host_rows.start_ns
    inside = np.ones(len(begins), dtype=np.bool_) if host is None else (begins >= host[0]) & (begins < host[1])
    charged = np.zeros(len(start_ns), dtype=np.int64)
    # Cutting keeps the order of starts, but several rows may begin with the window.
    charged[rows] = charged_ns(start_ns[rows], end_ns[rows], trace.device.work[rows])
    return TableWindow(start_ns, end_ns, end_ns - start_ns, charged, rows, inside)


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
