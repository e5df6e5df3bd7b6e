"""Encodes a trace in a few kilobytes, to send it to another rank, and decodes it.

Times are rounded to UNIT_NS.  Columns are differences, whose bytes are stored by significance, because most high bytes
are zero; then everything is compressed.  What is decoded comes from another process: every length and index is checked.

Pure: a trace in, bytes out, and back.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..trace.columns import NONE, WORKS, CollectiveColumns, DeviceRows, HostKind, HostRows, StepMark, Trace

__all__ = ["BYTES_MAX", "TraceBytesError", "decode_trace", "encode_trace"]

UNIT_NS = 64
"""Kernels are launched microseconds apart, and clocks are known no better."""

BYTES_MAX = 512 * 1024
"""The most bytes of an encoded trace; one of six steps has some 5 to 40 KB."""

PLAIN_BYTES_MAX = 64 * 1024 * 1024

ROWS_MAX = 1_000_000

_TIMES = ("start_ns", "end_ns", "launch_ns")
_DEVICE = ("start_ns", "end_ns", "work", "name", "device", "stream", "launch_ns", "collective")
_HOST = ("start_ns", "end_ns", "kind", "name", "thread", "collective")

Words = Annotated[list[str], Meta(max_length=100_000)]


class TraceBytesError(ValueError):
    """The bytes are not an encoded trace."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    rank: int | None
    world_size: int | None
    backend: str | None
    host: str | None
    start_ns: int
    wall_offset_ns: int | None
    names: Words
    threads: Annotated[list[tuple[str, str]], Meta(max_length=10_000)]
    collectives: Annotated[list[CollectiveColumns], Meta(max_length=100_000)]
    steps: Annotated[list[StepMark], Meta(max_length=10_000)]
    device: dict[str, bytes]
    host_rows: dict[str, bytes]
    is_condensed: bool


_decoder = msgspec.msgpack.Decoder(_Message)


def encode_trace(trace: Trace) -> bytes:
    """Return `trace` without grids, correlations, recorded waits of events and details."""
    base = trace.start_ns or 0
    message = _Message(
        trace.rank, trace.world_size, trace.backend, trace.host, base, trace.wall_offset_ns, list(trace.names),
        list(trace.threads), list(trace.collectives), list(trace.steps),
        _encoded(trace.device, _DEVICE, base), _encoded(trace.host_rows, _HOST, base), trace.is_condensed,
    )  # fmt: skip
    return zlib.compress(msgspec.msgpack.encode(message), 9)


def decode_trace(data: bytes, file: str) -> Trace:
    """Return the trace in `data`, under the name `file`.

    Raises:
        TraceBytesError: `data` is too long, or is not what `encode_trace` writes.
    """
    if len(data) > BYTES_MAX:
        raise TraceBytesError(f"{len(data)} bytes are too many")
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, PLAIN_BYTES_MAX)
        message = _decoder.decode(plain)
        device = _decoded(message.device, _DEVICE, message.start_ns)
        host = _decoded(message.host_rows, _HOST, message.start_ns)
    except (zlib.error, msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise TraceBytesError(str(error)) from error
    names, collectives = len(message.names), len(message.collectives)
    _check(device, {"name": (0, names), "work": (0, len(WORKS)), "collective": (NONE, collectives)})
    limits = {"name": (0, names), "kind": (0, len(HostKind)), "collective": (NONE, collectives)}
    _check(host, limits | {"thread": (0, len(message.threads))})
    ends = [columns["end_ns"].max() for columns in (device, host) if len(columns["end_ns"])]
    end = int(max(ends, default=message.start_ns))
    return Trace(
        file=file, rank=message.rank, world_size=message.world_size, backend=message.backend, host=message.host,
        names=tuple(message.names), threads=tuple(message.threads), collectives=tuple(message.collectives),
        device=DeviceRows(**_typed(DeviceRows, device)), host_rows=HostRows(**_typed(HostRows, host)),
        steps=tuple(message.steps), start_ns=message.start_ns, end_ns=max(end, message.start_ns),
        wall_offset_ns=message.wall_offset_ns, is_condensed=message.is_condensed,
    )  # fmt: skip


def _encoded(rows: DeviceRows | HostRows, columns: tuple[str, ...], base: int) -> dict[str, bytes]:
    found = {}
    for each in columns:
        values = getattr(rows, each).astype(np.int64)
        if each in _TIMES:
            values = np.where(values == NONE, NONE, np.maximum(values - base, 0) // UNIT_NS)
        found[each] = np.diff(values, prepend=0).view(np.uint8).reshape(-1, 8).T.tobytes()
    return found


def _decoded(parts: dict[str, bytes], columns: tuple[str, ...], base: int) -> dict[str, NDArray[np.int64]]:
    found = {}
    for each in columns:
        planes = np.frombuffer(parts.get(each, b""), dtype=np.uint8)
        if len(planes) % 8 or len(planes) > 8 * ROWS_MAX:
            raise ValueError(f"a column of {len(planes)} bytes")
        values = np.ascontiguousarray(planes.reshape(8, -1).T).view(np.int64).reshape(-1).cumsum()
        if each in _TIMES:
            values = np.where(values == NONE, NONE, values * UNIT_NS + base)
        found[each] = values
    if len({len(values) for values in found.values()}) > 1:
        raise ValueError("columns of different lengths")
    return found


def _check(columns: dict[str, NDArray[np.int64]], limits: dict[str, tuple[int, int]]) -> None:
    for each, (least, most) in limits.items():
        values = columns[each]
        if len(values) and not (least <= values.min() and values.max() < most):
            raise TraceBytesError(f"{each} is out of range")
    if (columns["end_ns"] < columns["start_ns"]).any() or (np.diff(columns["start_ns"]) < 0).any():
        raise TraceBytesError("rows end before they begin, or are not in order")


def _typed(rows: type[DeviceRows | HostRows], columns: dict[str, NDArray[np.int64]]) -> dict[str, Any]:
    count = len(columns["start_ns"])
    found: dict[str, Any] = {}
    for each in rows.__dataclass_fields__:
        values = columns.get(each)
        values = np.full(count, NONE, dtype=np.int64) if values is None else values
        small = np.uint8 if each in ("work", "kind") else np.int32
        found[each] = values.astype(np.int64 if each in (*_TIMES, "stream", "correlation") else small)
    return found
