"""Creates, replaces and appends to files safely, even in folders that other users may write.

There, `open(path, "w")` might follow another user's symbolic link and overwrite its target, block on a named pipe, or
write into a file that another user can read.  Here a `Walk` finds the folder; a file is created under a new name
(O_EXCL) with mode 0600 and renamed, which replaces a planted link, not its target.  Readers see either the old file or
the complete new one.

All functions raise OSError, and UnsafePathError if another user could have created what is at the path.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from pacecar.path_walk import UnsafePathError, Walk

__all__ = [
    "ANONYMOUS_UID", "FOLDER_MODE", "append_whole", "appending", "create_in", "folder_path", "is_stdout",
    "open_folder", "output", "own_folder", "replacing", "sync_folder",
]  # fmt: skip

FILE_MODE = 0o600
"""Files of runs are private to their user."""

FOLDER_MODE = 0o755
"""For folders created on the way to a file: only the owner may write, whatever the umask."""

ANONYMOUS_UID = 65534
"""The owner of files that root creates on a file server with root_squash (exports(5))."""

_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ATTEMPTS_MAX = 8
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def create_in(folder: int, name: str, *, mode: int = FILE_MODE) -> int:
    """Create `name` in `folder` and return a descriptor to read and write; raises OSError if it exists."""
    return os.open(name, os.O_RDWR | _CREATE, mode, dir_fd=folder)


def open_folder(path: str | os.PathLike[str], *, make_mode: int | None = None) -> int:
    """Return a descriptor (O_PATH) of the folder `path`, created with `make_mode` if missing."""
    with Walk(path, make_mode=make_mode) as walk:
        walk.folder()
        return walk.detach()


def own_folder(path: str | os.PathLike[str]) -> int:
    """As `open_folder`, for a private folder: created 0700, refused if others may write to it or own it."""
    with Walk(path, make_mode=0o700) as walk:
        walk.folder()
        status, me = walk.status, os.geteuid()
        if walk.planted is not None:
            raise UnsafePathError(
                walk.planted.path, f"it belongs to uid {walk.planted.uid}, and anybody could have put it there"
            )
        if status.st_uid != me:
            raise UnsafePathError(path, f"it belongs to uid {status.st_uid}, who could swap the files: choose another")
        if status.st_mode & _OTHERS_WRITE:
            raise UnsafePathError(
                path, "others may write in it and could swap the files: chmod go-w, or choose another"
            )
        return walk.detach()


def folder_path(folder: int) -> str:
    """Return a path to `folder` for libraries that need one, valid while the descriptor is open."""
    return f"/proc/self/fd/{folder}"


def sync_folder(folder: int) -> None:
    """Sync the folder's entries to disk, if its file system supports that."""
    with suppress(OSError):
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing(
    path: str | os.PathLike[str], *, mode: int = FILE_MODE, keep_mode: bool = False, make_mode: int | None = None
) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` at the end, or is deleted on an error.

    `keep_mode` keeps the mode of an existing file of this user.
    """
    with Walk(path, make_mode=make_mode) as walk:
        before = walk.entry()
        kept = stat.S_IMODE(before.st_mode) if keep_mode and before is not None and _is_mine(before) else None
        draft = f".pacecar-{secrets.token_hex(8)}.tmp"
        with _named(path):
            handle = create_in(walk.descriptor, draft, mode=mode)
        try:
            with os.fdopen(handle, "w+b") as stream:
                yield stream
                stream.flush()
                if kept is not None:
                    os.fchmod(handle, kept & 0o777)
                os.fsync(handle)
            with _named(path):
                os.rename(draft, walk.name, src_dir_fd=walk.descriptor, dst_dir_fd=walk.descriptor)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=walk.descriptor)
            raise


def is_stdout(path: str | os.PathLike[str] | None) -> bool:
    """Return whether `path`, as a user gave it, means standard output."""
    return path is not None and os.fspath(path) == "-"


@contextmanager
def output(path: str | os.PathLike[str], *, mode: int = FILE_MODE) -> Iterator[IO[bytes]]:
    """As `replacing`, for a path that a user gave: "-" is standard output, and pipes and devices are written to.

    Raises UnsafePathError for another user's pipe in a folder that all may write, who could read or block us.
    """
    special = os.dup(1) if is_stdout(path) else _special(path)
    if special is None:
        with replacing(path, mode=mode, keep_mode=True) as stream:
            yield stream
    else:
        with os.fdopen(special, "wb") as stream:
            yield stream


def appending(path: str | os.PathLike[str], *, make_mode: int = FOLDER_MODE) -> int:
    """Return a descriptor to append to the file `path`, created with its folders if missing.

    This user must own an existing file (or the folder's owner, unless all may write to the folder), and it must not
    have a second name if others may write to the folder, since that may be another file.  This user's links are
    followed.
    """
    with Walk(path, make_mode=make_mode) as walk:
        walk.entry(follow=True, only_own=True)
        for _ in range(_ATTEMPTS_MAX):
            try:
                handle = os.open(walk.name, _APPEND, dir_fd=walk.descriptor)
            except FileNotFoundError:
                with suppress(FileExistsError):  # another process was faster, so check its file
                    return os.open(walk.name, os.O_WRONLY | os.O_APPEND | _CREATE, FILE_MODE, dir_fd=walk.descriptor)
                continue
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise UnsafePathError(path, "a symbolic link, which is not followed") from None
                if error.errno == errno.ENXIO:
                    raise UnsafePathError(path, "no regular file") from None
                raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
            try:
                _check_append(path, os.fstat(handle), walk)
            except BaseException:
                os.close(handle)
                raise
            return handle
        raise OSError(errno.EAGAIN, "it is made and removed all the time", os.fspath(path))


def append_whole(handle: int, data: bytes) -> None:
    """Append all of `data` to a file from `appending`, or nothing.

    Raises:
        FileNotFoundError: the file was removed.
        OSError: writing failed, for example because the disk is full.
    """
    status = os.fstat(handle)
    if status.st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, "it was removed")
    written = 0
    try:
        while written < len(data):  # a full disk accepts a part, then fails the next write
            written += os.write(handle, data[written:])
    except OSError:
        if written:
            with suppress(OSError):
                os.ftruncate(handle, status.st_size)
        raise


def _check_append(path: str | os.PathLike[str], file: os.stat_result, walk: Walk) -> None:
    folder = walk.status
    if not (stat.S_ISREG(file.st_mode) or (stat.S_ISCHR(file.st_mode) and walk.planted is None)):
        raise UnsafePathError(path, "no regular file")
    allowed = {os.geteuid()}
    if walk.planted is None and not folder.st_mode & stat.S_IWOTH:
        allowed |= {folder.st_uid, ANONYMOUS_UID}
    if file.st_uid not in allowed:
        raise UnsafePathError(path, f"it belongs to uid {file.st_uid}")
    is_private = folder.st_uid in walk.trusted and not folder.st_mode & _OTHERS_WRITE
    if file.st_nlink > 1 and not is_private:
        raise UnsafePathError(path, "it has a second name, and others may write in the folder")


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make errors name the given path instead of the temporary one."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


def _is_mine(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _special(path: str | os.PathLike[str]) -> int | None:
    """Return a descriptor to write to the pipe or device at `path`, or None if it is neither."""
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC
    with Walk(path) as walk:
        try:
            found = walk.entry(follow=True, only_own=True)
        except UnsafePathError:  # a planted link: replaced as such
            return None
        if found is None or stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            return None
        if walk.planted is not None:
            raise UnsafePathError(
                walk.planted.path, f"it belongs to uid {walk.planted.uid}, and anybody could have put it there"
            )
        if walk.is_of_the_kernel:
            return os.open(walk.name, flags, dir_fd=walk.descriptor)
        entry = os.open(walk.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=walk.descriptor)
        try:
            if not os.path.samestat(os.fstat(entry), found):
                raise UnsafePathError(path, "it was exchanged while it was looked at")
            return os.open(f"/proc/self/fd/{entry}", flags)
        finally:
            os.close(entry)
