"""Where do recordings lie, and how many?  A folder of our own, whole files only, the oldest thrown away.

A file that is written in place is half a file when the disk is full or the power goes.  Here it gets its name when it
is whole and on the disk (fsync, then rename; rename(2)).  Recordings hold what all users' jobs did, so folder and
files are the daemon's user's alone, and a folder that belongs to somebody else is refused: its owner could swap
files.  The folder is opened and then judged (`safe_files`), and all names are looked up in what was opened.

Bounded by bytes and by number: room is made before a new one is written, from the oldest on, and only among files
that have the form of our names.  A full disk is not made emptier than that: what lies there may be worth more than
one more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.safe_files import create_in, own_folder, sync_folder

__all__ = ["FILES_MAX", "Shelf"]

FILES_MAX = 64
"""Recordings kept, however small."""

SUFFIX = ".recording"
_PREFIX, _TEMPORARY = "pacecar-", ".tmp"


class _Old(NamedTuple):
    written_ns: int
    name: str
    size: int


class Shelf:
    """The folder of the recordings; used by one thread."""

    def __init__(self, folder: str | os.PathLike[str], *, bytes_max: int) -> None:
        self.folder = Path(folder)
        self._bytes_max = bytes_max
        self._number = 0

    def size(self) -> int:
        """Return what the recordings take; 0 when there is no folder; raises OSError."""
        with suppress(FileNotFoundError):
            return sum(old.size for old in self._list(self.folder))
        return 0

    def put(self, pieces: Iterable[bytes], size: int, kind: str, wall_ns: int) -> Path:
        """Write a file of `size` bytes and return where it is; raises OSError, and then there is none."""
        folder = self._open()
        try:
            return self._put(folder, pieces, size, kind, wall_ns)
        finally:
            os.close(folder)

    def _put(self, folder: int, pieces: Iterable[bytes], size: int, kind: str, wall_ns: int) -> Path:
        self._make_room(folder, size)
        self._number += 1
        day = datetime.fromtimestamp(wall_ns // NS_PER_SECOND, UTC).strftime("%Y%m%dT%H%M%SZ")
        path = self.folder / f"{_PREFIX}{day}-{os.getpid()}-{self._number}-{kind}{SUFFIX}"
        temporary = path.with_suffix(_TEMPORARY).name
        descriptor = create_in(folder, temporary)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.writelines(pieces)
                stream.flush()
                os.fsync(stream.fileno())
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        sync_folder(folder)
        return path

    def _open(self) -> int:
        """Return a descriptor of the folder, which lists too; raises OSError for one that others could exchange."""
        own = own_folder(self.folder)
        try:
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=own)
        finally:
            os.close(own)

    def _make_room(self, folder: int, size: int) -> None:
        """Throw away the oldest until one of `size` bytes fits, and what a killed daemon left half written."""
        for left in os.listdir(folder):
            if left.startswith(_PREFIX) and left.endswith(_TEMPORARY):
                with suppress(OSError):
                    os.unlink(left, dir_fd=folder)
        kept = self._list(folder)
        while kept and (len(kept) >= FILES_MAX or sum(old.size for old in kept) + size > self._bytes_max):
            with suppress(FileNotFoundError):
                os.unlink(kept.pop(0).name, dir_fd=folder)

    def _list(self, folder: int | Path) -> list[_Old]:
        """Return the recordings, oldest first."""
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if (
                    entry.name.startswith(_PREFIX)
                    and entry.name.endswith(SUFFIX)
                    and entry.is_file(follow_symlinks=False)
                ):
                    status = entry.stat(follow_symlinks=False)
                    found.append(_Old(status.st_mtime_ns, entry.name, status.st_size))
        return sorted(found)
