"""Reads the lines of a rank's file one after another, in bounded memory, however large the file or a line in it.

The file is opened anew for each piece: a run of a thousand ranks has a thousand of them, and a process may have 1024
files open.  It is read as far as it went when the report began, so that both readings see the same.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from .notices import ReportError, ReportNotices

__all__ = ["LINE_BYTES_MAX", "RankFile", "kind_of"]

PIECE_BYTES_MAX = 256 * 1024
"""Read at a time, of each rank: large enough that opening the file again does not count."""

PIECE_BYTES_MIN = 16 * 1024
"""Read at a time where there are thousands of ranks; it still holds some records."""

LINE_BYTES_MAX = 1024 * 1024
"""No record is nearly as long (a frame is at most 64 KiB)."""

_KIND = re.compile(rb'"type"\s*:\s*"([^"\\]{1,64})"')


def kind_of(line: bytes) -> bytes | None:
    """Return the tag of the record in `line`, which stands first in what we write; None: it has none."""
    found = _KIND.search(line)
    return None if found is None else found[1]


class RankFile:
    """`rank<r>.jsonl` of one rank."""

    def __init__(self, path: Path, rank: int, piece_bytes: int = PIECE_BYTES_MAX) -> None:
        self.path = path
        self.rank = rank
        self._piece_bytes = min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, piece_bytes))
        try:
            status = os.stat(path)
        except OSError as error:
            raise ReportError(f"{path}: cannot be read: {error.strerror or error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise ReportError(f"{path}: not a file")
        self.bytes_end = status.st_size

    @property
    def place(self) -> str:
        """Return how the file is named in messages."""
        return self.path.name

    def lines(self, notices: ReportNotices | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (number, line) of each whole line; faults are added to `notices`, on the first reading."""
        number, rest, at, skipping = 0, b"", 0, False
        while at < self.bytes_end:
            piece = self._piece(at)
            if not piece:
                break  # cut off while we read
            at += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                number += 1
                if skipping:
                    skipping = False
                elif line and not line.isspace():
                    yield number, line
            if len(rest) > LINE_BYTES_MAX:
                if notices is not None and not skipping:
                    text = f"line {number + 1}: longer than {LINE_BYTES_MAX} bytes, no record"
                    notices.add(self.place, "long", text)
                rest, skipping = b"", True
        if notices is not None and rest.strip():
            text = f"line {number + 1}: the last line is cut off: the job was ended, or still runs"
            notices.add(self.place, "cut", text, is_damage=False)

    def _piece(self, at: int) -> bytes:
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(at)
                return stream.read(min(self._piece_bytes, self.bytes_end - at))
        except OSError as error:
            raise ReportError(f"{self.path}: cannot be read: {error.strerror or error}") from error
