"""Defines the record of one step's collectives, by operation, as an exact window measured them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pacecar.records.ranges import Bytes, Count, Label, Nanoseconds, Rank

__all__ = ["OPERATIONS", "OPERATIONS_MAX", "BackwardWindow", "CollectiveSum", "CollectiveWindow"]

OPERATIONS_MAX = 16
"""Operations in one record: torch has twelve, and each makes four series per rank."""

OPERATIONS = frozenset({
    "all_reduce", "all_gather", "all_to_all", "barrier", "broadcast", "coalesced", "combine", "dispatch", "gather",
    "recv", "reduce", "reduce_scatter", "scatter", "send", "send_recv", "unknown", "wait",
})  # fmt: skip
"""Every value of the label `operation`; any other operation is "unknown"."""


class CollectiveSum(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All collectives of one operation in a step, including waits for late ranks.

    `bytes` is nccl-tests' size (a rank's input or output, whichever is larger), `bus_bytes` that times the operation's
    bus bandwidth factor; None unless every collective's size and number of ranks are known.  Durations are summed, also
    of collectives that ran at the same time.
    """

    operation: Label
    count: Count
    duration_ns: Nanoseconds
    bytes: Bytes | None = None
    bus_bytes: Bytes | None = None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second, a lower bound because the duration includes waiting; None if unknown."""
        if self.bus_bytes is None or self.duration_ns == 0:
            return None
        return self.bus_bytes * 1_000_000_000 / self.duration_ns


class CollectiveWindow(msgspec.Struct, frozen=True, kw_only=True, tag="collectives"):
    """The collectives of one rank in the profiled step `step`; `sums` is empty if there were none."""

    job: Label
    rank: Rank
    step: Count
    ended_wall_ns: Nanoseconds
    sums: Annotated[tuple[CollectiveSum, ...], Meta(max_length=OPERATIONS_MAX)]


class BackwardWindow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last backward of a profiled step and its all-reduces; it is not sent, only sums are.

    `work_ns` is the duration of the backward without the wait at its end.  `reduces` are start and end of each
    all-reduce that began in it or later, in nanoseconds since it began, earliest first.
    """

    work_ns: int
    reduces: tuple[tuple[int, int], ...]
