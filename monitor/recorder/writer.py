"""Writes recordings to a disk that may be full, slow or gone, on a thread that may hang, and tries again.

A full disk is full at the next attempt too, so it is logged once and tried every RETRY_SECONDS; a line for each attempt
would fill the log of a node whose disk is full.  What is written are the chunks of the moment at which it was wanted: a
later attempt does not lose what has meanwhile left the window.  They are held for GIVE_UP_SECONDS, one capture at a
time, so the memory is at most twice that of the ring buffers.  Whoever asked for a file is told at the first failure,
and does not wait.

`RecordingFolderFullError` stores recordings in a folder of our own: whole files only, bounded in bytes and number,
the oldest deleted first.

A file that is written in place is half a file when the disk is full or the power goes.  Here it gets its name when it
is whole and on the disk (fsync, then rename; rename(2)).  Recordings hold what all users' jobs did, so folder and
files are the daemon's user's alone, and a folder that belongs to somebody else is refused: its owner could swap
files.  The folder is opened and then checked (`safe_files`), and all names are looked up in what was opened.

Room is made before a new file is written, from the oldest on, and only among files that have the form of our names.
For a full disk nothing more is deleted than that: old recordings may be worth more than the new one.

A file's name says whose it is.  Those of users' jobs (hangs, stalls, Xids that a program causes) can be made up by the
hundred, so they push out only each other, those of the user with most of them first (`fair_share`).  Those of the node
(other Xids, a lost GPU) and of people who asked push out the users' as long as these take more than a quarter, and then
each other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.formatting.dates import file_stamp
from pacecar.records.recording import RecordingHeader, parts
from pacecar.safe_files import create_in, own_folder, sync_folder

from ..fair_share import yielding_holder
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

_log = logging.getLogger(__name__)


FILES_MAX = 64
"""Recordings kept, however small."""

USERS_SHARE = 4
"""One part in so many of files and bytes is left to users' jobs, however many Xids there are."""

SUFFIX = ".recording"


class Capture(NamedTuple):
    """What is to be written, and who gets the result."""

    header: RecordingHeader
    chunks: tuple[bytes, ...]
    askers: tuple[Callable[[bool, str], None], ...] = ()
    label: str = "request"
    """Part of the file's name, which says whose recording it is (`RecordingFolder`)."""


class RecordingWriter:
    """Writes one capture at a time.  `write` is called by one thread, the figures may be read by any."""

    def __init__(self, clock: Clock, shelf: RecordingFolder) -> None:
        self._clock = clock
        self._shelf = shelf
        self.files = self.failures = self.lost = 0
        self.files_bytes: int | None = None
        self._capture: Capture | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._named: str | None = None
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
        """Try once more what is not written, and end; a write that hangs is left behind."""
        self._stop.set()
        self._wake.set()
        if self.thread is not None:
            if not self.thread.join(timeout_seconds):
                _log.warning("%s does not take what is written, the recording is left behind", self._shelf.folder)
            self.thread = None

    def write(self, capture: Capture) -> None:
        """Have `capture` written; one that still waits, as can be at the daemon's end, is lost."""
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
        """Write `capture`, however often that must be tried."""
        begun = self._clock.monotonic_ns()
        askers = capture.askers
        wants_retry = any(trigger.kind != "request" for trigger in capture.header.triggers)
        while True:
            done, said = self._try(capture)
            for answer in askers:
                answer(done, said)
            askers = ()
            if done or not wants_retry:
                break
            if self._is_hopeless:
                self.lost += 1
                break
            is_late = self._clock.monotonic_ns() - begun >= GIVE_UP_SECONDS * NS_PER_SECOND
            if is_late or self._stop.is_set():
                self.lost += 1
                _log.warning("a recording is given up: %s", said)
                break
            self._stop.wait(RETRY_SECONDS)
        if self._capture is capture:
            self._capture = None

    def _try(self, capture: Capture) -> tuple[bool, str]:
        pieces = list(parts(capture.header, capture.chunks))
        size = sum(map(len, pieces))
        try:
            path = self._shelf.put(pieces, size, capture.label, capture.header.written_wall_ns)
        except OSError as error:
            self._is_hopeless = isinstance(error, RecordingFolderFullError)
            self.failures += 1
            said = f"no recording can be written in {self._shelf.folder}: {error.strerror or error}"
            if said != self._named:
                self._named = said
                again = "it is given up" if self._is_hopeless else f"trying again every {RETRY_SECONDS:g} s"
                _log.warning("%s; %s", said, again)
            return False, said
        self._named, self._is_hopeless = None, False
        self._measure()
        self.files += 1
        _log.info("wrote %s, %d bytes", path, size)
        return True, str(path)

    def _measure(self) -> None:
        try:
            self.files_bytes = self._shelf.size()
        except OSError:
            self.files_bytes = None


_PREFIX, _TEMPORARY = "pacecar-", ".tmp"


class RecordingFolderFullError(OSError):
    """The files that are there may not be deleted for this recording, now or at the next attempt."""


class _Old(NamedTuple):
    written_ns: int
    name: str
    size: int

    @property
    def owner(self) -> str | None:
        """Which user's it is, or that programs caused it; None: the node's, or a person's who asked."""
        return _owner(self.name.removesuffix(SUFFIX).split("-", 4)[-1])


def _owner(label: str) -> str | None:
    """Return whose a recording is by what its name ends in: "xid", "hang-uid1000"."""
    return None if label in ("xid", "gpu_lost", "request") else label.rpartition("-")[2]


class RecordingFolder:
    """The folder of the recordings; used by one thread."""

    def __init__(self, folder: str | os.PathLike[str], *, bytes_max: int) -> None:
        self.folder = Path(folder)
        self._bytes_max = bytes_max
        self._number = 0

    def size(self) -> int:
        """Return the bytes of all recordings; 0 when there is no folder; raises OSError."""
        with suppress(FileNotFoundError):
            return sum(old.size for old in self._list(self.folder))
        return 0

    def put(self, pieces: Iterable[bytes], size: int, label: str, wall_ns: int) -> Path:
        """Write a file of `size` bytes and return where it is; raises OSError, and then there is none.

        `label` says why it was written and whose it is: "xid", "hang-uid1000".
        """
        folder = self._open()
        try:
            return self._put(folder, pieces, size, label, wall_ns)
        finally:
            os.close(folder)

    def _put(self, folder: int, pieces: Iterable[bytes], size: int, label: str, wall_ns: int) -> Path:
        self._make_room(folder, size, _owner(label))
        self._number += 1
        path = self.folder / f"{_PREFIX}{file_stamp(wall_ns)}-{os.getpid()}-{self._number}-{label}{SUFFIX}"
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

    def _make_room(self, folder: int, size: int, owner: str | None) -> None:
        """Delete the oldest until one of `size` bytes fits, and what a killed daemon left half written."""
        for left in os.listdir(folder):
            if left.startswith(_PREFIX) and left.endswith(_TEMPORARY):
                with suppress(OSError):
                    os.unlink(left, dir_fd=folder)
        kept = self._list(folder)
        while kept and (len(kept) >= FILES_MAX or sum(old.size for old in kept) + size > self._bytes_max):
            gone = self._least(kept, size, owner)
            if gone is None:
                raise RecordingFolderFullError(
                    "recordings of the node and of people who asked leave no room for users' jobs"
                )
            kept.remove(gone)
            with suppress(FileNotFoundError):
                os.unlink(gone.name, dir_fd=folder)

    def _least(self, kept: list[_Old], size: int, owner: str | None) -> _Old | None:
        """Return which of `kept`, oldest first, is deleted for one of `size` bytes of `owner`."""
        users = [old for old in kept if old.owner is not None]
        if owner is None:
            are_many = USERS_SHARE * len(users) > FILES_MAX
            are_large = USERS_SHARE * sum(old.size for old in users) > self._bytes_max
            others = [old for old in kept if old.owner is None]
            if others and not (are_many or are_large):
                return others[0]
        held = Counter(old.owner for old in users)  # by number: files of one daemon are alike in size
        giver = yielding_holder(owner, held)
        giver = giver if giver is not None or owner not in held else owner
        return next((old for old in users if giver in (None, old.owner)), None)

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
