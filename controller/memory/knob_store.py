"""Stores the best knobs of earlier runs in one file, by job fingerprint, shared by all jobs of a user.

Writing the best settings at the end of a run is wrong in three ways.  Two jobs that end together would lose one result,
so every change is applied under a lock to the file's present contents and replaces it in one rename.  A file that
cannot be read may be the only copy of something, so it is moved aside and named, or left alone if it is not ours.  And
a value that was best once may not be now, so a job tries it again (`remembered_trial`) and marks it stale here when it
fails.

    {"format": "pacecar knobs", "version": 1, "entries": [{"key": ..., "fingerprint": {...}, "knobs": {...}, ...}]}

No torch: the command line reads the file too.  Left out: how a fingerprint is computed (`job_fingerprint`), and the
thread that keeps files away from the training loop (`store_thread`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from pacecar.path_walk import Walk
from pacecar.safe_files import create_in

__all__ = [
    "ENTRIES_MAX",
    "VERSION",
    "DamagedError",
    "Fingerprint",
    "KnobStore",
    "KnobsFileError",
    "StoredKnobs",
    "default_place",
    "forgotten",
    "remembered",
    "stale",
    "used",
]

VERSION = 1
FORMAT = "pacecar knobs"

ENTRIES_MAX = 256
"""Most kinds of job remembered; the least recently used is dropped first.  At 600 bytes each the file stays small."""

FILE_BYTES_MAX = 4 * 1024 * 1024
"""Larger files are not ours (a data set, a device), and are left alone."""

LOCK_SECONDS_MAX = 2.0
"""Longest wait for the lock, which a writer holds for milliseconds: a longer hold is a dead network lock."""

LOCK_POLL_SECONDS = 0.01

ASIDE_MAX = 1000
"""Most names tried for a file that is moved aside."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What the best knobs depend on.  Jobs with equal fingerprints share an entry.

    `parameters` is a hash of all shapes and types in order; `elements`, their number, is for people.  `began` holds the
    knobs that the script itself chose; changing them starts a new entry.
    """

    parameters: str
    elements: int
    world_size: int
    device: str
    backend: str | None
    link: str
    torch: str
    began: dict[str, int]

    @property
    def key(self) -> str:
        """Return a hash of the fingerprint, 16 hexadecimal digits."""
        text = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(text, digest_size=8).hexdigest()


class StoredKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """The best knobs of one kind of job.

    `gain_ratio` is the measured share of step time that they saved against `fingerprint.began`.  `pace_ns` is the step
    under them, None after too few steps.  `stale` says why they are no longer tried, None while they are.
    """

    key: str
    fingerprint: Fingerprint
    knobs: dict[str, int]
    gain_ratio: float
    pace_ns: int | None
    steps: int
    saved_wall_ns: int
    used_wall_ns: int
    job: str
    pacecar_version: str
    stale: str | None = None


class _Contents(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["pacecar knobs"]
    version: int
    entries: tuple[StoredKnobs, ...]


class _Header(msgspec.Struct, frozen=True):
    format: str = ""
    version: int = 0


_header = msgspec.json.Decoder(_Header)
_contents = msgspec.json.Decoder(_Contents)


class KnobsFileError(RuntimeError):
    """The file cannot be used; the message names it and says why."""


class DamagedError(KnobsFileError):
    """The file is ours but unreadable; `suffix` goes into the name that it is moved aside to."""

    def __init__(self, message: str, suffix: str) -> None:
        super().__init__(message)
        self.suffix = suffix


def default_place(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path in the user's state folder (XDG Base Directory Specification 0.8); None for a user without home.

    A path that is not absolute is ignored, as the specification demands.
    """
    for name, inside in (("XDG_STATE_HOME", ""), ("HOME", ".local/state")):
        folder = Path(environ.get(name, ""))
        if folder.is_absolute() and folder != Path("/") and (name != "HOME" or folder.is_dir()):
            return folder / inside / "pacecar" / "knobs.json"
    return None


class KnobStore:
    """The file at `path`.  Every call opens it again; calls may come from any thread and process.

    With `is_ours` (the default place) any file there counts as a knobs file.  Elsewhere a file without our format is
    left alone: a wrong path in a configuration must not destroy data.
    """

    def __init__(self, path: Path, *, is_ours: bool) -> None:
        self.path = path
        self._is_ours = is_ours

    def read(self) -> tuple[StoredKnobs, ...]:
        """Return the entries; none without a file.

        Raises:
            KnobsFileError: the file exists but cannot be read.
        """
        try:
            return _decode(self._bytes(), self.path, is_ours=self._is_ours)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise KnobsFileError(f"{self.path}: cannot be read: {error.strerror}") from error

    def change(self, edit: Callable[[tuple[StoredKnobs, ...]], Sequence[StoredKnobs]]) -> str | None:
        """Replace the file's present entries by `edit(entries)`; return a message for people, or None.

        The message says where a damaged file, or one of another version, was moved first.

        Raises:
            KnobsFileError: it failed, and the file is unchanged.
        """
        try:
            with suppress(FileNotFoundError, DamagedError):
                self.read()  # raises for a file that is not ours, before a lock is made beside it
            with Walk(self.path, make_mode=0o700) as walk:
                walk.entry()
                with _locked(self.path.with_name(self.path.name + ".lock"), walk):
                    message = None
                    try:
                        entries = self.read()
                    except DamagedError as damaged:
                        message = f"{damaged}; it is now {self._move_aside(damaged.suffix, walk)}"
                        entries = ()
                    fresh = tuple(sorted(edit(entries), key=lambda entry: entry.used_wall_ns))[-ENTRIES_MAX:]
                    if fresh != entries:
                        self._replace(fresh)
                    return message
        except OSError as error:
            raise KnobsFileError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _bytes(self) -> bytes:
        # Without O_NONBLOCK a named pipe in the file's place would block the reader forever.
        with Walk(self.path) as walk:
            walk.entry(follow=True, only_own=True)
            handle = os.open(
                walk.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=walk.descriptor
            )
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise KnobsFileError(f"{self.path}: not a file; it is left alone")
            raw = stream.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise KnobsFileError(f"{self.path}: larger than {FILE_BYTES_MAX} bytes, not a knobs file; it is left alone")
        return raw

    def _move_aside(self, suffix: str, walk: Walk) -> Path:
        for number in range(1, ASIDE_MAX + 1):
            name = self.path.with_name(f"{self.path.name}.{suffix}" + (f"-{number}" if number > 1 else ""))
            if not os.path.lexists(name):  # we hold the lock, so no other job moves files here
                os.rename(self.path.name, name.name, src_dir_fd=walk.descriptor, dst_dir_fd=walk.descriptor)
                return name
        raise KnobsFileError(f"{self.path}: {ASIDE_MAX} files were moved aside already; remove some")

    def _replace(self, entries: tuple[StoredKnobs, ...]) -> None:
        """Write a new file and rename it over the old one, so that a reader or a crash sees one of the two."""
        contents = _Contents(format="pacecar knobs", version=VERSION, entries=entries)
        text = msgspec.json.format(msgspec.json.encode(contents), indent=1) + b"\n"
        with Walk(self.path) as walk:
            before = walk.entry(follow=True, only_own=True)  # a link stays a link
            draft = f".{walk.name[:200]}.{secrets.token_hex(8)}.draft"
            handle = create_in(walk.descriptor, draft)
            try:
                with os.fdopen(handle, "wb") as stream:
                    _hand_over(handle, walk)
                    if before is not None and before.st_uid in (os.geteuid(), walk.status.st_uid):
                        os.fchmod(handle, stat.S_IMODE(before.st_mode) & 0o777)
                    stream.write(text)
                    stream.flush()
                    os.fsync(handle)
                os.rename(draft, walk.name, src_dir_fd=walk.descriptor, dst_dir_fd=walk.descriptor)
            except BaseException:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=walk.descriptor)
                raise


def _decode(raw: bytes, path: Path, *, is_ours: bool) -> tuple[StoredKnobs, ...]:
    if not is_ours and raw and FORMAT.encode() not in raw[:256]:
        raise KnobsFileError(f"{path}: not a knobs file of pacecar; it is left alone")
    if not raw:  # an empty file, as `touch` makes it
        return ()
    try:
        header = _header.decode(raw)
        if header.format == FORMAT and header.version != VERSION:
            raise DamagedError(
                f"{path}: of version {header.version}, this pacecar reads {VERSION}", f"version-{header.version}"
            )
        return _contents.decode(raw).entries
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"{path}: damaged: {error}", "damaged") from error


@contextmanager
def _locked(path: Path, walk: Walk) -> Iterator[None]:
    """Hold the lock file.  It is never removed, or a waiting process and the next would lock different files."""
    handle = _open_lock(path, walk)
    try:
        deadline = time.monotonic() + LOCK_SECONDS_MAX
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise KnobsFileError(f"{path}: held by another job for {LOCK_SECONDS_MAX:g} s") from None
                time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _open_lock(path: Path, walk: Walk) -> int:
    """Open the lock file; a new one gets the mode of the knobs file, which users may share."""
    try:
        handle = create_in(walk.descriptor, path.name)
    except FileExistsError:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(path.name, flags, dir_fd=walk.descriptor)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise KnobsFileError(f"{path}: no regular file; it is left alone") from None
        return handle
    try:
        _hand_over(handle, walk)
        with suppress(FileNotFoundError):
            shared = os.stat(walk.name, dir_fd=walk.descriptor, follow_symlinks=False)
            if stat.S_ISREG(shared.st_mode):
                os.fchmod(handle, stat.S_IMODE(shared.st_mode) & 0o666)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _hand_over(handle: int, walk: Walk) -> None:
    """Give a file that root made in a user's folder to that user, who could not read it otherwise."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.fchown(handle, walk.status.st_uid, walk.status.st_gid)


# --- edits: entries in, entries out -------------------------------------------------------------------


def remembered(entries: Sequence[StoredKnobs], entry: StoredKnobs) -> list[StoredKnobs]:
    """Return `entries` with `entry` in place of the earlier one of such a job."""
    return [*(other for other in entries if other.key != entry.key), entry]


def used(entries: Sequence[StoredKnobs], tried: StoredKnobs, wall_ns: int) -> list[StoredKnobs]:
    """Return `entries` with `tried` marked as used at `wall_ns`."""
    return [
        msgspec.structs.replace(other, used_wall_ns=max(wall_ns, other.used_wall_ns))
        if other.key == tried.key
        else other
        for other in entries
    ]


def stale(entries: Sequence[StoredKnobs], tried: StoredKnobs, why: str) -> list[StoredKnobs]:
    """Return `entries` with `tried` marked as stale, unless another job has saved a newer result meanwhile."""
    return [
        msgspec.structs.replace(other, stale=why)
        if other.key == tried.key and other.saved_wall_ns <= tried.saved_wall_ns
        else other
        for other in entries
    ]


def forgotten(entries: Sequence[StoredKnobs], keys: Sequence[str]) -> list[StoredKnobs]:
    """Return `entries` without those whose key begins with one of `keys`."""
    return [entry for entry in entries if not any(entry.key.startswith(key) for key in keys)]
