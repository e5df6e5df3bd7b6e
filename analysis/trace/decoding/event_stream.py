r"""Decodes the events of a trace in batches from a stream of pieces, without holding the file in memory.

A JSON parser needs the whole file, and parsing events one by one is slow.  But the array of events can be cut at any
`},{` between two events.  The parser tells whether it is inside one: a part cut inside a string or an object has an
open bracket and does not decode.  So each piece is cut at its last `},{` and decoded at once, which nearly always
works.  Pieces that do not decode are retried more slowly:

    1. with types         fast, and strict
    2. without types      a value has the wrong type; it is converted if possible
    3. event by event     something is not JSON: only that event is lost, and counted

The array ends where the parser finds characters after it and no event follows; a name with unescaped JSON can look like
the end.  Other members of the document come before or after the events, in any order, and are kept as bytes for
`header`.

Left out: what an event means (`events`, `rows`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ..columns import Notes
from .broken_json import NO_NUMBER, scan
from .compressed_source import TraceError, TraceSource
from .events import PLAIN, DigitEvent, EventTypes, KnownEvent, TraceEvent, decimal_of, value_end
from .header import is_closed, is_whole, trailing

__all__ = ["EVENT_BYTES_MAX", "HEADER_BYTES_MAX", "Batch", "EventStreamReader"]

HEADER_BYTES_MAX = 64 << 20
"""The most bytes kept of the members before or after the events.

kineto's members are kilobytes, its log lines at most megabytes.
"""

EVENT_BYTES_MAX = 4 << 20
"""The largest single event; larger ones are skipped, so that they cannot fill the memory."""

CUTS_TRIED_MAX = 4096
"""The most positions tried for a cut in one piece; a piece of only braces would have a million."""

GROUND_BYTES = 4096
"""How many last bytes of a skipped part are kept, because `},{` may begin in them."""

Batch = list[KnownEvent] | list[TraceEvent] | list[DigitEvent]

_SPACE = b" \t\r\n"
_FIRST = re.compile(rb"[ \t\r\n]*([^ \t\r\n])")
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_KEY = re.compile(rb'"traceEvents"\s*:\s*(.)', re.DOTALL)
_PHASE = re.compile(rb'"ph"\s*:\s*"')
_DOCUMENT = re.compile(rb'"traceEvents"\s*:\s*\[|[\]}]\s*\[\s*\{')
"""The beginning of another trace in the same file."""
_HEADER = re.compile(
    rb'"(?:traceName|displayTimeUnit|baseTimeNanoseconds|schemaVersion|d\w+Info|deviceProperties)"\s*:'
)
"""Members that no event has."""
_GROUND = re.compile(rb'\}\s*,\s*(?=\{\s*")')
_UNTYPED = msgspec.json.Decoder(list[dict[str, Any]], float_hook=decimal_of)
_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class EventStreamReader:
    """The events of one source, in batches, and the bytes around them.

    `before` and `after` are the other members' bytes, `read` counts the events that decoded.  `types` says
    which members of an event are decoded.
    """

    def __init__(self, source: TraceSource, notes: Notes, types: EventTypes = PLAIN) -> None:
        self._types = types
        self.before = b""
        self.after = b""
        self.read = 0
        self.is_truncated = False
        self.is_array = False
        self._source = source
        self._notes = notes
        self._pieces = source.pieces()
        self._keeps_digits = False
        self._knows_all = True
        self._last = b""
        self._ended = False
        self._is_last = False
        self._is_astray = False
        """Whether the last thing read was a lost event or a fragment of one; see `broken_json`."""

    def batches(self) -> Iterator[Batch]:
        """Yield the events.  Raises TraceError if there is no array of events."""
        buffer = self._open()
        yield from self._events(buffer)
        while self._ended and (begin := self._read_after()) is not None:
            if not self._is_astray:
                self._lose(self.after, begin, "the array of events seems to end before it")
            buffer, self.after, self._ended, self._is_last = self.after[begin:], b"", False, False
            yield from self._events(buffer)

    def _events(self, buffer: bytes) -> Iterator[Batch]:
        """Yield the events from `buffer` on, up to the apparent end of the array."""
        is_lost = False
        for piece in self._pieces:
            cut, begin = _last_cut(piece)
            if cut and not is_lost:
                batch = self._decode_joined(buffer, piece, cut)
                if batch is not None:
                    buffer = piece[begin:]
                    yield batch
                    continue
                batch, buffer = self._decode(buffer + piece, len(buffer) + cut, len(buffer) + begin)
                yield batch
            else:
                buffer += piece
            if is_lost:
                is_lost, buffer = _find_ground(buffer)
            if self._ended:
                break
            if len(buffer) > EVENT_BYTES_MAX and _last_cut(buffer)[0]:  # the very first piece was not cut
                batch, buffer = self._decode(buffer, *_last_cut(buffer))
                yield batch
            if len(buffer) > EVENT_BYTES_MAX:
                self._lose(buffer, 0, f"larger than {EVENT_BYTES_MAX} bytes")
                is_lost, buffer = _find_ground(buffer[1:])
        if not self._ended and not is_lost:
            batch, buffer = self._decode_last(buffer)
            yield batch
        if self._ended:
            self.after = buffer
        else:
            self._close(buffer)

    def _read_after(self) -> int | None:
        """Read the bytes after the array into `after`; return where an event begins in them, None at the true end."""
        looked_at = 0
        while True:
            found = _PHASE.search(self.after, looked_at)
            if found is not None:
                other = _DOCUMENT.search(self.after, 0, found.start())
                head = self.after[: found.start()]
                if other is None and not (self.is_array and head.lstrip(_SPACE).startswith(b"[")):
                    return _last_cut(head)[1] or max(head.rfind(b"{"), 0)
                break
            looked_at = max(len(self.after) - 64, 0)
            piece = next(self._pieces, None)
            if piece is None or len(self.after) >= HEADER_BYTES_MAX:
                self._skip_to_end()
                break
            self.after += piece
        for piece in self._pieces:
            if len(self.after) < HEADER_BYTES_MAX:
                self.after += piece
        self._close(b"")
        return None

    def _skip_to_end(self) -> None:
        """If no members follow the apparent end of the array, use the last such place."""
        if (not self.after.strip(_SPACE) if self.is_array else is_whole(self.after)) or not (
            end := self._likely_end(self.after)
        ):
            return
        if not self._is_astray:
            self._lose(self.after, 0, "the array of events seems to end before it")
        self.after = self.after[end:]

    def exactly(self) -> Batch:
        """Return the last batch again with its times as digits; all later batches have digits too."""
        self._keeps_digits = True
        batch = self._typed(self._last)
        self.read -= len(batch)
        return batch

    def _open(self) -> bytes:
        """Return the bytes after the opening bracket of the array of events."""
        buffer = b""
        for piece in self._pieces:
            looked_at = max(len(buffer) - len('"traceEvents"') - 64, 0)
            buffer += piece
            first = _FIRST.match(buffer)
            if first is not None and first[1] == b"[":
                self.is_array = True
                return buffer[first.end() :]
            if first is not None and first[1] != b"{":
                break
            if found := _ARRAY.search(buffer, looked_at):
                self.before = buffer[: found.start()]
                return buffer[found.end() :]
            if len(buffer) > HEADER_BYTES_MAX:
                break
        raise TraceError(f"{self._source.path}: {self._why_none(buffer)}")

    def _why_none(self, buffer: bytes) -> str:
        if self._source.damage is not None:
            return f"no event could be read: {self._source.damage}"
        text = buffer.lstrip(_SPACE)
        if not text:
            return "the file is empty"
        if not text.startswith(b"{"):
            return f"not JSON, gzip or zstd: begins with {text[:8]!r}"
        if found := _KEY.search(text):
            return f'not a trace: "traceEvents" at byte {found.start()} is no array'
        try:
            msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except _BROKEN as error:
            return f'not a trace: no "traceEvents" in the first {len(buffer)} bytes, and no JSON either: {error}'
        return 'not a trace: JSON without "traceEvents"'

    def _decode_joined(self, rest: bytes, piece: bytes, cut: int) -> Batch | None:
        """Return the events of `rest` and `piece` up to `cut`, copied only once; None if they do not decode."""
        try:
            return self._typed(b"".join((b"[", rest, memoryview(piece)[:cut], b"]")))
        except _BROKEN:
            return None

    def _decode(self, buffer: bytes, cut: int, begin: int) -> tuple[Batch, bytes]:
        """Return the events before `cut`, and the rest of the buffer from `begin`, where the next event should be.

        If the cut is wrong, the rest begins after the last whole event.  If the array ends before the cut, the rest is
        what follows the array.
        """
        text = b"".join((b"[", memoryview(buffer)[:cut], b"]"))
        try:
            return self._mended(text), buffer[begin:]
        except _BROKEN as error:
            end = value_end(error)
        if end:
            try:
                batch = self._mended(text[:end])
            except _BROKEN:  # the number in the message was not the end of the array
                pass
            else:
                self._ended = True
                return batch, buffer[end - 1 :]
        events, end = self._scan(buffer, cut)
        return events, buffer[begin if end == cut and not self._ended else end :]

    def _decode_last(self, buffer: bytes) -> tuple[Batch, bytes]:
        """Return the events of the last piece and what follows them."""
        self._is_last = True
        end = self._likely_end(buffer)
        if end:
            try:
                batch = self._mended(b"".join((b"[", memoryview(buffer)[:end])))
            except _BROKEN:
                if not self.is_array or not buffer[end:].strip(_SPACE):
                    batch, stop = self._scan(buffer, end - 1)
                    if self._ended:  # earlier, so this is not the end
                        return batch, buffer[stop:]
                    if buffer[stop : end - 1].strip(_SPACE):
                        if not _HEADER.search(buffer, end):  # the bracket may belong to the event
                            return batch, buffer[stop:]
                        self._lose(buffer, stop, "it has no end")
                    self._ended = True
                    return batch, buffer[end:]
            else:
                self._ended = True
                return batch, buffer[end:]
        return self._decode(buffer, len(buffer), len(buffer))

    def _likely_end(self, buffer: bytes) -> int:
        """Return where the array of events may end: after the first `]` that members of the document follow."""
        end, likely = len(buffer), 0
        for _ in range(CUTS_TRIED_MAX):
            end = buffer.rfind(b"]", 0, end)
            if end < 0:
                break
            rest = buffer[end + 1 :].lstrip(_SPACE)
            try:
                if not self.is_array:
                    msgspec.json.decode(b"{" + rest.removeprefix(b","), type=dict[str, msgspec.Raw])
            except _BROKEN:
                break
            likely = end + 1
            if self.is_array:
                break
        return likely

    def _mended(self, text: bytes) -> Batch:
        """Return the events of a whole array; a number that is not JSON (`inf`, `nan`) is read as null."""
        try:
            return self._typed(text)
        except _BROKEN:
            if not NO_NUMBER.search(text):
                raise
            try:
                return self._typed(NO_NUMBER.sub(b"null", text))
            except _BROKEN:  # more is wrong; the error raised below has the positions in `text`
                pass
            raise

    def _typed(self, text: bytes) -> Batch:
        """Return the events of a whole array."""
        batch: Batch | None = None
        types = self._types
        if types.known is not None and self._knows_all and not self._keeps_digits:
            try:
                batch = types.known.decode(text)
            except msgspec.ValidationError:  # a category that is not in KNOWN_EVENTS
                self._knows_all = False
        if batch is None:
            try:
                batch = types.digits.decode(text) if self._keeps_digits else types.fast.decode(text)
            except msgspec.ValidationError:
                batch = [types.convert(members) for members in _UNTYPED.decode(text)]
        self._last = text
        self._is_astray = False
        self.read += len(batch)
        return batch

    def _scan(self, buffer: bytes, cut: int) -> tuple[Batch, int]:
        """Return the events before `cut` that decode alone, and the start of the first incomplete one."""
        takes_open = self._is_last or cut > EVENT_BYTES_MAX
        found = scan(buffer[:cut], takes_open=takes_open, is_astray=self._is_astray, convert=self._types.convert)
        for at, reason in found.lost:
            self._lose(buffer, at, reason)
        self._ended, self._is_astray = found.is_end, found.is_astray
        self.read += len(found.events)
        return found.events, found.end

    def _lose(self, buffer: bytes, at: int, reason: str) -> None:
        place = self._source.bytes_out - len(buffer) + at
        message = f"lost an event that is not JSON, first at byte {place}: {reason}"
        self._notes.add("malformed_event", message, effect="left_out")

    def _close(self, rest: bytes) -> None:
        """Add warnings about what is missing at the end of the file."""
        source = self._source
        if source.remark is not None:
            self._notes.add("trailing_data", source.remark)
        if self._ended and self.is_array:
            is_open = False
            if self.after.strip(_SPACE):
                self._notes.add("trailing_data", trailing(self.after))
            self.after = b""
        elif self._ended:
            is_open = not is_closed(self.after)
        else:
            is_open = not self.is_array or bool(rest.strip(_SPACE + b","))
        if source.damage is not None or is_open:
            self.is_truncated = True
            cause = source.damage or "the file ends inside the trace"
            message = f"{cause}; read up to byte {source.bytes_out - len(rest)} of what it unpacks to"
            self._notes.add("truncated", message, effect="cut")


def _last_cut(buffer: bytes) -> tuple[int, int]:
    """Return the place of the last `},{` of `buffer`: after its first brace, and before its second; 0, 0 if none."""
    begin = len(buffer)
    for _ in range(CUTS_TRIED_MAX):
        begin = buffer.rfind(b"{", 0, begin)
        if begin < 1:
            break
        head = buffer[max(begin - 256, 0) : begin].rstrip(_SPACE)
        if head.endswith(b",") and head[:-1].rstrip(_SPACE).endswith(b"}"):
            return buffer.rfind(b"}", 0, begin) + 1, begin
    return 0, 0


def _find_ground(buffer: bytes) -> tuple[bool, bytes]:
    """Resynchronize: return whether no event begins in `buffer`, and the buffer from the next event on."""
    if found := _GROUND.search(buffer):
        return False, buffer[found.end() :]
    return True, buffer[-GROUND_BYTES:]
