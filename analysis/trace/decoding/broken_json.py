"""Recovers single events from a part of a trace that is not valid JSON.

Dropping the whole part would lose thousands of good events for one bad one.  So each event is decoded alone by python's
own parser, which is slow and lenient (bytes that are not text, tabs and line ends in strings, NaN).  After an event
that cannot be decoded, reading continues at the next `},{"`, or at the `}]` that ends the array.

torch does not escape quotes in names, so a broken event may contain JSON: after
`record_function('[{"lr": 1}, {"wd": 2}]')` the next `},{"` is inside the name.  So an object without a phase ("ph")
after a lost event is a fragment of it: neither an event nor another loss.

The code looks at each character a bounded number of times: even a malicious file is read at a megabyte a second.
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
"""The most events of one part that are tried beyond the next `},{"`."""

NO_OBJECT_LETTERS = 64
"""The most characters read to skip something that is not an object."""

NO_NUMBER = re.compile(rb"(?<=:)\s*[-+]?(?:nan|inf|infinity)(?=\s*[,}])", re.IGNORECASE)
"""What C++ prints for a rate over zero time; old kineto wrote "memory bandwidth (GB/s)": inf."""

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
    """The events, the position and reason of each lost one, where reading stopped, and whether at `]`.

    `is_astray`: the last thing read was a lost event or a fragment of one.
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
    """Return the events of `stretch`, which begins at an event or between two or, if astray, inside a lost event.

    An event without an end stops the scan, because its end may follow in the file.  With `takes_open` that event is
    lost instead if another begins after it.  Latin-1 maps each byte to one character, so that positions in
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
    """Return the JSON value at the start of `text` and its length; 0 and the reason if there is none."""
    try:
        value, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        is_open = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        reason = _UNFINISHED if is_open else error.msg
    except RecursionError:
        return None, 0, "nested too deeply"
    except ValueError as error:  # an integer with more digits than python reads
        return None, 0, str(error)
    else:
        return value, end, ""
    mended = _NO_NUMBER_TEXT.sub("null", text)
    if mended != text:
        value, end, _ = _one(mended)
        return (value, len(text), "") if end == len(mended) else (None, 0, reason)
    return None, 0, reason


def _in_utf8(members: dict[str, Any]) -> dict[str, Any]:
    """Return `members` with its texts, and those of its arguments, decoded as UTF-8 if they are text."""
    arguments = members.get("args")
    for each in (members, arguments) if isinstance(arguments, dict) else (members,):
        for key, value in each.items():
            if isinstance(value, str):
                try:
                    each[key] = value.encode("latin-1").decode("utf-8", "replace")
                except UnicodeEncodeError:  # it had escapes, so it is text already
                    each[key] = value.encode("utf-8", "replace").decode()
    return members


class _Finder:
    """Finds the next match of a pattern for growing positions; it looks at each character once."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._found = pattern.finditer(text)
        self._place: int | None = -1

    def next(self, at: int) -> int | None:
        """Return where the pattern begins at `at` or later, or None."""
        while self._place is not None and self._place < at:
            found = next(self._found, None)
            self._place = None if found is None else found.start()
        return self._place
