"""Encodes events of Chrome's format ("Trace Event Format", Google 2016) as the rows of a JSON list.

Times are whole nanoseconds, written as the format's microseconds with three digits, never as floats.
"""

from __future__ import annotations

import msgspec

__all__ = ["FIRST_PID", "ROWS_CHUNK", "arrow", "counter", "json_bytes", "microseconds", "named", "slice_event"]

FIRST_PID = 1_000_000_000
"""Above every process number of Linux (at most 2^22), so that no track collides with one of the original."""

ROWS_CHUNK = 4096
"""How many slices are encoded at once."""

json_bytes = msgspec.json.Encoder().encode
"""Encodes a value; names come from traces and may hold anything."""


def microseconds(time_ns: int) -> bytes:
    """Return whole nanoseconds as the format's microseconds, exactly."""
    sign = b"-" if time_ns < 0 else b""
    return b"%s%d.%03d" % (sign, *divmod(abs(time_ns), 1000))


def slice_event(
    name: bytes, pid: int, tid: int, start_ns: int, end_ns: int, category: bytes = b"ledger", args: bytes = b""
) -> bytes:
    """Return a slice; `name` and `args` are JSON already."""
    more = b',"args":' + args if args else b""
    return b'{"ph":"X","cat":"%s","name":%s,"pid":%d,"tid":%d,"ts":%s,"dur":%s%s}' % (
        category, name, pid, tid, microseconds(start_ns), microseconds(end_ns - start_ns), more,
    )  # fmt: skip


def counter(name: str, pid: int, at_ns: int, values: dict[str, float]) -> bytes:
    """Return the values of a counter from an instant on."""
    return b'{"ph":"C","name":%s,"pid":%d,"ts":%s,"args":%s}' % (
        json_bytes(name), pid, microseconds(at_ns), json_bytes(values),
    )  # fmt: skip


def named(kind: str, pid: int, tid: int, **args: object) -> bytes:
    """Return an event that names or sorts a process or a track."""
    return json_bytes({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})


def arrow(number: int, source: tuple[int, int, int], target: tuple[int, int, int]) -> bytes:
    """Return an arrow between the slices that are open at two (process, track, instant), as two events."""
    (pid, tid, at), (to_pid, to_tid, to_at) = source, target
    common = b'"cat":"critical_path","name":"critical path","id":%d' % number
    return b'{"ph":"s",%s,"pid":%d,"tid":%d,"ts":%s},\n{"ph":"f","bp":"e",%s,"pid":%d,"tid":%d,"ts":%s}' % (
        common, pid, tid, microseconds(at), common, to_pid, to_tid, microseconds(to_at),
    )  # fmt: skip
