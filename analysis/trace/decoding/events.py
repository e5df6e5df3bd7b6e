"""Defines the decoded types of a trace event: only the members that the analysis needs.

Decoding everything would cost three times as much.  So the types below name only what is needed, and the decoder skips
the rest without making objects.  The types are strict, which makes them fast.  An event that does not fit (a quoted
time, null arguments, a stream as text) is decoded without types and converted by `event_of`, which is slower but keeps
the row.

Left out: which events become rows (`rows`), and where events begin and end (`event_stream`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Literal, NamedTuple, Union

import msgspec

from ..columns import NONE

__all__ = [
    "KNOWN_EVENTS",
    "NO_DIGITS",
    "PLAIN",
    "Args",
    "DigitEvent",
    "EventTypes",
    "KnownEvent",
    "TraceEvent",
    "decimal_of",
    "event_of",
    "grid_of",
    "value_end",
]

NUMBER_MAX = (1 << 63) - 1
"""The largest number that fits a column."""


_OTHER_PHASES = ("", *"MsftiIbenCPNODRcvVS(),")
"""The phases of Chrome's Trace Event Format that are skipped: not "X", a complete event, nor its halves "B" and "E"."""

Category = Literal[
    "",
    "Trace",
    "ac2g",
    "async",
    "async_cpu_to_gpu",
    "collective_comm",
    "cpu_instant_event",
    "cpu_op",
    "cuda_driver",
    "cuda_event",
    "cuda_runtime",
    "cuda_sync",
    "fwdbwd",
    "gpu_memcpy",
    "gpu_memset",
    "gpu_user_annotation",
    "hip_runtime",
    "kernel",
    "mtia_ccp_events",
    "mtia_runtime",
    "overhead",
    "privateuse1_driver",
    "privateuse1_runtime",
    "python_function",
    "user_annotation",
    "xpu_driver",
    "xpu_runtime",
    "Kernel",
    "Memcpy",
    "Memset",
    "Operator",
    "Runtime",
]
"""The categories that kineto has written since torch 1.8; others decode more slowly."""


class Args(msgspec.Struct, frozen=True, gc=False):
    """The arguments about where a row ran, what launched it, what it waited for and what a collective moved.

    The names for collectives are those of torch/csrc/distributed/c10d/ParamCommsUtils.hpp.
    """

    correlation: int = NONE
    external_id: int = msgspec.field(name="External id", default=NONE)
    device: int = NONE
    stream: int = NONE
    on_stream: int = msgspec.field(name="wait_on_stream", default=NONE)
    on_record: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=NONE)
    grid: msgspec.Raw = msgspec.Raw()
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
    source_rank: int | None = msgspec.field(name="Src Rank", default=None)
    destination_rank: int | None = msgspec.field(name="Dst Rank", default=None)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())


NO_ARGS = Args()
NO_DIGITS = msgspec.Raw()

_GRID = msgspec.json.Decoder(tuple[int, int, int])

_RAW = frozenset({"grid", "shapes", "types", "concrete"})
_TEXTS = frozenset({"operation", "dtype", "group", "ranks", "hierarchy", "call_stack"})


class KnownEvent(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """One complete event of a known category; `ts` and `dur` in microseconds.

    A category that is a literal type needs no new string, which saves a seventh of the decoding time.
    """

    name: str = ""
    cat: Category = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args = NO_ARGS


_OTHERS = [
    msgspec.defstruct(f"Phase{index}", (), gc=False, frozen=True, tag_field="ph", tag=phase)
    for index, phase in enumerate(_OTHER_PHASES)
]

KNOWN_EVENTS: Any = list[Union[(KnownEvent, *_OTHERS)]]  # type: ignore[valid-type]
"""The type that is tried first.  Events of other phases (four in ten: arrows, counters, thread names) keep only the
fact that they occurred, which saves a fifth of the decoding time."""


class TraceEvent(msgspec.Struct, gc=False):
    """One event of any category."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args = NO_ARGS


class DigitEvent(msgspec.Struct, gc=False):
    """One event whose times are kept as the digits in the file, with any quotes; empty for none."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: msgspec.Raw = NO_DIGITS
    dur: msgspec.Raw = NO_DIGITS
    args: Args = NO_ARGS


class EventTypes(NamedTuple):
    """How a file's events are decoded: decoders from the fastest to the most tolerant, see `event_stream`."""

    known: msgspec.json.Decoder[list[KnownEvent]] | None
    fast: msgspec.json.Decoder[Any]
    digits: msgspec.json.Decoder[Any]
    convert: Callable[[dict[str, Any]], DigitEvent]


PLAIN = EventTypes(
    known=msgspec.json.Decoder(KNOWN_EVENTS),
    fast=msgspec.json.Decoder(list[TraceEvent]),
    digits=msgspec.json.Decoder(list[DigitEvent]),
    convert=lambda members: event_of(members),
)
"""How a file is decoded without details."""


def grid_of(raw: bytes) -> tuple[int, ...] | None:
    """Return the grid in a kernel's arguments (`[8, 1, 1]`), None if they have none."""
    try:
        return _GRID.decode(raw) if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decimal_of(text: str) -> Decimal | None:
    """Return the number in `text`, None if its exponent does not fit a Decimal."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


def value_end(error: Exception) -> int | None:
    """Return where the decoded value ends if `error` means that characters follow it, None for any other error.

    Only the message of msgspec tells (0.18 to 0.22: the position of the first trailing character, counted from one).
    """
    found = _TRAILING.search(str(error))
    return None if found is None else int(found[1]) - 1


@cache
def _fields(kind: type[Args]) -> list[tuple[str, str]]:
    return [(field.name, field.encode_name) for field in msgspec.structs.fields(kind)]


def event_of(
    members: dict[str, Any], kind: type[DigitEvent] = DigitEvent, kind_of_args: type[Args] = Args
) -> DigitEvent:
    """Return an event that was decoded without types, with each member converted to its type if possible."""
    given = members.get("args")
    args = given if isinstance(given, dict) else {}
    values: dict[str, Any] = {}
    for name, key in _fields(kind_of_args):
        value = args.get(key)
        if value is None:
            continue
        if name in _RAW:
            values[name] = _raw(value)
        elif name in _TEXTS:
            values[name] = _text(value)
        elif (number := _whole(value)) is not None:
            values[name] = number
    return kind(
        ph=_text(members.get("ph")),
        name=_text(members.get("name")),
        cat=_text(members.get("cat")),
        pid=_identity(members.get("pid")),
        tid=_identity(members.get("tid")),
        ts=_digits(members.get("ts")),
        dur=_digits(members.get("dur")),
        args=kind_of_args(**values),
    )


def _raw(value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (
        ValueError,
        OverflowError,
        RecursionError,
        UnicodeEncodeError,
    ):  # an integer beyond 64 bits, or half a character
        return msgspec.Raw()


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _identity(value: object) -> int | str:
    return value if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _digits(value: object) -> msgspec.Raw:
    if value is None or isinstance(value, bool | list | dict):
        return NO_DIGITS
    return msgspec.Raw(str(value).encode("utf-8", "replace"))


def _whole(value: object) -> int | None:
    """Return `value` as a whole number, also from text; None if it does not fit a column."""
    number: int | None = None
    if isinstance(value, str):
        number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    elif isinstance(value, Decimal):
        is_small = value.is_finite() and value.adjusted() < 19  # checked before any sum, which may overflow
        number = int(value) if is_small and value == int(value) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    return number if number is not None and abs(number) <= NUMBER_MAX else None
