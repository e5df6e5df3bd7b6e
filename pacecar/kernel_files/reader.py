"""Reads the kernel's files below given roots, and the numbers and rows in them.

The kernel generates these files at each read, so `open().read()` would stat and seek them in vain.  `splitlines()`
would split names that users choose, and `int()` accepts "1_000", " 7" and digits of other scripts, none of which the
kernel writes.

`OpenFile` is for the few files that are read many times per second.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["NOT_THERE", "KernelFiles", "OpenFile", "integer", "lines_of", "row", "whole"]

SOURCE_BYTES_MAX = 4 * 1024 * 1024
"""Far more than any file that we read in /proc or /sys; bounds a source that never ends."""

DIGITS_MAX = 20
"""Digits of a 64-bit number."""

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ESRCH, errno.EOPNOTSUPP})
"""Errors that mean that the kernel has no such file (EOPNOTSUPP: PSI is compiled in but off; ESRCH: the process ended
between open and read)."""


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
        """Return the text of `path`, None if it cannot be read for any reason."""
        try:
            return self.read(path)
        except OSError:
            return None


class OpenFile:
    """A file that is read many times per second and so kept open; a read at offset 0 gives fresh content.

    For one thread at a time.  It is opened at the first read, and again after a failed one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def head(self, size: int) -> bytes:
        """Return at most the first `size` bytes; raises OSError."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._descriptor, size, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; may be called again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def whole(text: str) -> int:
    """Return the non-negative decimal number in `text`; raises ValueError for everything else that int() takes."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def integer(text: str) -> int:
    """Return the decimal number in `text`, which may be negative and has at most 64 bits; raises ValueError."""
    digits = text.removeprefix("-")
    if len(digits) > DIGITS_MAX:
        raise ValueError(f"{len(digits)} digits are more than 64 bits")
    return whole(digits) if digits is text else -whole(digits)


def lines_of(text: str) -> list[str]:
    """Return the lines of `text`, which the kernel ends with a line feed only.

    `splitlines` also splits at a form feed, U+0085 and others.  The name of a process, control group or mount point may
    contain these, so whoever chose the name could forge lines.
    """
    return text.removesuffix("\n").split("\n") if text else []


def row(text: str, key: str) -> list[str]:
    """Return the words after `key` in the first line whose first word is `key`; none if there is no such line."""
    for line in lines_of(text):
        if line.startswith(key):
            first, *words = line.split()
            if first == key:
                return words
    return []
