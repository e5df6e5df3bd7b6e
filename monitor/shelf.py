"""Where do recordings lie, and how many?  A folder of our own, whole files only, the oldest thrown away.

A file that is written in place is half a file when the disk is full or the power goes.  Here it gets its name when it
is whole and on the disk (fsync, then rename; rename(2)).  Recordings hold what all users' jobs did, so folder and
files are the daemon's user's alone, and a folder that belongs to somebody else is refused: its owner could swap
files.

Bounded by bytes and by number: room is made before a new one is written, from the oldest on, and only among files
that have the form of our names.  A full disk is not made emptier than that: what lies there may be worth more than
one more.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND

__all__ = ["FILES_MAX", "Shelf", "ShelfError"]

FILES_MAX = 64
"""Recordings kept, however small."""

SUFFIX = ".recording"
_PREFIX, _TEMPORARY = "pacecar-", ".tmp"


class ShelfError(OSError):
    """The folder cannot be used; the message names it and the fault."""


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
            return sum(old.size for old in self._list())
        return 0

    def put(self, pieces: Iterable[bytes], size: int, kind: str, wall_ns: int) -> Path:
        """Write a file of `size` bytes and return where it is; raises OSError, and then there is none."""
        self._make_folder()
        self._make_room(size)
        self._number += 1
        day = datetime.fromtimestamp(wall_ns // NS_PER_SECOND, UTC).strftime("%Y%m%dT%H%M%SZ")
        path = self.folder / f"{_PREFIX}{day}-{os.getpid()}-{self._number}-{kind}{SUFFIX}"
        temporary = path.with_suffix(_TEMPORARY)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.writelines(pieces)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._sync_folder()
        return path

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.stat()
        if status.st_uid != os.geteuid():
            raise ShelfError(f"it belongs to uid {status.st_uid}, who could swap the files: choose another")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ShelfError("others may write in it and could swap the files: chmod go-w, or choose another")

    def _make_room(self, size: int) -> None:
        """Throw away the oldest until one of `size` bytes fits, and what a killed daemon left half written."""
        for left in self.folder.glob(f"{_PREFIX}*{_TEMPORARY}"):
            with suppress(OSError):
                left.unlink()
        kept = self._list()
        while kept and (len(kept) >= FILES_MAX or sum(old.size for old in kept) + size > self._bytes_max):
            (self.folder / kept.pop(0).name).unlink(missing_ok=True)

    def _list(self) -> list[_Old]:
        """Return the recordings, oldest first."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if (
                    entry.name.startswith(_PREFIX)
                    and entry.name.endswith(SUFFIX)
                    and entry.is_file(follow_symlinks=False)
                ):
                    status = entry.stat(follow_symlinks=False)
                    found.append(_Old(status.st_mtime_ns, entry.name, status.st_size))
        return sorted(found)

    def _sync_folder(self) -> None:
        """Bring the name to the disk too; a file system that cannot has the file all the same."""
        with suppress(OSError):
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
