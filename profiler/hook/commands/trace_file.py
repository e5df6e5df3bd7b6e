"""Writes one trace into a folder that other users may write in, without following links that they put there.

torch writes to a path, first to a file beside it, with the umask's mode, and follows links.  So it writes into a folder
of mode 0700 made for this trace under a random name and reached by its descriptor: renames in the outer folder have no
effect.  The compressed trace is a new file (0600) that gets its name when it is complete.
"""

from __future__ import annotations

import gzip
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from pacecar.path_walk import UnsafePathError
from pacecar.safe_files import ANONYMOUS_UID, create_in, folder_path

__all__ = ["TraceFile"]

COPY_BYTES = 1024 * 1024
COMPRESSION = 1
"""gzip's level: level 1 makes 4 % of 60 MB of JSON in 0.13 s, level 9 makes 3.7 % in 1.3 s."""

_PLAIN = "trace.partial"


class TraceFile:
    """The trace file to write in the folder `descriptor`, which it closes; `path` is for display."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._folder = descriptor
        self._room = -1
        self._room_name = f".pacecar-{secrets.token_hex(8)}"

    def plain(self) -> str:
        """Return the path for torch to write to; raises OSError."""
        os.mkdir(self._room_name, 0o700, dir_fd=self._folder)
        self._room = os.open(
            self._room_name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder
        )
        owner = os.fstat(self._room).st_uid
        if owner not in (os.geteuid(), ANONYMOUS_UID):
            raise UnsafePathError(self.path.parent, f"files made there belong to uid {owner}")
        return f"{folder_path(self._room)}/{_PLAIN}"

    def check_whole(self) -> None:
        """Raise OSError unless torch's file ends like a trace: Kineto does not report a full disk."""
        try:
            with os.fdopen(self._open_plain(), "rb") as stream:
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) == b"}":
                    return
        except OSError as error:
            raise OSError("nothing could be written: is the disk full, or the directory gone?") from error
        raise OSError("only a part could be written: is the disk full?")

    def compress(self) -> None:
        """Compress torch's file into the final one; after an OSError there is no file."""
        draft = f"{self._room_name}.gz"
        handle = create_in(self._folder, draft)
        try:
            with (
                os.fdopen(self._open_plain(), "rb") as source,
                os.fdopen(handle, "wb") as raw,
                gzip.GzipFile(self.path.name.removesuffix(".gz"), "wb", COMPRESSION, raw) as target,
            ):
                shutil.copyfileobj(source, target, COPY_BYTES)
            os.rename(draft, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=self._folder)
            raise

    def move_to(self, url: str) -> None:
        """Copy the final file to `url` with fsspec, and remove it here.  Raises whatever the driver raises."""
        import fsspec

        handle = os.open(self.path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        with os.fdopen(handle, "rb") as source, fsspec.open(url, "wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
        os.unlink(self.path.name, dir_fd=self._folder)

    def close(self) -> None:
        """Remove torch's file and close the folders; may be called repeatedly."""
        if self._room >= 0:
            with suppress(OSError):
                for name in os.listdir(self._room):
                    os.unlink(name, dir_fd=self._room)
            with suppress(OSError):
                os.rmdir(self._room_name, dir_fd=self._folder)
            os.close(self._room)
            self._room = -1
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _open_plain(self) -> int:
        return os.open(_PLAIN, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._room)
