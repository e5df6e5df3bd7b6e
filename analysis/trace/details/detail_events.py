"""Defines the decoded types of events with details, and their decoders.

They have the members of `pacecar.analysis.trace.decoding.events` and more, so other code reads both alike.  Counters,
arrows and thread names are skipped here too, but not instants, because the allocator's events are instants.

Left out: which of them are kept (`detail_rows`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..columns import NONE
from ..decoding.events import Args, DigitEvent, EventTypes, TraceEvent, event_of

__all__ = ["DETAILED", "DetailArgs"]


class DetailArgs(Args, frozen=True, gc=False):
    """The arguments of an event with those that only tables need; names of torch's profiler_kineto.cpp."""

    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw())
    hierarchy: str | None = msgspec.field(name="Module Hierarchy", default=None)
    call_stack: str | None = msgspec.field(name="Call stack", default=None)
    flops: int = NONE
    sequence_number: int = msgspec.field(name="Sequence number", default=NONE)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    bytes: int | None = msgspec.field(name="Bytes", default=None)
    device_type: int = msgspec.field(name="Device Type", default=NONE)
    device_id: int = msgspec.field(name="Device Id", default=NONE)
    allocated: int = msgspec.field(name="Total Allocated", default=NONE)
    reserved: int = msgspec.field(name="Total Reserved", default=NONE)


_NO_ARGS = DetailArgs()


class DetailEvent(TraceEvent, gc=False):
    """One event of any category."""

    args: DetailArgs = _NO_ARGS


class DetailDigitEvent(DigitEvent, gc=False):
    """One event whose times are kept as the digits in the file."""

    args: DetailArgs = _NO_ARGS


def _detailed_event_of(members: dict[str, Any]) -> DigitEvent:
    """Return an event that was decoded without types, with each member converted to its type if possible."""
    return event_of(members, DetailDigitEvent, DetailArgs)


DETAILED = EventTypes(
    known=None,
    fast=msgspec.json.Decoder(list[DetailEvent]),
    digits=msgspec.json.Decoder(list[DetailDigitEvent]),
    convert=_detailed_event_of,
)
"""How a file is decoded with details."""
