"""Reads files of the kernel below given roots, and the numbers and rows in them.

`open().read()` would stat and seek a file that the kernel makes anew for each read.  `splitlines()` would take lines
from names that users choose, and `int()` "1_000", " 7" and digits of other scripts, none of which a kernel writes.

`OpenFile` is for the few that are read many times a second.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["NOT_THERE", "KernelFiles", "OpenFile", "integer", "lines_of", "row", "whole"]

SOURCE_BYTES_MAX = 4 * 1024 * 1024
"""No file of /proc or /sys that we read comes near; it bounds a source that never ends."""

DIGITS_MAX = 20
"""Digits of a number of 64 bits."""

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ESRCH, errno.EOPNOTSUPP})
"""Errors by which a kernel says that it has no such thing (EOPNOTSUPP: PSI compiled in and switched off; ESRCH: the
process ended between open and read)."""


class KernelFiles:
    """The files below the roots `proc` and `sys`; tests pass another root or a reader that fails."""

    def __init__(self, proc: str | os.PathLike[str] = "/proc", sys: str | os.PathLike[str] = "/sys") -> None:
        self.proc = Path(proc)
        self.sys = Path(sys)

    def read(self, path: Path) -> str:
        """Return the text of `path`, at most SOURCE_BYTES_MAX of it; raises OSError."""
        # One unbuffered read: /proc files are built per read() and a buffered reader would stat and seek them too.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts: list[bytes] = []
            room = SOURCE_BYTES_MAX
            while room > 0 and (part := os.read(descriptor, min(room, 65536))):
                parts.append(part)
                room -= len(part)
        finally:
            os.close(descriptor)
        return b"".join(parts).decode("utf-8", "replace")

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in the folder `path`; raises OSError."""
        return sorted(os.listdir(path))

    def text(self, path: Path) -> str | None:
        """Return the text of `path`, None where it is missing or cannot be read: for those who do not say why."""
        try:
            return self.read(path)
        except OSError:
            return None


class OpenFile:
    """A file that is read many times a second, and so kept open: the kernel makes it anew for each read at its start.

    One thread at a time.  It is opened at the first read, and after one that failed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def head(self, size: int) -> bytes:
        """Return the first `size` bytes, or all where there are fewer; raises OSError."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._descriptor, size, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close it.  Harmless when repeated."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def whole(text: str) -> int:
    """Return the decimal number in `text`, zero or more; raises ValueError for everything else that int() takes."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def integer(text: str) -> int:
    """As `whole`, with a sign as in -1 for what the kernel does not know, and bounded, so that a float can hold it."""
    digits = text.removeprefix("-")
    if len(digits) > DIGITS_MAX:
        raise ValueError(f"{len(digits)} digits, more than a number of 64 bits has")
    return whole(digits) if digits is text else -whole(digits)


def lines_of(text: str) -> list[str]:
    """Return the lines of `text`, which the kernel ends by a line feed and by nothing else.

    `splitlines` ends them also at a form feed, U+0085 and more, which may be in the name of a process, a control group
    or a mount point: whoever chose the name would add lines to what the kernel says.
    """
    return text.removesuffix("\n").split("\n") if text else []


def row(text: str, key: str) -> list[str]:
    """Return the words behind `key` in the first line that begins with that word; none where no line does."""
    for line in lines_of(text):
        if line.startswith(key):
            first, *words = line.split()
            if first == key:
                return words
    return []
