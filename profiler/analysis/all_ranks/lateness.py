"""Counts how long ranks waited for each other in collectives, and for whom.

The rank with the most communication is not the slow one but the one that waits; the last to come causes the waits of
all the others.  So each collective's waiting is charged once, to the rank that came last, unless it was late by less
than clocks and launches scatter.  This says who was waited for, which is a fact; who is to blame, and for what, is
another question (`verdict_report`): a rank may be late because another held it up.

Pure: arrivals in, counts out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .clocks import Clocks, doubts_of
from .collective_arrivals import Arrivals

__all__ = ["LATE_NS_MIN", "Lateness", "lateness_of"]

LATE_NS_MIN = 20_000
"""The least lateness that counts: a kernel launch takes about 5 us, and equal ranks scatter by a few of them."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """By place in the list of traces: how long others waited for it, and in how many of its collectives."""

    caused_wait_ns: NDArray[np.int64]
    late_count: NDArray[np.int64]
    collectives: NDArray[np.int64]


def lateness_of(groups: Sequence[Arrivals], clocks: Clocks, traces: int) -> Lateness:
    """Return how long ranks waited for each other."""
    caused, late_count, collectives = (np.zeros(traces, dtype=np.int64) for _ in range(3))
    for group in groups:
        places = np.array(group.group.traces, dtype=np.int64)
        collectives[places] += group.has.sum(axis=0)
        doubt = doubts_of(group.group, clocks)
        late = np.flatnonzero(group.lateness_ns > np.maximum(LATE_NS_MIN, doubt[group.late]))
        culprits = places[group.late[late]]
        np.add.at(late_count, culprits, 1)
        np.add.at(caused, culprits, group.wait_ns[late].sum(axis=1))
    return Lateness(caused, late_count, collectives)
