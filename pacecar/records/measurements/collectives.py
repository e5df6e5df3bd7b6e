"""Defines the record of what one step's collectives cost, by operation, as an exact window measured them.

Part of `pacecar.records.records`, which is where the rooms import it from.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pacecar.records.ranges import Bytes, Count, Label, Nanoseconds, Rank

__all__ = ["OPERATIONS", "OPERATIONS_MAX", "BackwardWindow", "CollectiveSum", "CollectiveWindow"]

OPERATIONS_MAX = 16
"""Operations that are told apart: torch has twelve, and each is four series of a rank."""

OPERATIONS = frozenset({
    "all_reduce", "all_gather", "all_to_all", "barrier", "broadcast", "coalesced", "combine", "dispatch", "gather",
    "recv", "reduce", "reduce_scatter", "scatter", "send", "send_recv", "unknown", "wait",
})  # fmt: skip
"""Every value of the label `operation`; what is none of the others is "unknown"."""


class CollectiveSum(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All collectives of one operation in a step, waiting for late ranks included.

    `bytes` are nccl-tests' size (what a rank ends up with, or began with, whichever is more), `bus_bytes` that times
    the operation's factor of bus bandwidth; None where not every one of them said how large it is, and between how
    many ranks.  Durations of collectives that ran at the same time are added, too.
    """

    operation: Label
    count: Count
    duration_ns: Nanoseconds
    bytes: Bytes | None = None
    bus_bytes: Bytes | None = None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second; a lower bound, as the duration contains waiting.  None when it is not known."""
        if self.bus_bytes is None or self.duration_ns == 0:
            return None
        return self.bus_bytes * 1_000_000_000 / self.duration_ns


class CollectiveWindow(msgspec.Struct, frozen=True, kw_only=True, tag="collectives"):
    """The collectives of one rank in the profiled step `step`; no `sums`: there were none."""

    job: Label
    rank: Rank
    step: Count
    ended_wall_ns: Nanoseconds
    sums: Annotated[tuple[CollectiveSum, ...], Meta(max_length=OPERATIONS_MAX)]


class BackwardWindow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last backward of a profiled step and its all-reduces; it stays in the process, only sums are sent.

    `work_ns` is how long the backward itself took, without what it waited for at its end.  `reduces` are begin and end
    of each all-reduce that began in it or after, in nanoseconds since it began, the earliest first.
    """

    work_ns: int
    reduces: tuple[tuple[int, int], ...]
