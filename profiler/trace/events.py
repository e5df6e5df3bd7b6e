"""What of one event is worth decoding?

Decoding everything costs three times as much as what is needed here.  So the types below name what is needed, and the
decoder steps over the rest without making objects of it.  They are strict, because that is what makes them fast; an
event that does not fit (a time in quotes, arguments that are null, a stream in words) is decoded without types and put
right by `event_of`, so that it costs time and not its row.

Left out: which events become rows (`rows`) and where one ends and the next begins (`document`).
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec

from pacecar.profiler.trace.table import NONE

__all__ = ["Args", "DigitEvent", "Event", "event_of"]

NUMBER_MAX = (1 << 63) - 1
"""What fits a column."""


class Args(msgspec.Struct, frozen=True, gc=False):
    """The arguments that say where a row ran, what launched it and, of a collective, what it moved.

    The names of the latter are those of torch/csrc/distributed/c10d/ParamCommsUtils.hpp.
    """

    correlation: int = NONE
    external_id: int = msgspec.field(name="External id", default=NONE)
    device: int = NONE
    stream: int = NONE
    operation: str | None = msgspec.field(name="Collective name", default=None)
    elements_in: int | None = msgspec.field(name="In msg nelems", default=None)
    elements_out: int | None = msgspec.field(name="Out msg nelems", default=None)
    dtype: str | None = None
    group: str | None = msgspec.field(name="Process Group Name", default=None)
    group_size: int | None = msgspec.field(name="Group size", default=None)
    ranks: str | None = msgspec.field(name="Process Group Ranks", default=None)
    rank_start: int | None = msgspec.field(name="Global rank start", default=None)
    rank_stride: int | None = msgspec.field(name="Global rank stride", default=None)
    sequence: int | None = msgspec.field(name="Seq", default=None)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event; `ts` and `dur` in microseconds."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args = NO_ARGS


class DigitEvent(msgspec.Struct, gc=False):
    """One event whose times are kept as their digits."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: msgspec.Raw | None = None
    dur: msgspec.Raw | None = None
    args: Args = NO_ARGS


def event_of(members: dict[str, Any]) -> DigitEvent:
    """Return the event that was decoded without types, with what can be read as the right type as that type."""
    given = members.get("args")
    args = given if isinstance(given, dict) else {}
    texts = {"operation", "dtype", "group", "ranks"}
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(Args):
        value = args.get(field.encode_name)
        if value is None:
            continue
        if field.name in ("shapes", "types"):
            values[field.name] = msgspec.Raw(msgspec.json.encode(value))
        elif field.name in texts:
            values[field.name] = _text(value)
        else:
            number = _whole(value)
            if number is not None:
                values[field.name] = number
    return DigitEvent(
        ph=_text(members.get("ph")),
        name=_text(members.get("name")),
        cat=_text(members.get("cat")),
        pid=_identity(members.get("pid")),
        tid=_identity(members.get("tid")),
        ts=_digits(members.get("ts")),
        dur=_digits(members.get("dur")),
        args=Args(**values),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _identity(value: object) -> int | str:
    return value if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _digits(value: object) -> msgspec.Raw | None:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        return None
    return msgspec.Raw(str(value).encode("utf-8", "replace"))


def _whole(value: object) -> int | None:
    """Return the whole number that `value` is or spells; None when it does not fit a column."""
    number: int | None = None
    if isinstance(value, str):
        number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    elif isinstance(value, float | Decimal):
        number = int(value) if abs(value) <= NUMBER_MAX and value == int(value) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    return number if number is not None and abs(number) <= NUMBER_MAX else None
