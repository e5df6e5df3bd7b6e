"""Reads the header of a trace: rank, world size, backend, devices, process groups and the offset of its clock.

torch writes these members before the events, after them or on both sides, users edit them, and truncation loses them
first.  So each member is decoded by itself, and a broken one costs only itself.  If the header has no rank, the file's
name may supply it, with a warning.

Left out: the events (`event_stream`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..columns import Notes
from .events import value_end
from .remote_file import TracePlace

__all__ = ["TraceHeader", "is_closed", "is_whole", "rank_in_name", "read_header", "trailing"]

RANK_MAX = 1 << 24
"""No job has more ranks; a larger number is not a rank."""

_FILE_RANK = re.compile(
    r"(?:^|.*(?<!local[-_.])(?<![a-z]))rank[-_=]?(\d{1,8})(?!\d)|(?:^|.*[^a-z])worker[-_]?(\d{1,8})(?=[-_.])(?!_\d+\.\d+\.pt\.trace)",
    re.IGNORECASE,
)
_MALFORMED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class _Members(msgspec.Struct):
    """The members that are used, undecoded, so that one of the wrong type costs only itself."""

    distributedInfo: msgspec.Raw = msgspec.Raw()  # noqa: N815 (the file's names)
    deviceProperties: msgspec.Raw = msgspec.Raw()  # noqa: N815
    baseTimeNanoseconds: msgspec.Raw = msgspec.Raw()  # noqa: N815
    hostname: msgspec.Raw = msgspec.Raw()
    host_name: msgspec.Raw = msgspec.Raw()
    host: msgspec.Raw = msgspec.Raw()


@dataclass(slots=True)
class TraceHeader:
    """The data in the members around the events; `groups` maps a process group's name to its global ranks."""

    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    host: str | None = None
    gpus: tuple[str, ...] = ()
    wall_offset_ns: int | None = None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)


def read_header(before: bytes, after: bytes, path: TracePlace, notes: Notes) -> TraceHeader:
    """Return the header from the bytes around the events, with the rank from the file's name if they lack it."""
    members: dict[str, Any] = {}
    for place, text in (("before", _closed(before)), ("after", _opened(after))):
        members |= _decode(text, place, notes)
    header = TraceHeader()
    distributed = members.get("distributedInfo")
    if isinstance(distributed, dict):
        header.rank = _member(distributed, "rank", RANK_MAX, notes)
        header.world_size = _member(distributed, "world_size", RANK_MAX, notes)
        backend = distributed.get("backend")
        header.backend = backend if isinstance(backend, str) and backend else None
        header.groups = _groups(distributed.get("pg_config"))
    devices = members.get("deviceProperties")
    if isinstance(devices, list):
        header.gpus = tuple(str(device.get("name", "")) for device in devices if isinstance(device, dict))
    hosts = (members.get(name) for name in ("hostname", "host_name", "host"))
    header.host = next((host for host in hosts if isinstance(host, str) and host), None)
    header.wall_offset_ns = _member(members, "baseTimeNanoseconds", 1 << 62, notes)
    if header.rank is None and (rank := rank_in_name(path.name)) is not None:
        header.rank = rank
        notes.add("rank_from_name", f"no rank in the trace; its file's name says {header.rank}")
    return header


def rank_in_name(name: str) -> int | None:
    """Return the rank in a file's name, None if it has none.

    It is known for torchtitan (rank3_trace.json), Megatron (rank-3.json.gz), Composer (ep0-ba3-rank3.json,
    rank3.12.pt.trace.json) and a `worker_name` of torch's `tensorboard_trace_handler` (worker3.171.pt.trace.json).
    The last one counts: a job's name before it may have one, too ("lora-rank16"); a local rank does not.  The names of
    dynolog and of the handler by itself have the process's number instead, after the host's name, which may be
    "job-worker-2".
    """
    found = _FILE_RANK.match(name)
    return None if found is None else int(found[1] or found[2])


def is_whole(after: bytes) -> bool:
    """Return whether `after`, the bytes behind the events, are the other members and the end of the document."""
    try:
        msgspec.json.decode(_opened(after), type=dict[str, msgspec.Raw])
    except _MALFORMED:
        return False
    return True


def is_closed(after: bytes) -> bool:
    """Return whether the document ends in `after`, the bytes behind the events; more may follow its end."""
    text = _opened(after)
    if text.endswith(b"}"):
        return True
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except _MALFORMED as error:
        return bool(value_end(error))
    return True


def trailing(rest: bytes) -> str:
    """Return the message about bytes behind the end of the trace."""
    what = "a second trace follows in the same file and is not read" if b'"ph"' in rest else "they are not read"
    return f"{len(rest)} bytes follow the trace: {what}"


def _closed(before: bytes) -> bytes:
    """Return the members before the events as an object of their own."""
    text = before.rstrip().removesuffix(b",")
    return text + b"}" if text.strip() else b""


def _opened(after: bytes) -> bytes:
    """Return the members after the events as an object of their own."""
    text = after.strip()
    return b"{" + text.removeprefix(b",") if text.startswith((b",", b"}")) else b""


def _decode(text: bytes, place: str, notes: Notes) -> dict[str, Any]:
    """Return the sound members in `text`; warn of anything after the object."""
    if not text:
        return {}
    try:
        raw = msgspec.json.decode(text, type=_Members)
    except _MALFORMED as error:
        end = value_end(error)
        if end:
            notes.add("trailing_data", trailing(text[end:]))
            return _decode(text[:end], place, notes)
        notes.add("header_unreadable", f"the members {place} the events are not JSON: {error}")
        return _rescue(text)
    found = {}
    for name in raw.__struct_fields__:
        value = getattr(raw, name)
        if bytes(value):
            try:
                found[name] = msgspec.json.decode(value)
            except _MALFORMED as error:
                notes.add("header_unreadable", f"{name}: {error}")
    return found


def _rescue(text: bytes) -> dict[str, Any]:
    """Return the members that decode alone although the object around them does not."""
    found = {}
    for name in _Members.__struct_fields__:
        key = re.search(rb'"%s"\s*:\s*' % name.encode(), text)
        if key is not None:
            try:
                found[name] = _first_value(text[key.end() :])
            except _MALFORMED:
                continue
    return found


def _first_value(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        end = value_end(error)
        if not end:
            raise
        return msgspec.json.decode(text[:end])


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group that lists all of them."""
    groups = {}
    for group in config if isinstance(config, list) else ():
        if not isinstance(group, dict) or not isinstance(group.get("pg_name"), str | int):
            continue
        ranks = group.get("ranks")
        if isinstance(ranks, list) and ranks and all(type(rank) is int and 0 <= rank < RANK_MAX for rank in ranks):
            size = group.get("pg_size", len(ranks))
            if size == len(ranks):
                groups[str(group["pg_name"])] = tuple(ranks)
    return groups


def _member(members: dict[str, Any], name: str, limit: int, notes: Notes) -> int | None:
    """Return a member that is a whole number below `limit`; warn if it is something else."""
    given = members.get(name)
    found = _whole(given, limit)
    if given is not None and found is None:
        notes.add("header_unreadable", f"{name} cannot be {str(given)[:20]!r}: it is not used", effect="unknown")
    return found


def _whole(value: object, limit: int) -> int | None:
    """Return a whole number below `limit`, also one in quotes."""
    if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and 0 <= value < limit else None
