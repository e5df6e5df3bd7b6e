"""Writes recordings to a folder on a disk that may be full, slow or gone, on its own thread.

A failed write is logged once and retried every RETRY_SECONDS, with the same chunks, so that a later attempt loses
nothing that has left the window.  It is given up after GIVE_UP_SECONDS.  Only one capture waits at a time, so memory is
at most twice that of the ring buffers.  A person who asked for a file learns of the first failure and does not wait.

A file gets its name only when it is complete and on the disk (fsync, then rename(2)).  Recordings show what all users'
jobs did, so only the daemon's user can read folder and files, and a folder of another user is refused, who could
replace files.  The folder is opened and then checked (`safe_files`), and all names are resolved in the open folder.

Room is made before a new file is written: the oldest recordings go first, and only files with the form of our names.  A
full disk deletes nothing else, because old recordings may be worth more than the new one.

A file's name tells whose it is.  Jobs can fake hundreds of recordings (hangs, stalls, Xids that programs cause), so
users' files displace only each other, first those of the user with most (`fair_share`).  Files of the node (other Xids,
a lost GPU) and of people who asked displace users' files while these take more than a quarter, then each other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.formatting.dates import file_stamp
from pacecar.records.recording import RecordingHeader, parts
from pacecar.safe_files import create_in, own_folder, sync_folder

from ..fair_share import yielding_item
from ..watched_threads import WatchedThread

__all__ = [
    "FILES_MAX",
    "GIVE_UP_SECONDS",
    "RETRY_SECONDS",
    "Capture",
    "RecordingFolder",
    "RecordingFolderFullError",
    "RecordingWriter",
]

RETRY_SECONDS = 30.0
GIVE_UP_SECONDS = 600.0

FILES_MAX = 64
"""Recordings kept, however small."""

USERS_SHARE = 4
"""Users' jobs keep 1/USERS_SHARE of files and bytes, however many Xids there are."""

SUFFIX = ".recording"
_PREFIX, _TEMPORARY = "pacecar-", ".tmp"

_log = logging.getLogger(__name__)


class Capture(NamedTuple):
    """A recording to be written, and who gets the result."""

    header: RecordingHeader
    chunks: tuple[bytes, ...]
    askers: tuple[Callable[[bool, str], None], ...] = ()
    label: str = "request"
    """The end of the file's name, which tells whose recording it is."""


class RecordingWriter:
    """Writes one capture at a time.  One thread calls `write`; any may read the figures."""

    def __init__(self, clock: Clock, folder: RecordingFolder) -> None:
        self._clock = clock
        self._folder = folder
        self.files = self.failures = self.lost = 0
        self.files_bytes: int | None = None
        self._capture: Capture | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._logged: str | None = None
        self._is_hopeless = False
        self.thread: WatchedThread | None = None
        """The thread that writes; None before `start` and after `close`."""

    @property
    def is_busy(self) -> bool:
        """Whether a capture is not written yet."""
        return self._capture is not None

    def start(self) -> None:
        """Start the thread."""
        self.thread = WatchedThread("scrivener", self._run, self._clock)
        self.thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Try a pending capture once more, and end; a write that hangs is abandoned."""
        self._stop.set()
        self._wake.set()
        if self.thread is not None:
            if not self.thread.join(timeout_seconds):
                _log.warning("a write to %s hangs; its recording is abandoned", self._folder.path)
            self.thread = None

    def write(self, capture: Capture) -> None:
        """Have `capture` written; one that still waits, which happens only at the daemon's end, is lost."""
        if self._capture is not None:
            self.lost += 1
        self._capture = capture
        self._wake.set()

    def _run(self) -> None:
        self._measure()
        while True:
            self._wake.wait()
            self._wake.clear()
            capture = self._capture
            if capture is not None:
                self._finish(capture)
            if self._stop.is_set() and self._capture is None:
                return

    def _finish(self, capture: Capture) -> None:
        """Write `capture`, with retries."""
        begun = self._clock.monotonic_ns()
        askers = capture.askers
        wants_retry = any(trigger.kind != "request" for trigger in capture.header.triggers)
        while True:
            done, message = self._try(capture)
            for answer in askers:
                answer(done, message)
            askers = ()
            if done or not wants_retry:
                break
            if self._is_hopeless:
                self.lost += 1
                break
            is_late = self._clock.monotonic_ns() - begun >= GIVE_UP_SECONDS * NS_PER_SECOND
            if is_late or self._stop.is_set():
                self.lost += 1
                _log.warning("giving up a recording: %s", message)
                break
            self._stop.wait(RETRY_SECONDS)
        if self._capture is capture:
            self._capture = None

    def _try(self, capture: Capture) -> tuple[bool, str]:
        pieces = list(parts(capture.header, capture.chunks))
        size = sum(map(len, pieces))
        try:
            path = self._folder.put(pieces, size, capture.label, capture.header.written_wall_ns)
        except OSError as error:
            self._is_hopeless = isinstance(error, RecordingFolderFullError)
            self.failures += 1
            message = f"cannot write a recording in {self._folder.path}: {error.strerror or error}"
            if message != self._logged:
                self._logged = message
                _log.warning(
                    "%s; %s", message, "giving up" if self._is_hopeless else f"retrying every {RETRY_SECONDS:g} s"
                )
            return False, message
        self._logged, self._is_hopeless = None, False
        self._measure()
        self.files += 1
        _log.info("wrote %s, %d bytes", path, size)
        return True, str(path)

    def _measure(self) -> None:
        try:
            self.files_bytes = self._folder.size()
        except OSError:
            self.files_bytes = None


class RecordingFolderFullError(OSError):
    """The existing files may not be deleted for this recording, neither now nor at the next attempt."""


class _Old(NamedTuple):
    written_ns: int
    name: str
    size: int

    @property
    def owner(self) -> str | None:
        """Its user, or the programs that caused it; None for files of the node and of people who asked."""
        return _owner(self.name.removesuffix(SUFFIX).split("-", 4)[-1])


def _owner(label: str) -> str | None:
    """Return the owner of a recording by the end of its name: "xid", "hang-uid1000"."""
    return None if label in ("xid", "gpu_lost", "request") else label.rpartition("-")[2]


class RecordingFolder:
    """The folder of the recordings; used by one thread."""

    def __init__(self, folder: str | os.PathLike[str], *, bytes_max: int) -> None:
        self.path = Path(folder)
        self._bytes_max = bytes_max
        self._number = 0

    def size(self) -> int:
        """Return the bytes of all recordings; 0 without a folder; raises OSError."""
        with suppress(FileNotFoundError):
            return sum(old.size for old in self._list(self.path))
        return 0

    def put(self, pieces: Iterable[bytes], size: int, label: str, wall_ns: int) -> Path:
        """Write a file of `size` bytes and return its path; raises OSError without leaving a file.

        `label` tells why it was written and whose it is: "xid", "hang-uid1000".
        """
        folder = self._open()
        try:
            return self._put(folder, pieces, size, label, wall_ns)
        finally:
            os.close(folder)

    def _put(self, folder: int, pieces: Iterable[bytes], size: int, label: str, wall_ns: int) -> Path:
        self._make_room(folder, size, _owner(label))
        self._number += 1
        path = self.path / f"{_PREFIX}{file_stamp(wall_ns)}-{os.getpid()}-{self._number}-{label}{SUFFIX}"
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
        """Return a descriptor of the folder that can list it; raises OSError for one that others could replace."""
        own = own_folder(self.path)
        try:
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=own)
        finally:
            os.close(own)

    def _make_room(self, folder: int, size: int, owner: str | None) -> None:
        """Delete the oldest until one of `size` bytes fits, and files that a killed daemon left incomplete."""
        for left in os.listdir(folder):
            if left.startswith(_PREFIX) and left.endswith(_TEMPORARY):
                with suppress(OSError):
                    os.unlink(left, dir_fd=folder)
        kept = self._list(folder)
        while kept and (len(kept) >= FILES_MAX or sum(old.size for old in kept) + size > self._bytes_max):
            victim = self._victim(kept, size, owner)
            if victim is None:
                raise RecordingFolderFullError(
                    "recordings of the node and of people who asked leave no room for users' jobs"
                )
            kept.remove(victim)
            with suppress(FileNotFoundError):
                os.unlink(victim.name, dir_fd=folder)

    def _victim(self, kept: list[_Old], size: int, owner: str | None) -> _Old | None:
        """Return the file of `kept` (oldest first) to delete for one of `size` bytes of `owner`."""
        users = [old for old in kept if old.owner is not None]
        if owner is None:
            are_many = USERS_SHARE * len(users) > FILES_MAX
            are_large = USERS_SHARE * sum(old.size for old in users) > self._bytes_max
            others = [old for old in kept if old.owner is None]
            if others and not (are_many or are_large):
                return others[0]
        # By number: files of one daemon have similar sizes.
        return yielding_item(owner, users, lambda old: old.owner) if users else None

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
