"""A recording is read as it was written, and a damaged file gives a specific error."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import msgspec
import pytest

from pacecar.records import Goodbye, recording
from pacecar.records.recording import (
    Chunk,
    GlanceRow,
    RecordingError,
    RecordingEvent,
    RecordingHeader,
    RecordRow,
    TickRow,
    Trigger,
    pack,
    parts,
    read_recording,
)

UP = ("pacecar_gpu_up", ("0",))
POWER = ("pacecar_gpu_power_watts", ("0",))
BYE = Goodbye(job="run-7", rank=0, reason="over", wall_ns=5)
HEADER = RecordingHeader(
    host="node-a",
    pacecar_version="0.1.0",
    written_wall_ns=99,
    window_ns=300,
    triggers=(Trigger(kind="xid", subject="0", detail="Xid 79 of GPU 0", wall_ns=98),),
)
FIRST = Chunk(
    10, 12, 1000, (UP, POWER),
    (TickRow(10, 1, 0, {0: 1, 1: 650_123}, {"gpu": ("ok", "")}, {"gpu": 7}),
     TickRow(12, 2, 3, {1: None}, {"gpu": ("failed", "lost")}, {"gpu": 8})),
    (GlanceRow(11, {1: 650_124}),),
    (RecordRow(11, msgspec.Raw(msgspec.msgpack.encode(BYE))),),
    (RecordingEvent(12, "trigger xid", "Xid 79 of GPU 0"),),
)  # fmt: skip
SECOND = Chunk(13, 13, 1000, (POWER,), (TickRow(13, 3, 0, {0: 2**60 + 1}, {}, {}),), (), (), ())


@pytest.fixture
def data() -> bytes:
    return b"".join(parts(HEADER, [pack(FIRST), pack(SECOND)]))


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "a.recording"
    path.write_bytes(data)
    return path


def test_what_went_in_comes_out(file: Path) -> None:
    read = read_recording(file)
    assert (read.header, read.problem) == (HEADER, None)
    ticks = list(read.ticks())
    assert [tick.values for tick in ticks] == [{UP: 1, POWER: 650_123}, {UP: 1}, {POWER: 2**60 + 1}]
    assert [tick.wall_ns for tick in ticks] == [1010, 1012, 1013]
    assert [tick.outcomes for tick in ticks] == [{"gpu": ("ok", "")}, {"gpu": ("failed", "lost")}, {}]
    assert list(read.glances()) == [(1011, {POWER: 650_124})]
    assert list(read.records()) == [(1011, BYE)]
    assert list(read.events()) == [(1012, FIRST.events[0])]


@pytest.mark.slow
def test_cut_anywhere_it_is_an_error_that_names_the_file_and_salvage_gives_whole_chunks(
    file: Path, data: bytes
) -> None:
    header = len(b"".join(parts(HEADER, []))) - 13  # without the end part
    first = header + 9 + len(pack(FIRST))
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(RecordingError, match=r"a\.recording: (truncated|not a pacecar recording)"):
            read_recording(file)
        if length < header:
            with pytest.raises(RecordingError):
                read_recording(file, salvage=True)
        else:
            salvaged = read_recording(file, salvage=True)
            assert "truncated" in str(salvaged.problem)
            assert len(list(salvaged.chunks())) == (length >= first) + (length >= len(data) - 13)


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_found(file: Path, data: bytes) -> None:
    for at in range(0, len(data), 3):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(RecordingError):
            read_recording(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:18] + struct.pack(">H", 2) + data[20:], "version 2, this pacecar reads 1: a newer pacecar"),
        (lambda data: data[:18] + struct.pack(">H", 0) + data[20:], "version 0"),
        (lambda data: b"#!/bin/sh\n", "not a pacecar recording"),
        (lambda data: b"", "not a pacecar recording"),
        (lambda data: data + b"x", "1 bytes after its end"),
        (lambda data: data[:20] + data[-13:], "damaged: an unexpected part b'E'"),
    ],
)
def test_what_is_no_recording_of_ours_is_named(file: Path, data: bytes, change, message: str) -> None:
    file.write_bytes(change(data))
    with pytest.raises(RecordingError, match=message):
        read_recording(file)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(RecordingError, match="cannot be read"):
            read_recording(path)


def test_lies_inside_sound_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a valid checksum a file may still be a decompression bomb, name missing series, or have no chunks."""
    monkeypatch.setattr(recording, "CHUNK_BYTES_MAX", 1 << 20)
    wild = Chunk(1, 1, 0, (UP,), (TickRow(1, 1, 0, {7: 1}, {}, {}),), (), (), ())
    bad_record = Chunk(1, 1, 0, (), (), (), (RecordRow(1, msgspec.Raw(b"\x01")),), ())
    for body, message in (
        (zlib.compress(b"\0" * (2 << 20)), "larger than"),
        (zlib.compress(msgspec.msgpack.encode([1, 2])), "cannot be read"),
        (b"rubbish", "cannot be decompressed"),
        (pack(FIRST)[:-5], "ends too early"),
        (pack(wild), "series 7 of 1"),
        (pack(bad_record), "a record cannot be read"),
    ):
        path = tmp_path / "b.recording"
        path.write_bytes(b"".join(parts(HEADER, [body])))
        read = read_recording(path)
        with pytest.raises(RecordingError, match=message):
            _ = list(read.ticks()), list(read.records())
