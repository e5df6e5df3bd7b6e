"""Collects decoded events into numpy columns, batch by batch.

Handling events one by one in python costs several microseconds each.  So a batch is handled column by column: a list
comprehension for each attribute, then an array.  Properties of a name are decided once a name, not once a row.  Only
the arrays of a batch are kept.

Left out: where events come from (`event_stream`), and which collective a kernel belongs to (`kernel_links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from . import times
from .begin_end_pairs import PAIR_PHASES, Pairs
from .collectives import from_annotation, from_metadata, tensors
from .column_parts import Column, Columns, Numbers, whole_column
from .columns import NONE, CollectiveColumns, Notes, SyncRows
from .decoding.event_stream import Batch
from .decoding.events import Args, DigitEvent, KnownEvent, TraceEvent
from .kernel_links import LaunchCalls
from .row_kinds import RowPlace, canonical, is_collective_call, place_of, sync_kind

if TYPE_CHECKING:
    from .details.detail_rows import DetailRows, Instants

__all__ = ["NAME_LETTERS_MAX", "Categories", "Names", "Rows"]

NAME_LETTERS_MAX = 16_384
"""The longest name that is kept, in characters; templates of device code reach a few thousand."""

CATEGORIES_MAX = 200
"""The most distinct categories, so that a code fits a byte; kineto knows thirty."""

GRID_BYTES_MAX = 256
"""The most bytes of a grid: three numbers of ten digits on indented lines fit."""

NO_CATEGORY = "rows without a category were left out: torch.profiler gives each of its rows one"
NO_PHASE = "events without a phase were left out: a name with unescaped quotes leaves such parts"
UNPAIRED = "begins without an end, or ends without a begin, were left out"

PYTHON_FUNCTION = "python_function"
"""The category of python frames, which are rows of details only."""

FRAME, LEFT_OUT = 0, 1
_COMMON = ("start", "end", "category", "name", "correlation", "collective")

Events = Sequence[KnownEvent | TraceEvent | DigitEvent]


class Categories(dict[str, int]):
    """The code of each category in the spelling of the file; its place is decided at its first occurrence."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.canonical = ["", ""]
        self.is_device = np.zeros(256, dtype=np.bool_)
        self.is_host = np.zeros(256, dtype=np.bool_)
        self.is_sync = np.zeros(256, dtype=np.bool_)
        self._notes = notes

    def __missing__(self, category: str) -> int:
        name = canonical(category)
        place = place_of(name)
        code = FRAME if place == RowPlace.FRAME else LEFT_OUT
        if place == RowPlace.UNKNOWN:
            message = f"rows of an unknown category were left out: {category[:60]!r}"
            self._notes.add("unknown_category", message, effect="left_out")
        if place in (RowPlace.DEVICE, RowPlace.HOST, RowPlace.SYNC):
            if name in self.canonical:
                code = self.canonical.index(name)
            elif len(self.canonical) < CATEGORIES_MAX:
                code = len(self.canonical)
                self.canonical.append(name)
                self.is_device[code] = place == RowPlace.DEVICE
                self.is_host[code] = place == RowPlace.HOST
                self.is_sync[code] = place == RowPlace.SYNC
        if len(self) < 1 << 16:  # bounds a file in which every event has its own category
            self[category] = code
        return code


class Names(dict[str, int]):
    """The number of each name, and whether it names a collective's host row."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.is_call = bytearray()
        self._notes = notes

    def __missing__(self, name: str) -> int:
        text = name
        if len(name) > NAME_LETTERS_MAX:
            self._notes.add("long_name", f"names of more than {NAME_LETTERS_MAX} characters were cut", effect="cut")
            text = name[:NAME_LETTERS_MAX]
            if text in self:
                return self[text]
        number = self[text] = len(self.texts)
        self.texts.append(text)
        self.is_call.append(is_collective_call(text))
        return number


class Rows:
    """All rows so far; `details` collects the columns that only tables need, None unless requested."""

    def __init__(self, notes: Notes, details: DetailRows | None = None) -> None:
        self.details = details
        self.categories = Categories(notes)
        self.names = Names(notes)
        self.threads: Numbers[tuple[int | str, int | str]] = Numbers()
        self.collectives: Numbers[CollectiveColumns] = Numbers()
        self.grids: Numbers[bytes] = Numbers()
        self.device = Columns(*_COMMON, "device", "stream", "external", "grid")
        self.host = Columns(*_COMMON, "thread")
        self.syncs = Columns(*SyncRows.__dataclass_fields__)
        self.described = LaunchCalls()
        self.annotations = LaunchCalls()
        self.operators = LaunchCalls()
        self.metadata_rows: dict[int, int] = {}
        self.low: int | None = None
        self.high: int | None = None
        self.has_fractions = False
        self.has_phases = False
        self._pairs = Pairs()
        self._notes = notes

    def add(self, batch: Batch) -> None:
        """Add a batch.  Raises ImpreciseTimesError, having added nothing, if its times must be read from digits."""
        done = self._complete(batch)
        instants = None if self.details is None else self.details.instants(batch)
        if not done:
            self._note_instants(instants)
            return
        category = self.categories
        codes = np.frombuffer(bytes([category[event.cat] for event in done]), dtype=np.uint8)
        start, end, sound = self._spans(done)
        self._note_instants(instants)
        counted = codes != FRAME
        if not counted.all():
            bare = sum(not event.cat for event in compress(done, (~counted).tolist()))
            self._notes.add("no_category", NO_CATEGORY, bare, "left_out")
        if sound is not None:
            counted &= sound
        if not counted.any():
            return
        low, high = int(start[counted].min()), int(end[counted].max())
        self.low = low if self.low is None else min(low, self.low)
        self.high = high if self.high is None else max(high, self.high)
        for mask, add in (
            (category.is_device[codes], self._add_device),
            (category.is_host[codes], self._add_host),
            (category.is_sync[codes], self._add_syncs),
        ):
            if sound is not None:
                mask &= sound
            if mask.any():
                add(list(compress(done, mask.tolist())), start[mask], end[mask], codes[mask])
        if self.details is not None:
            self._add_frames(self.details, done, start, end, sound)

    def _note_instants(self, instants: Instants | None) -> None:
        if self.details is not None and instants is not None:
            self.details.add_instants(instants)

    def _add_frames(
        self, details: DetailRows, done: Events, start: Column, end: Column, sound: NDArray[np.bool_] | None
    ) -> None:
        mask = np.array([event.cat == PYTHON_FUNCTION for event in done], dtype=np.bool_)
        if sound is not None:
            mask &= sound
        details.add_frames(list(compress(done, mask.tolist())), start[mask], end[mask])

    def finish(self) -> None:
        """Note the events still open after the last batch."""
        self._notes.add("unpaired", UNPAIRED, self._pairs.unpaired, "left_out")

    def _complete(self, batch: Batch) -> Events:
        """Return the complete events (phase "X"), including joined pairs of "B" and "E"."""
        if batch and hasattr(batch[0], "ph"):
            events = cast(Sequence[TraceEvent], batch)
            phases = {event.ph for event in events}
            self.has_phases = self.has_phases or bool(phases - {""})
            if "" in phases:
                self._notes.add("no_phase", NO_PHASE, sum(not event.ph for event in events), "left_out")
            if phases & PAIR_PHASES:
                if not isinstance(batch[0], DigitEvent):
                    raise times.ImpreciseTimesError  # the difference of two floats is not exact
                return self._pairs.joined(cast(Sequence[DigitEvent], batch))
            return [event for event in events if event.ph == "X"]
        self.has_phases = self.has_phases or bool(batch)  # a KnownEvent has a phase
        return [event for event in batch if type(event) is KnownEvent]

    def _spans(self, done: Events) -> tuple[Column, Column, NDArray[np.bool_] | None]:
        """Return the starts and ends, and a mask of the sound ones if not all are."""
        if isinstance(done[0], DigitEvent):
            digits = cast(Sequence[DigitEvent], done)
            start, is_start = times.from_digits([event.ts for event in digits])
            length, is_length = times.from_digits([event.dur for event in digits])
        else:
            numbers = cast(Sequence[TraceEvent], done)
            start, is_start = times.from_numbers([event.ts for event in numbers])
            length, is_length = times.from_numbers([event.dur for event in numbers])
        if not self.has_fractions:
            self.has_fractions = bool((start % 1000).any()) or bool((length % 1000).any())
        sound = None
        for code, message, is_right in (
            ("bad_time", "rows without a time or duration that is a number were left out", is_start),
            ("bad_time", "rows without a time or duration that is a number were left out", is_length),
            ("negative_duration", "rows that end before they begin were left out", length >= 0),
        ):
            if is_right is not None and not is_right.all():
                wrong = ~is_right if sound is None else ~is_right & sound
                self._notes.add(code, message, int(wrong.sum()), "left_out")
                sound = is_right if sound is None else is_right & sound
        return start, start + length, sound

    def _add_device(self, events: Events, start: Column, end: Column, codes: NDArray[np.uint8]) -> None:
        args = [event.args for event in events]
        names, collectives = self.names, self.collectives
        device = whole_column([a.device for a in args])
        stream = whole_column([a.stream for a in args])
        for column, given in ((device, "pid"), (stream, "tid")):  # kineto also puts device and stream there
            for row in np.flatnonzero(column == NONE).tolist():
                value = getattr(events[row], given)
                column[row] = value if isinstance(value, int) and abs(value) < 1 << 31 else NONE
        self.device.add(
            start=start,
            end=end,
            category=codes,
            name=np.array([names[event.name] for event in events], dtype=np.int32),
            device=np.where(np.abs(device) < 1 << 31, device, NONE).astype(np.int32),
            stream=stream,
            correlation=whole_column([a.correlation for a in args]),
            external=whole_column([a.external_id for a in args]),
            collective=np.array(
                [NONE if a.operation is None else collectives[from_metadata(a)] for a in args], dtype=np.int32
            ),
            grid=np.array([self.grids[bytes(a.grid)[:GRID_BYTES_MAX]] for a in args], dtype=np.int32),
        )

    def _add_host(self, events: Events, start: Column, end: Column, codes: NDArray[np.uint8]) -> None:
        names, threads = self.names, self.threads
        name = np.array([names[event.name] for event in events], dtype=np.int32)
        places = zip([event.pid for event in events], [event.tid for event in events], strict=True)
        thread = np.array(list(map(threads.__getitem__, places)), dtype=np.int32)
        collective = np.full(len(events), NONE, dtype=np.int32)
        is_call = np.frombuffer(bytes(self.names.is_call), dtype=np.bool_)[name]
        for row in np.flatnonzero(is_call).tolist():
            place = (int(thread[row]), int(start[row]), int(end[row]))
            collective[row] = self._note_call(events[row].name, events[row].args, *place)
        self.host.add(
            start=start,
            end=end,
            category=codes,
            name=name,
            thread=thread,
            correlation=whole_column([event.args.correlation for event in events]),
            collective=collective,
        )
        if self.details is not None:
            self.details.add_host(events, start)

    def _add_syncs(self, events: Events, start: Column, end: Column, codes: NDArray[np.uint8]) -> None:
        """Add waits; those of an unknown kind are left out."""
        kinds = [sync_kind(event.name) for event in events]
        known = np.array([kind is not None for kind in kinds], dtype=np.bool_)
        args = [event.args for event, kind in zip(events, kinds, strict=True) if kind is not None]
        device = whole_column([a.device for a in args])
        self.syncs.add(
            start_ns=start[known],
            end_ns=end[known],
            kind=np.array([kind for kind in kinds if kind is not None], dtype=np.uint8),
            device=np.where(np.abs(device) < 1 << 31, device, NONE).astype(np.int32),
            stream=whole_column([a.stream for a in args]),
            correlation=whole_column([a.correlation for a in args]),
            on_stream=whole_column([a.on_stream for a in args]),
            on_record=whole_column([a.on_record for a in args]),
        )

    def _note_call(self, name: str, args: Args, thread: int, start: int, end: int) -> int:
        """Record the data in a collective's host row; return the number of the collective that the row itself is."""
        if args.operation is not None:
            number = self.collectives[from_metadata(args)]
            self.described.add(thread, start, end, number)
            if args.external_id != NONE:
                self.metadata_rows.setdefault(args.external_id, number)
            return number
        if name == "record_param_comms":
            if args.external_id != NONE:
                self.metadata_rows.setdefault(args.external_id, NONE)
            return NONE
        if "::" in name:
            largest = max((size for _, size in tensors(args)), default=NONE)
            self.operators.add(thread, start, end, largest)
            return NONE
        number = self.collectives[from_annotation(name, args)]
        self.annotations.add(thread, start, end, number)
        return number if name.startswith(("gloo:", "ucc:", "mpi:")) else NONE
