"""Reads `rank<r>.jsonl`, the records of a rank in its run folder: whole, from an offset, or while it grows.

`for line in file` would hold lines of any length, return a last line that is still being written, and keep a file open
per rank, though a process may have only 1024 files open.  So the file is reopened for each piece, a line counts only
with its newline, and a line longer than LINE_BYTES_MAX is skipped.

Left out: writing it (`pacecar.profiler.transport.run_log`), and reporting lines that are not records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pacecar.records.records import JobRecord

__all__ = ["LINE_BYTES_MAX", "NOT_A_RECORD", "RankFile", "decode", "rank_files"]

PIECE_BYTES_MAX = 256 * 1024
"""Bytes read at a time, enough that reopening the file costs little."""

LINE_BYTES_MAX = 1024 * 1024
"""Far longer than any record (a frame is at most 64 KiB)."""

NOT_A_RECORD = (msgspec.DecodeError, ValueError, RecursionError)
"""What `decode` raises."""

_NAME = re.compile(r"rank(0|[1-9]\d{0,6})\.jsonl")

_decoder: msgspec.json.Decoder[JobRecord] = msgspec.json.Decoder(JobRecord)


def rank_files(folder: Path) -> dict[int, Path]:
    """Return rank -> its file, in the order of ranks.

    Raises:
        OSError: the folder cannot be read.
    """
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def decode(line: bytes) -> JobRecord:
    """Return the record in `line`.

    Raises:
        NOT_A_RECORD: the line is not a record, or one of an unknown kind.
    """
    return _decoder.decode(line)


class RankFile:
    """Reads the lines of one file that begin at or after byte `start`.

    `number` counts the lines from there; `rest` is the beginning of a line that has no newline yet.
    """

    def __init__(self, path: Path, *, start: int = 0, piece_bytes: int = PIECE_BYTES_MAX) -> None:
        self.path = path
        self.number = 0
        self.rest = b""
        self._piece_bytes = piece_bytes
        self._at = max(0, start - 1)
        self._is_skipping = start > 0  # to the end of the line that begins before `start`

    def lines(self, end: int | None = None) -> Iterator[tuple[int, bytes | None]]:
        """Yield (number, line) for each line completed since the last call; the line is None if it is too long.

        Blank lines are skipped.  The file is read up to byte `end`, or to its current end.

        Raises:
            OSError: the file cannot be read.
        """
        while piece := self._piece(end):
            self._at += len(piece)
            *lines, self.rest = (self.rest + piece).split(b"\n")
            for line in lines:
                if self._is_skipping:
                    self._is_skipping = False
                    continue
                self.number += 1
                if line and not line.isspace():
                    yield self.number, line
            if len(self.rest) > LINE_BYTES_MAX:
                self.rest = b""
                if not self._is_skipping:
                    self._is_skipping = True
                    self.number += 1
                    yield self.number, None

    def _piece(self, end: int | None) -> bytes:
        size = self._piece_bytes if end is None else min(self._piece_bytes, end - self._at)
        if size <= 0:
            return b""
        with self.path.open("rb", buffering=0) as stream:
            stream.seek(self._at)
            return stream.read(size)
