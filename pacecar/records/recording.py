r"""Defines the flight recorder's file format, packs its chunks, and reads and checks the file.

A recording holds everything that the daemon saw in its last minutes as it was measured: ticks and glances as
differences, jobs' records as the bytes that the hook sent.

    file   = "pacecar recording\n" version:u16be  part*
    part   = kind:1 length:u32be crc32:u32be  body of length bytes
    kinds    H  header, MessagePack, first      C  chunk, MessagePack under zlib      E  end: the number of chunks

A chunk stands alone: its first tick has every series, so the oldest chunk can be dropped.  Times are of
CLOCK_MONOTONIC, which does not jump; each chunk has the offset to the time of day.

The reader does not trust the file.  It checks lengths, checksums, decompressed sizes and types, and reports in one
sentence what is wrong.  With `salvage` it reads the chunks before the damage.  Left out: when to write
(`pacecar.monitor.recorder.recorder`), and conclusions (`pacecar report`).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from pacecar.records.records import JobHello, JobRecord, Sample

__all__ = [
    "CHUNK_BYTES_MAX",
    "VERSION",
    "Chunk",
    "GlanceRow",
    "RecordRow",
    "Recording",
    "RecordingError",
    "RecordingEvent",
    "RecordingHeader",
    "Series",
    "Tick",
    "TickRow",
    "Trigger",
    "TriggerKind",
    "pack",
    "parts",
    "read_recording",
]  # fmt: skip

VERSION = 1
MAGIC = b"pacecar recording\n"
_PREFIX = struct.Struct(f">{len(MAGIC)}sH")
_PART = struct.Struct(">cII")
_END = struct.Struct(">I")

FILE_BYTES_MAX = 1 << 30
"""Far more than the bound of the recorder's memory."""

CHUNK_BYTES_MAX = 64 << 20
"""Size of a decompressed chunk.  The recorder closes one at a megabyte or two; a decompression bomb has more."""

COMPRESSION_LEVEL = 1
"""For a node with 8 GPUs, level 6 is a seventh smaller but takes three times as long, on the job's processors."""

Series = tuple[str, tuple[str, ...]]
"""A metric's name and its label values, in the catalog's order."""

TriggerKind = Literal["xid", "gpu_lost", "hang", "stall", "request"]

T = TypeVar("T")


class RecordingError(ValueError):
    """The file is not a recording, or cannot be read; the message names the file and the fault."""


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """Why a recording was written: what happened to `subject` (a GPU, a job, a user).

    `uid` owns the job that reported a hang or a stall; `xid` is the code of an Xid error.
    """

    kind: TriggerKind
    subject: str
    detail: str
    wall_ns: int
    uid: int | None = None
    xid: str | None = None


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader must know first.

    `hellos` and `identity` (the series `pacecar_rank_info`) are of the ranks that the daemon knew at the time of
    writing, however long ago they connected.  `dropped` is reason -> number of missing entries.
    """

    host: str
    pacecar_version: str
    written_wall_ns: int
    window_ns: int
    triggers: tuple[Trigger, ...]
    triggers_left_out: int = 0
    hellos: tuple[JobHello, ...] = ()
    identity: tuple[Sample, ...] = ()
    dropped: dict[str, int] = {}


class TickRow(msgspec.Struct, frozen=True, array_like=True):
    """One tick: the series that changed, by number (None: gone), and the collectors whose outcome changed."""

    at_ns: int
    tick: int
    lateness_ns: int
    values: dict[int, int | float | None]
    outcomes: dict[str, tuple[str, str]]
    durations_ns: dict[str, int]


class GlanceRow(msgspec.Struct, frozen=True, array_like=True):
    """The values that one collector read between two ticks."""

    at_ns: int
    values: dict[int, int | float]


class RecordRow(msgspec.Struct, frozen=True, array_like=True):
    """A job's record, as its hook encoded it."""

    at_ns: int
    payload: msgspec.Raw


class RecordingEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event in the daemon, in words."""

    at_ns: int
    kind: str
    text: str


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A few seconds of a recording; `wall_offset_ns` plus a row's time is nanoseconds since the Unix epoch."""

    first_ns: int
    last_ns: int
    wall_offset_ns: int
    series: tuple[Series, ...]
    ticks: tuple[TickRow, ...]
    glances: tuple[GlanceRow, ...]
    records: tuple[RecordRow, ...]
    events: tuple[RecordingEvent, ...]


class Tick(NamedTuple):
    """A tick with all its series, in inside units."""

    wall_ns: int
    tick: int
    lateness_ns: int
    values: dict[Series, int | float]
    outcomes: dict[str, tuple[str, str]]
    durations_ns: dict[str, int]


_encoder = msgspec.msgpack.Encoder()
_headers = msgspec.msgpack.Decoder(RecordingHeader)
_chunks = msgspec.msgpack.Decoder(Chunk)
_records = msgspec.msgpack.Decoder(JobRecord)


def pack(chunk: Chunk) -> bytes:
    """Return `chunk` as bytes, as in memory and in a file."""
    return zlib.compress(_encoder.encode(chunk), COMPRESSION_LEVEL)


def parts(header: RecordingHeader, packed: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a file, part by part."""
    yield _PREFIX.pack(MAGIC, VERSION) + _part(b"H", _encoder.encode(header))
    count = 0
    for body in packed:
        yield _part(b"C", body)
        count += 1
    yield _part(b"E", _END.pack(count))


def _part(kind: bytes, body: bytes) -> bytes:
    return _PART.pack(kind, len(body), zlib.crc32(body)) + body


class Recording:
    """A recording that was read.  Chunks are unpacked one at a time, while iterating.

    `problem` is None if the file is whole, else what is wrong with the rest of it (only with `salvage`).
    """

    def __init__(self, path: Path, header: RecordingHeader, packed: tuple[bytes, ...], problem: str | None) -> None:
        self.path = path
        self.header = header
        self.problem = problem
        self._packed = packed

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks, oldest first; raises RecordingError for one that cannot be unpacked."""
        for number, body in enumerate(self._packed, start=1):
            yield _unpack(self.path, number, body)

    def ticks(self) -> Iterator[Tick]:
        """Yield the ticks, each with all its series."""
        for chunk in self.chunks():
            values: dict[Series, int | float] = {}
            outcomes: dict[str, tuple[str, str]] = {}
            for row in chunk.ticks:
                values = values | {_named(self.path, chunk, n): v for n, v in row.values.items() if v is not None}
                for number, value in row.values.items():
                    if value is None:
                        values.pop(chunk.series[number], None)
                outcomes = outcomes | row.outcomes
                wall_ns = row.at_ns + chunk.wall_offset_ns
                yield Tick(wall_ns, row.tick, row.lateness_ns, values, outcomes, row.durations_ns)

    def glances(self) -> Iterator[tuple[int, dict[Series, int | float]]]:
        """Yield (wall_ns, values) of each glance."""
        for chunk in self.chunks():
            for row in chunk.glances:
                named = {_named(self.path, chunk, number): value for number, value in row.values.items()}
                yield row.at_ns + chunk.wall_offset_ns, named

    def records(self) -> Iterator[tuple[int, JobRecord]]:
        """Yield (wall_ns, record) of each record of a job; those of one user are in order of arrival."""
        for chunk in self.chunks():
            for row in chunk.records:
                try:
                    record: JobRecord = _records.decode(row.payload)
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    raise RecordingError(f"{self.path}: a record cannot be read: {error}") from error
                yield row.at_ns + chunk.wall_offset_ns, record

    def events(self) -> Iterator[tuple[int, RecordingEvent]]:
        """Yield (wall_ns, event); chunks of the host and of users overlap in time."""
        for chunk in self.chunks():
            for event in chunk.events:
                yield event.at_ns + chunk.wall_offset_ns, event


def read_recording(path: str | os.PathLike[str], *, salvage: bool = False) -> Recording:
    """Return the recording at `path`; with `salvage`, the intact part of a damaged one.

    Raises:
        RecordingError: no such file, not a recording, another version, truncated or damaged.
    """
    file = Path(path)
    data = _read(file)
    if not data.startswith(MAGIC[: len(data)]) or not data:
        raise RecordingError(f"{file}: not a pacecar recording")
    if len(data) < _PREFIX.size:
        raise RecordingError(f"{file}: truncated: {len(data)} bytes are less than a recording's header")
    version: int = _PREFIX.unpack_from(data)[1]
    if version != VERSION:
        hint = "a newer pacecar wrote it; upgrade this one" if version > VERSION else "no version of pacecar wrote it"
        raise RecordingError(f"{file}: a recording of version {version}, this pacecar reads {VERSION}: {hint}")
    header: RecordingHeader | None = None
    packed: list[bytes] = []
    try:
        for kind, body in _walk(file, data):
            if kind == b"H" and header is None:
                header = _decode(file, "header", _headers, body)
            elif kind == b"C" and header is not None:
                packed.append(body)
            elif kind == b"E" and header is not None and body == _END.pack(len(packed)):
                return Recording(file, header, tuple(packed), None)
            else:
                raise RecordingError(f"{file}: damaged: an unexpected part {kind!r} after {len(packed)} chunks")
        raise RecordingError(f"{file}: truncated after {len(packed)} complete chunks")
    except RecordingError as error:
        if not salvage or header is None:
            raise
        return Recording(file, header, tuple(packed), str(error))


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise RecordingError(f"{file}: cannot be read: {error.strerror or error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise RecordingError(f"{file}: larger than {FILE_BYTES_MAX} bytes, not a recording")
    return data


def _walk(file: Path, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at, number = _PREFIX.size, 0
    while at < len(data):
        number += 1
        if len(data) - at < _PART.size:
            raise RecordingError(f"{file}: truncated in the head of part {number}")
        kind, length, checksum = _PART.unpack_from(data, at)
        body = data[at + _PART.size : at + _PART.size + length]
        if len(body) < length:
            raise RecordingError(
                f"{file}: truncated in part {number}: it promises {length} bytes, {len(body)} are there"
            )
        if zlib.crc32(body) != checksum:
            raise RecordingError(f"{file}: damaged: part {number} does not have its checksum")
        at += _PART.size + length
        if kind == b"E" and at != len(data):
            raise RecordingError(f"{file}: damaged: {len(data) - at} bytes after its end")
        yield kind, body


def _unpack(file: Path, number: int, body: bytes) -> Chunk:
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(body, CHUNK_BYTES_MAX)
    except zlib.error as error:
        raise RecordingError(f"{file}: damaged: chunk {number} cannot be decompressed: {error}") from error
    if not unpacker.eof:
        why = f"is larger than {CHUNK_BYTES_MAX} bytes" if len(raw) >= CHUNK_BYTES_MAX else "ends too early"
        raise RecordingError(f"{file}: damaged: chunk {number} {why}")
    return _decode(file, f"chunk {number}", _chunks, raw)


def _decode(file: Path, what: str, decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordingError(f"{file}: damaged: its {what} cannot be read: {error}") from error


def _named(file: Path, chunk: Chunk, number: Any) -> Series:  # noqa: ANN401  as it stands in the file
    if not 0 <= number < len(chunk.series):
        raise RecordingError(f"{file}: damaged: a row names series {number} of {len(chunk.series)}")
    return chunk.series[number]
