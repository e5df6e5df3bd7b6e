"""Yields the decompressed bytes of a trace file (plain, gzip or zstd) as pieces of bounded size.

`gzip.decompress(path.read_bytes())` would hold the file twice, trust the suffix, and give nothing if the last byte is
missing, as it often is because the job was killed while it wrote.  So the file's first bytes decide the format, and the
stream ends early where the file is damaged, and says where.

Left out: what the bytes mean (`event_stream`).
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol

from .remote_file import TracePlace, Url

__all__ = ["PIECE_BYTES", "Progress", "TraceError", "TraceSource"]

PIECE_BYTES = 1 << 20
"""The largest piece.  Measured on 54 MB of events: decoding pieces of 1 MiB takes a fifth less time than pieces of 64
KiB or everything at once, because the objects of a piece reuse the memory of earlier ones."""

READ_BYTES = 1 << 16
"""Bytes of a compressed file read at once.  At most this much around a damaged place in a zstd file is lost."""

Progress = Callable[[int, int | None], None]
"""Called with how many bytes of the file were read, and its size if known."""

GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, 2.3.1
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # RFC 8878, 3.1.1
SKIPPABLE_MAGIC = tuple(bytes((low, 0x2A, 0x4D, 0x18)) for low in range(0x50, 0x60))  # RFC 8878, 3.1.2
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _fastest_inflater() -> Any:  # noqa: ANN401  a module like zlib
    try:
        from isal import isal_zlib  # a third of zlib's time
    except ImportError:
        return zlib
    return isal_zlib


_FAST: Any = _fastest_inflater()


class _Inflater(Protocol):
    def decompress(self, data: bytes, /) -> bytes: ...


class TraceError(Exception):
    """The file is not a trace; the message names the file, the position and the reason."""


class TraceSource:
    """The decompressed bytes of `path`, once, as pieces of at most PIECE_BYTES; a byte order mark is left out.

    After `pieces` has ended: `damage` says why it ended early, None if it did not; `remark` describes a problem that
    lost no data.  `bytes_read` counts bytes of the file, `bytes_out` bytes that were yielded.
    """

    def __init__(self, path: TracePlace, progress: Progress | None = None) -> None:
        self.path = path
        self.damage: str | None = None
        self.remark: str | None = None
        self.bytes_read = 0
        self.bytes_out = 0
        self._progress = progress
        self._size: int | None = None

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes.  Raises TraceError if the file cannot be opened or read, or its format is not supported."""
        try:
            with self.path.open("rb") as file:
                size = self.path.size if isinstance(self.path, Url) else os.fstat(file.fileno()).st_size
                self._size = size or None
                for piece in self._unpack(file):
                    is_first, self.bytes_out = self.bytes_out == 0, self.bytes_out + len(piece)
                    yield piece.removeprefix(BYTE_ORDER_MARK) if is_first else piece
                    if self._progress is not None:
                        self._progress(self.bytes_read, self._size)
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from error

    def _unpack(self, file: BinaryIO) -> Iterator[bytes]:
        first = self._read(file, READ_BYTES)
        if first.startswith(GZIP_MAGIC):
            return self._gzip(file, first)
        if first.startswith((ZSTD_MAGIC, *SKIPPABLE_MAGIC)):
            return self._zstd(file, first)
        return self._plain(file, first)

    def _read(self, file: BinaryIO, count: int) -> bytes:
        data = file.read(count)
        self.bytes_read += len(data)
        return data

    def _plain(self, file: BinaryIO, data: bytes) -> Iterator[bytes]:
        data += self._read(file, PIECE_BYTES - len(data))
        while data:
            yield data
            data = self._read(file, PIECE_BYTES)

    def _gzip(self, file: BinaryIO, data: bytes) -> Iterator[bytes]:
        if _FAST is zlib or not file.seekable():
            yield from self._inflate(file, data, zlib)
            return
        given = 0
        try:
            for piece in self._inflate(file, data, _FAST):
                given += len(piece)
                yield piece
        except _FAST.error:
            self.damage = "it did not inflate"
        if self.damage is not None:  # again with zlib, which reads up to the damaged byte and can say where
            file.seek(0)
            self.bytes_read, self.damage = 0, None
            for piece in self._inflate(file, self._read(file, READ_BYTES), zlib):
                again = min(given, len(piece))
                given -= again
                if again < len(piece):
                    yield piece[again:]

    def _inflate(self, file: BinaryIO, data: bytes, inflater: Any) -> Iterator[bytes]:  # noqa: ANN401  a module
        engine = inflater.decompressobj(wbits=31)
        while True:
            data = data or self._read(file, READ_BYTES)
            if not data:
                self.damage = f"the gzip stream ends at byte {self.bytes_read} before its end mark"
                return
            # A copy (40 KB a megabyte) lets `_salvage` replay the data that raised; isal cannot copy.
            before = engine.copy() if inflater is zlib else None
            try:
                piece = engine.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                if before is None:
                    raise
                self.damage = f"the gzip stream is damaged near byte {self.bytes_read - len(data)}: {error}"
                yield from _salvage(before, data)
                return
            if piece:
                yield piece
            data = engine.unconsumed_tail
            if engine.eof:
                data = self._after(file, engine.unused_data)
                if not data.startswith(GZIP_MAGIC):
                    return
                engine = inflater.decompressobj(wbits=31)

    def _zstd(self, file: BinaryIO, data: bytes) -> Iterator[bytes]:
        decompressor, error_type = _zstd_engine(self.path)
        engine = decompressor()
        while True:
            if engine.needs_input:
                data = data or self._read(file, READ_BYTES)
                if not data:
                    self.damage = f"the zstd stream ends at byte {self.bytes_read} before its end mark"
                    return
            try:
                piece = engine.decompress(data, PIECE_BYTES)
            except error_type as error:
                self.damage = f"the zstd stream is damaged near byte {self.bytes_read}: {error}"
                return
            if piece:
                yield piece
            data = b""
            if engine.eof:
                data = self._after(file, engine.unused_data)
                if not data.startswith((ZSTD_MAGIC, *SKIPPABLE_MAGIC)):
                    return
                engine = decompressor()

    def _after(self, file: BinaryIO, rest: bytes) -> bytes:
        """Return the bytes after one compressed stream; zeros are padding (gzip on tapes), others set `remark`."""
        rest = rest.lstrip(b"\0")
        while len(rest) < len(ZSTD_MAGIC):
            more = self._read(file, READ_BYTES)
            if not more:
                break
            rest = (rest + more).lstrip(b"\0")
        if rest and not rest.startswith((GZIP_MAGIC, ZSTD_MAGIC, *SKIPPABLE_MAGIC)):
            self.remark = f"bytes that are not compressed data follow at byte {self.bytes_read - len(rest)}"
        return rest


def _salvage(engine: _Inflater, data: bytes) -> Iterator[bytes]:
    """Yield the decompressed `data` up to the byte that breaks the stream, in at most READ_BYTES steps."""
    for index in range(len(data)):
        try:
            piece = engine.decompress(data[index : index + 1])
        except zlib.error:
            return
        if piece:
            yield piece


def _zstd_engine(path: TracePlace) -> tuple[Any, type[Exception]]:
    """Return the decompressor's class and its error, from python 3.14 or, for older versions, a package."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise TraceError(
            f"{path}: compressed with zstd, but backports.zstd is not installed (pacecar[analyze])"
        ) from error
    return zstd.ZstdDecompressor, zstd.ZstdError
