"""Checks signs and ranges of ranks, group and message sizes, and the wall clock.

Impossible values become unknown; their rows keep their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from ..trace.columns import NONE, CollectiveColumns, Trace, TraceWarning

__all__ = ["check_clock_base", "check_collectives", "check_ranks"]

MESSAGE_BYTES_MAX = 1 << 46
"""The largest message of a collective (64 TiB): no device has the memory for a larger one."""

WALL_NS_MAX = 2_840_140_800_000_000_000
"""The year 2060.  Adding times since the epoch to a base since the epoch gives the 2070s."""


def check_ranks(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without a world size that excludes its rank."""
    rank, world = trace.rank, trace.world_size
    if world is None or (world > 0 and (rank is None or rank < world)):
        return trace, []
    message = f"rank {'?' if rank is None else rank} of {world} ranks is impossible: the world size is not used"
    return replace(trace, world_size=None), [TraceWarning("rank_out_of_range", message, effect="unknown")]


def check_collectives(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without impossible sizes, groups and peers of collectives."""
    odd: dict[int, tuple[CollectiveColumns, str]] = {}
    for number, collective in enumerate(trace.collectives):
        wrong = dict(_impossible(collective, trace.world_size))
        if wrong:
            nothing = dict.fromkeys(wrong)
            odd[number] = msgspec.structs.replace(collective, **nothing), next(iter(wrong.values()))
    if not odd:
        return trace, []
    mended = tuple(odd[number][0] if number in odd else one for number, one in enumerate(trace.collectives))
    rows = sum(int(np.isin(rows.collective, list(odd)).sum()) for rows in (trace.device, trace.host_rows))
    example = next(iter(odd.values()))[1]
    message = f"{rows} rows of collectives have impossible figures, such as {example}: those are not used"
    return replace(trace, collectives=mended), [TraceWarning("impossible_collective", message, rows, "unknown")]


def check_clock_base(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without a wall clock offset that puts it into the far future."""
    offset = trace.wall_offset_ns
    if offset is None or trace.start_ns is None or trace.start_ns + offset < WALL_NS_MAX:
        return trace, []
    message = "baseTimeNanoseconds puts this trace beyond the year 2060: its wall clock is not used"
    return replace(trace, wall_offset_ns=None), [TraceWarning("impossible_wall_clock", message, effect="unknown")]


def _impossible(one: CollectiveColumns, world: int | None) -> Iterator[tuple[str, str]]:
    """Yield each impossible field of a collective, and its value in words."""
    if one.bytes is not None and not 0 <= one.bytes <= MESSAGE_BYTES_MAX:
        yield "bytes", f"a message of {one.bytes} bytes"
    size = one.group_size
    if size is not None and (size < 1 or (world is not None and size > world)):
        yield "group_size", f"a group of {size} ranks" + ("" if world is None else f" in a job of {world}")
        size = None
    if one.ranks is not None:
        outside = [rank for rank in one.ranks if world is not None and rank >= world]
        if outside:
            yield "ranks", f"rank {outside[0]} in a job of {world} ranks"
        elif len(set(one.ranks)) < len(one.ranks):
            yield "ranks", "a group with the same rank twice"
        elif size is not None and size != len(one.ranks):
            yield "ranks", f"{len(one.ranks)} ranks in a group of {size}"
    for name in ("source_rank", "destination_rank"):
        peer = getattr(one, name)
        if peer is not None and world is not None and peer >= world:
            yield name, f"rank {peer} in a job of {world} ranks"
    if one.sequence is not None and one.sequence < NONE:
        yield "sequence", f"number {one.sequence} in its group's sequence"
