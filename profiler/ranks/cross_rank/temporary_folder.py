"""Makes temporary folders, and removes those that killed processes have left.

A process that lives holds a lock on each of its folders, which the kernel drops with the process.  A folder gets the
name by which others find it once it is locked: ranks of one host make theirs, and look for abandoned ones, at one time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["TemporaryFolder", "remove_abandoned"]

PREFIX = "pacecar-window-"
UNLOCKED = "pacecar-new-"


class TemporaryFolder:
    """A new folder of mode 0700; OSError if there can be none."""

    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=UNLOCKED))
        self._lock: int | None = None
        with suppress(OSError):  # a file system without locks, where nothing is taken for abandoned either
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = self.path.rename(self.path.with_name(PREFIX + self.path.name.removeprefix(UNLOCKED)))

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's folders that no process holds; never raises."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with suppress(OSError):
                    _remove_if_abandoned(entry)


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)
