"""Cuts a trace to the window that its tables are about.

Device rows count as far as they run in the window.  Calls of the host count where they began in it.  Where the window
is the whole trace, from the first work to the last, all of them do: what launched the first kernel began before it.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....trace.columns import Trace
from .charging import charged_ns

__all__ = ["TableWindow", "window_of"]

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
