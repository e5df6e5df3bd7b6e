"""Checks the signs and ranges of what a trace counts: ranks, sizes of groups and messages, and the wall clock.

What cannot be is unknown; the row that says it keeps its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from ...trace.columns import NONE, CollectiveColumns, Trace, TraceWarning

__all__ = ["check_clock_base", "check_collectives", "check_ranks"]

MESSAGE_BYTES_MAX = 1 << 46
"""The largest message of a collective (64 TiB): no device has the memory for a larger one."""

WALL_NS_MAX = 2_840_140_800_000_000_000
"""The year 2060.  Times since the epoch on top of a base since the epoch give the 2070s."""


def check_ranks(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without a world size that its rank does not fit into."""
    rank, world = trace.rank, trace.world_size
    if world is None or (world > 0 and (rank is None or rank < world)):
        return trace, []
    message = f"rank {'?' if rank is None else rank} of {world} ranks cannot be: the world size is not used"
    return replace(trace, world_size=None), [TraceWarning("rank_out_of_range", message, effect="unknown")]


def check_collectives(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without sizes, groups and peers of collectives that cannot be."""
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
    message = f"{rows} rows of collectives say what cannot be, such as {example}: those figures are not used"
    return replace(trace, collectives=mended), [TraceWarning("impossible_collective", message, rows, "unknown")]


def check_clock_base(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without an offset to the wall clock that puts it into the far future."""
    offset = trace.wall_offset_ns
    if offset is None or trace.start_ns is None or trace.start_ns + offset < WALL_NS_MAX:
        return trace, []
    message = "baseTimeNanoseconds puts this trace beyond the year 2060: its wall clock is not used"
    return replace(trace, wall_offset_ns=None), [TraceWarning("impossible_wall_clock", message, effect="unknown")]


def _impossible(one: CollectiveColumns, world: int | None) -> Iterator[tuple[str, str]]:
    """Yield each field of a collective that cannot be, and what it says."""
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
