"""Defines the decoded types of an event whose details are wanted, and the decoders for them.

They name the members of `pacecar.profiler.trace.decoding.events` and more, so that everything else reads them alike.
Counters, arrows and thread names are skipped here too; instants are not, for the allocator's events are such.

Left out: what is kept of them (`detail_rows`).
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
    """Return the event that was decoded without types, each member converted to its type where it can be."""
    return event_of(members, DetailDigitEvent, DetailArgs)


DETAILED = EventTypes(
    known=None,
    fast=msgspec.json.Decoder(list[DetailEvent]),
    digits=msgspec.json.Decoder(list[DetailDigitEvent]),
    convert=_detailed_event_of,
)
"""How a file is decoded whose details are wanted."""
