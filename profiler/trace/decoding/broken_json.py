"""Recovers single events from a part of a trace that is not valid JSON.

Giving up the whole part would lose thousands of good events for one bad one.  So each event is decoded alone by
python's own parser, which is slow and lenient (bytes that are not text, tabs and line ends in strings, NaN).  After an
event that cannot be decoded, reading goes on at the next `},{"`, or at the `}]` that ends the array.

torch does not escape the quotes in a name, so a broken event may hold JSON of its own: after
`record_function('[{"lr": 1}, {"wd": 2}]')` the next `},{"` lies inside the name.  So after a lost event, an object
without a phase ("ph") is one of its fragments: it is neither an event nor another loss.

The code looks at each character a bounded number of times: a file made to be slow is read at a megabyte a second.
Left out: which parts need this (`event_stream`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .events import PLAIN, DigitEvent, decimal_of

__all__ = ["NO_NUMBER", "Scan", "scan"]

NESTED_TRIES_MAX = 64
"""Events of one part that are tried beyond the next `},{"`."""

NO_OBJECT_LETTERS = 64
"""Characters that are read to step over something that is not an object."""

NO_NUMBER = re.compile(rb"(?<=:)\s*[-+]?(?:nan|inf|infinity)(?=\s*[,}])", re.IGNORECASE)
"""What C++ prints for a rate over no time; old kineto wrote "memory bandwidth (GB/s)": inf."""

_UNFINISHED = "it has no end"
_NO_NUMBER_TEXT = re.compile(NO_NUMBER.pattern.decode(), re.IGNORECASE)
_BETWEEN = re.compile(r'\}\s*,\s*(?=\{\s*")')
_END = r"\]\s*(?:,\s*\"|\}|\[|\{|$)"
_LAST = re.compile(r"\}\s*(?=" + _END + ")")
_ARRAY_END = re.compile(_END)
_OBJECT = re.compile(r'\{\s*"')
_GAP = re.compile(r"[ \t\r\n,]*")
_DECODER = json.JSONDecoder(parse_float=decimal_of, parse_constant=lambda _: None, strict=False)


@dataclass(slots=True)
class Scan:
    """What was found: the events, positions and reasons of those lost, where reading stopped, and whether at `]`.

    `is_astray`: the latest thing read was a lost event or a fragment of it.
    """

    events: list[DigitEvent] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    end: int = 0
    is_end: bool = False
    is_astray: bool = False


def scan(
    stretch: bytes,
    *,
    takes_open: bool,
    is_astray: bool = False,
    convert: Callable[[dict[str, Any]], DigitEvent] = PLAIN.convert,
) -> Scan:
    """Return the events of `stretch`, which begins at an event or between two, or, if astray, amid a lost event.

    An event without an end stops the scan, because more of the file may bring the end.  With `takes_open` that event
    is lost instead, as long as another begins after it.  Latin-1 maps each byte to one character, so that positions in
    the text are positions in the bytes.
    """
    text = stretch.decode("latin-1")
    boundaries, objects, ends = _Finder(_BETWEEN, text), _Finder(_OBJECT, text), _Finder(_LAST, text)
    found = Scan(is_astray=is_astray)
    at = tries = 0
    while (at := _skip(text, at)) < len(text):
        if text[at] == "]" and _ARRAY_END.match(text, at):
            found.is_end = True
            at += 1
            break
        between = boundaries.next(at)
        stop = len(text) if between is None else between + 1
        if text[at] != "{":
            stop = min(stop, at + NO_OBJECT_LETTERS)
        value, length, reason = _one(text[at:stop])
        if reason == _UNFINISHED and between is not None and tries < NESTED_TRIES_MAX:
            tries += 1  # `},{` was inside the event, or a bracket is missing
            value, length, reason = _one(text[at:])
        if reason == _UNFINISHED and (between is None or not takes_open):
            break
        if isinstance(value, dict) and ("ph" in value or not found.is_astray):
            found.events.append(convert(_in_utf8(value)))
            found.is_astray = False
        elif not isinstance(value, dict):
            if not found.is_astray or '"ph"' in text[at:stop]:
                found.lost.append((at, reason or "not an object"))
            found.is_astray = True
        if length:
            at += length
        elif text[at] == "{":
            last = ends.next(at)
            at = stop if last is None else min(stop, last + 1)
        else:
            begin = objects.next(at + 1)
            at = len(text) if begin is None else begin
    found.end = at
    return found


def _skip(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return at if gap is None else gap.end()


def _one(text: str) -> tuple[object, int, str]:
    """Return the JSON value at the start of `text`, its length, 0 if there is none, and then the reason."""
    try:
        value, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        is_open = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        reason = _UNFINISHED if is_open else error.msg
    except RecursionError:
        return None, 0, "nested too deeply"
    except ValueError as error:  # an integer of more digits than python reads
        return None, 0, str(error)
    else:
        return value, end, ""
    mended = _NO_NUMBER_TEXT.sub("null", text)
    if mended != text:
        value, end, _ = _one(mended)
        return (value, len(text), "") if end == len(mended) else (None, 0, reason)
    return None, 0, reason


def _in_utf8(members: dict[str, Any]) -> dict[str, Any]:
    """Return `members` with `name` and `cat`, where they are text, decoded as UTF-8."""
    for key in ("name", "cat"):
        value = members.get(key)
        if isinstance(value, str):
            try:
                members[key] = value.encode("latin-1").decode("utf-8", "replace")
            except UnicodeEncodeError:  # it had escapes, so it is text already
                members[key] = value.encode("utf-8", "replace").decode()
    return members


class _Finder:
    """Finds the next match of a pattern for positions that only grow; it looks at each character once."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._found = pattern.finditer(text)
        self._place: int | None = -1

    def next(self, at: int) -> int | None:
        """Return where the pattern begins at `at` or later, None for nowhere."""
        while self._place is not None and self._place < at:
            found = next(self._found, None)
            self._place = None if found is None else found.start()
        return self._place
