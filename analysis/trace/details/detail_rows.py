"""Collects the details of decoded events into columns, batch by batch, beside `rows.Rows`.

Host rows arrive in the same order as in `Rows` and are sorted by the same key, so the columns are parallel.

Left out: decoding (`detail_events`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from .. import times
from ..column_parts import Columns, Numbers, whole_column
from ..columns import NONE
from ..decoding.events import Args, DigitEvent, KnownEvent, TraceEvent
from .detail_columns import FrameRows, MemoryRows, Signature, TraceDetails
from .detail_events import DetailArgs

__all__ = ["DetailRows", "Instants"]

SIGNATURE_BYTES_MAX = 1 << 16
"""The longest list of shapes, types or values that is kept; only calls with thousands of tensors exceed it."""

STACK_LETTERS_MAX = 1 << 14
"""The longest stack that is kept, cut at its outer end."""

MEMORY_EVENT = "[memory]"

Column = NDArray[np.int64]
Events = Sequence[KnownEvent | TraceEvent | DigitEvent]


class Instants(NamedTuple):
    """The allocator's events of one batch with their times, not yet added."""

    events: Events
    time_ns: Column


class DetailRows:
    """The details of all events so far."""

    def __init__(self) -> None:
        self._host = Columns("start", "signature", "sequence", "forward_thread", "flops", "stack", "hierarchy")
        self._frames = Columns("start", "end", "thread", "name")
        self._memory = Columns("time", "thread", "bytes", "device", "allocated", "reserved")
        self._signatures: Numbers[Signature] = Numbers()
        self._stacks: Numbers[str] = Numbers()
        self._hierarchies: Numbers[str] = Numbers()
        self._frame_names: Numbers[str] = Numbers()
        self._threads: Numbers[tuple[str, str]] = Numbers()
        self._devices: Numbers[tuple[int, int]] = Numbers()

    def instants(self, batch: Sequence[object]) -> Instants:
        """Return the allocator's events among `batch`; raises ImpreciseTimesError."""
        found = [
            event
            for event in cast(Sequence[TraceEvent | DigitEvent], batch)
            if event.ph == "i" and event.name == MEMORY_EVENT and _details(event).bytes is not None
        ]
        if not found:
            return Instants((), np.empty(0, dtype=np.int64))
        if isinstance(found[0], DigitEvent):
            time, sound = times.from_digits([cast(DigitEvent, event).ts for event in found])
        else:
            time, sound = times.from_numbers([cast(TraceEvent, event).ts for event in found])
        if sound is not None:
            found = [event for event, is_right in zip(found, sound.tolist(), strict=True) if is_right]
            time = time[sound]
        return Instants(found, time)

    def add_instants(self, instants: Instants) -> None:
        """Add the allocator's events of a batch."""
        args = [_details(event) for event in instants.events]
        devices = self._devices
        self._memory.add(
            time=instants.time_ns,
            thread=self._thread(instants.events),
            bytes=whole_column(each.bytes or 0 for each in args),
            device=np.array([devices[each.device_type, each.device_id] for each in args], dtype=np.int32),
            allocated=whole_column(each.allocated for each in args),
            reserved=whole_column(each.reserved for each in args),
        )

    def add_host(self, events: Events, start: Column) -> None:
        """Add the details of the host rows `events`."""
        args = [_details(event) for event in events]
        signatures, stacks, hierarchies = self._signatures, self._stacks, self._hierarchies
        self._host.add(
            start=start,
            signature=np.array(
                [signatures[_signature(each)] if len(bytes(each.shapes)) else NONE for each in args], dtype=np.int32
            ),
            sequence=whole_column(each.sequence_number for each in args),
            forward_thread=whole_column(each.forward_thread for each in args),
            flops=whole_column(each.flops for each in args),
            stack=np.array(
                [stacks[each.call_stack[:STACK_LETTERS_MAX]] if each.call_stack else NONE for each in args],
                dtype=np.int32,
            ),
            hierarchy=np.array(
                [hierarchies[each.hierarchy[:STACK_LETTERS_MAX]] if each.hierarchy else NONE for each in args],
                dtype=np.int32,
            ),
        )

    def add_frames(self, events: Events, start: Column, end: Column) -> None:
        """Add calls of python functions."""
        names = self._frame_names
        self._frames.add(
            start=start,
            end=end,
            thread=self._thread(events),
            name=np.array([names[event.name[:STACK_LETTERS_MAX]] for event in events], dtype=np.int32),
        )

    def finish(self, threads: Sequence[tuple[str, str]]) -> TraceDetails:
        """Return all details, with threads numbered as in `threads`; empties the collector."""
        places: dict[tuple[str, str], int] = {}
        for number, thread in enumerate(threads):
            places.setdefault(thread, number)
        moved = np.array([places.get(thread, NONE) for thread in self._threads] or [NONE], dtype=np.int32)
        order = np.argsort(self._host.pop("start"), kind="stable")
        host = {name: self._host.pop(name)[order] for name in ("sequence", "forward_thread", "flops")}
        small = {
            name: self._host.pop(name, np.int32)[order].astype(np.int32) for name in ("signature", "stack", "hierarchy")
        }
        return TraceDetails(
            signature=small["signature"],
            sequence=host["sequence"],
            forward_thread=host["forward_thread"],
            flops=host["flops"],
            stack=small["stack"],
            hierarchy=small["hierarchy"],
            signatures=tuple(self._signatures),
            stacks=tuple(self._stacks),
            hierarchies=tuple(self._hierarchies),
            frames=self._finish_frames(moved),
            memory=self._finish_memory(moved),
        )

    def _finish_frames(self, moved: NDArray[np.int32]) -> FrameRows:
        start = self._frames.pop("start")
        order = np.argsort(start, kind="stable")
        return FrameRows(
            start_ns=start[order],
            end_ns=self._frames.pop("end")[order],
            thread=moved[self._frames.pop("thread", np.int32)[order]],
            name=self._frames.pop("name", np.int32)[order].astype(np.int32),
            names=tuple(self._frame_names),
        )

    def _finish_memory(self, moved: NDArray[np.int32]) -> MemoryRows:
        time = self._memory.pop("time")
        order = np.argsort(time, kind="stable")
        return MemoryRows(
            time_ns=time[order],
            thread=moved[self._memory.pop("thread", np.int32)[order]],
            bytes=self._memory.pop("bytes")[order],
            device=self._memory.pop("device", np.int32)[order].astype(np.int32),
            allocated=self._memory.pop("allocated")[order],
            reserved=self._memory.pop("reserved")[order],
            devices=tuple(self._devices),
        )

    def _thread(self, events: Events) -> NDArray[np.int32]:
        threads = self._threads
        return np.array([threads[str(event.pid), str(event.tid)] for event in events], dtype=np.int32)


def _details(event: KnownEvent | TraceEvent | DigitEvent) -> DetailArgs:
    return cast(DetailArgs, event.args)


def _signature(args: Args) -> Signature:
    """Return the inputs of a call, or none if they are too long."""
    parts = (bytes(args.shapes), bytes(args.types), bytes(cast(DetailArgs, args).concrete))
    return Signature(*(part if len(part) <= SIGNATURE_BYTES_MAX else b"" for part in parts))
