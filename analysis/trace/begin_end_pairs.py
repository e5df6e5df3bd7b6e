"""Joins events that begin (phase "B") and events that end (phase "E") into complete events.

Kineto writes only complete events (phase "X").  Converters and viewers may save the same rows as pairs, and skipping
those would silently lose every kernel.  In the Trace Event Format, the pairs of a thread nest and are in order of time;
an end belongs to the latest open begin of its thread, with the same name if it has one.

Left out: what happens to complete events (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

import msgspec

from .decoding.events import NO_DIGITS, DigitEvent

__all__ = ["PAIR_PHASES", "Pairs"]

PAIR_PHASES = frozenset("BE")

OPEN_EVENTS_MAX = 1 << 20
"""The most events that are open at the same time (300 MB); calls nest a few hundred deep on a few hundred threads."""


class Pairs:
    """The events that have begun and not ended; `unpaired` counts begins and ends without a partner."""

    def __init__(self) -> None:
        self._open: dict[tuple[int | str, int | str], list[DigitEvent]] = {}
        self._open_count = 0
        self._unpaired = 0

    @property
    def unpaired(self) -> int:
        """Begins without an end and ends without a begin, so far."""
        return self._unpaired + self._open_count

    def joined(self, events: Iterable[DigitEvent]) -> list[DigitEvent]:
        """Return the complete events among `events`, and those completed by an end among them."""
        complete = []
        for event in events:
            if event.ph == "X":
                complete.append(event)
            elif event.ph == "B":
                self._begin(event)
            elif event.ph == "E" and (begun := self._end(event)) is not None:
                complete.append(begun)
        return complete

    def _begin(self, event: DigitEvent) -> None:
        if self._open_count < OPEN_EVENTS_MAX:
            self._open.setdefault((event.pid, event.tid), []).append(event)
            self._open_count += 1
        else:
            self._unpaired += 1

    def _end(self, event: DigitEvent) -> DigitEvent | None:
        """Return the event that `event` ends, as a complete one; open begins inside it are unpaired."""
        stack = self._open.get((event.pid, event.tid), [])
        for depth in range(len(stack) - 1, -1, -1):
            if not event.name or stack[depth].name == event.name:
                begun = stack[depth]
                self._open_count -= len(stack) - depth
                self._unpaired += len(stack) - depth - 1
                del stack[depth:]
                begun.ph, begun.dur = "X", _difference(begun.ts, event.ts)
                return begun
        self._unpaired += 1
        return None


def _difference(start: bytes | msgspec.Raw, end: bytes | msgspec.Raw) -> msgspec.Raw:
    """Return end - start in digits; no digits where either is not a number."""
    try:
        first, last = (Decimal(bytes(time).decode("latin-1").strip('"')) for time in (start, end))
        return msgspec.Raw(str(last - first).encode())
    except InvalidOperation:
        return NO_DIGITS
