"""Walks a path component by component, and records who could have created each component.

In a folder that others may write, they may have created what open(2) finds: a symbolic link to one of our files, their
own folder, a named pipe on which an open blocks.  Checking before opening does not help, because the entry may be
exchanged in between.  So each component is opened relative to the previous one's descriptor, without following links,
and what was opened is then checked.

    in a folder that          an entry can come from
    nobody else may write     the folder's owner, and root
    all may write             anyone: it counts as planted unless root or this user owns it, or it is a mount
    a group may write         a member, whom the folder's owner chose

A link is followed if root or this user made it, or if nothing on the way was planted.  This is stricter than the
kernel's protected_symlinks (proc_sys_fs(5)), which not every machine sets and which ignores folders of other users.

In a user namespace (user_namespaces(7)) all unmapped users share one uid.  It identifies no one, so it never counts as
this user, and its entries count as planted in a folder that all may write.

Access control lists need no check: the group's bits include what they allow (acl(5)).
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from types import TracebackType
from typing import NamedTuple

from pacecar.kernel_files.mounts import parse_mount
from pacecar.kernel_files.reader import lines_of

__all__ = ["Planted", "UnsafePathError", "Walk", "mounted_by", "unnameable_uid"]

LINKS_MAX = 40
"""The most links followed in one path, as in the kernel (path_resolution(7))."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_UIDS = 2**32 - 1
_OVERFLOW_UID = 65534
_PATH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafePathError(PermissionError):
    """Another user could have created what is at the path; the message names it and its owner."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))


class Planted(NamedTuple):
    """An entry of a folder that all may write, owned by neither root nor this user."""

    path: str
    uid: int


def unnameable_uid(map_file: str = "/proc/self/uid_map") -> int | None:
    """Return the uid that all unmapped users share in this user namespace, or None if all are mapped."""
    try:
        with open(map_file, "rb") as stream:
            mapped = sum(int(line.split()[2]) for line in stream.read().splitlines())
        if mapped >= _ALL_UIDS:
            return None
        with open("/proc/sys/kernel/overflowuid", "rb") as stream:
            return int(stream.read())
    except FileNotFoundError:  # a kernel without user namespaces
        return None
    except (OSError, ValueError, IndexError):
        return _OVERFLOW_UID


def _mounted_by(path: str) -> int | None:
    """Return who mounted a file system at `path`: 0 for root or the container's creator, None if nothing is mounted.

    Users can mount FUSE file systems, in which they choose the owners of files (mount.fuse3(8)).  The kernel records
    the user; without that record this returns the overflow uid.
    """
    try:
        with open("/proc/self/mountinfo", "rb") as stream:
            mounts = stream.read().decode("utf-8", "surrogateescape")
    except OSError:
        return None
    return mounted_by(path, mounts)


def mounted_by(path: str, mountinfo: str) -> int | None:
    """As `_mounted_by`, from the text of proc_pid_mountinfo(5), of which the last line for `path` counts."""
    found: int | None = None
    for mount in map(parse_mount, lines_of(mountinfo)):
        if mount.mountpoint == path:
            users = [option.removeprefix("user_id=") for option in mount.options if option.startswith("user_id=")]
            found = 0 if not mount.kind.startswith("fuse") else int(users[0]) if users else _OVERFLOW_UID
    return found


class Walk:
    """A walk along `path`, to be used in a `with`, since it holds the current folder's descriptor.

    With `make_mode` it creates missing folders, with that mode less the umask.  Call `folder()` or `entry()` once to
    walk.  Afterwards:

    descriptor: the last folder's (O_PATH, so only for the dir_fd of os functions).
    name: the last component's, for `entry()`.
    planted: the first planted entry on the way, if any.
    vouched: owners of entries on the way in folders that only root can write.
    is_protected: only root, this user and the vouched can write the folders on the way.
    """

    def __init__(self, path: str | os.PathLike[str], *, make_mode: int | None = None) -> None:
        self._given = os.fsdecode(path)
        self._wanted = self._given if self._given.startswith("/") else os.path.join(os.getcwd(), self._given)
        self._make_mode = make_mode
        self._left: deque[str] = deque()
        self._at = "/"
        self._links = 0
        self._kept = 0
        """How many components at the end are not entered."""
        self._unnameable = unnameable_uid()
        me = os.geteuid()
        self.trusted: frozenset[int] = frozenset({0, me} - {self._unnameable})
        """Root and this user."""
        self.descriptor = -1
        self.name = "."
        self.planted: Planted | None = None
        self.vouched: set[int] = set()
        self.is_protected = True
        self._is_roots = True
        """No other user can exchange the components since the path last began at `/`."""
        self._status: os.stat_result

    def __enter__(self) -> Walk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def detach(self) -> int:
        """Return the descriptor, which the caller closes."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    @property
    def unnameable(self) -> int | None:
        """The uid that unmapped users share, if any."""
        return self._unnameable

    @property
    def status(self) -> os.stat_result:
        """The status of the current folder."""
        return self._status

    @property
    def path(self) -> str:
        """The path of the current folder, without links."""
        return self._at

    def folder(self) -> None:
        """Walk to the folder `path`; raises OSError, including UnsafePathError."""
        self._start(kept=0)
        while self._left:
            self._enter(self._left.popleft())

    def entry(self, *, follow: bool = False, only_own: bool = False) -> os.stat_result | None:
        """Walk to the folder of `path` and return the status of the entry `name`, or None if it does not exist.

        With `follow`, follow a link there as any other.  With `only_own` as well, root or this user must own the link:
        otherwise users who share the folder could make us write into another of our files.  Raises OSError.
        """
        self._start(kept=1)
        while self._left:
            name = self._left.popleft()
            if self._left or name == "..":
                self._enter(name)
                continue
            self.name = name
            try:
                found = os.open(name, _PATH, dir_fd=self.descriptor)
            except FileNotFoundError:
                return None
            try:
                status = os.fstat(found)
                self._note(name, status)
                if not (follow and stat.S_ISLNK(status.st_mode)):
                    return status
                self._check_link(name, status, only_own=only_own)
                if not self.is_of_the_kernel:
                    self._follow(found)
                    continue
                return os.stat(name, dir_fd=self.descriptor)
            finally:
                os.close(found)
        self.name = "."
        return self._status

    def _start(self, *, kept: int) -> None:
        self.close()
        self._kept = kept
        self._left = deque(part for part in self._wanted.split("/") if part not in ("", "."))
        self._stand(os.open("/", _PATH | os.O_DIRECTORY), "/")

    def _stand(self, descriptor: int, path: str) -> None:
        self.close()
        self.descriptor, self._at = descriptor, path
        self._status = os.fstat(descriptor)

    def _enter(self, name: str) -> None:
        if name == "..":
            self._stand(os.open("..", _PATH | os.O_DIRECTORY, dir_fd=self.descriptor), os.path.dirname(self._at))
            return
        found = self._open(name)
        try:
            status = os.fstat(found)
            self._note(name, status)
            if stat.S_ISLNK(status.st_mode):
                self._check_link(name, status)
                if not self.is_of_the_kernel:
                    self._follow(found)
                    return
                os.close(found)  # in /proc, where only the kernel can follow it
                found = -1
                found = os.open(name, (_PATH & ~os.O_NOFOLLOW) | os.O_DIRECTORY, dir_fd=self.descriptor)
            elif not stat.S_ISDIR(status.st_mode):
                if self._make_mode is not None and len(self._left) == self._kept:  # like mkdir(2) for the last one
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._named(name))
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._given)
            at, found = found, -1
            self._stand(at, self._named(name))
        finally:
            if found >= 0:
                os.close(found)

    def _open(self, name: str) -> int:
        # O_DIRECTORY first, without which autofs(5) does not mount.
        for flags in (_PATH | os.O_DIRECTORY, _PATH):
            try:
                return os.open(name, flags, dir_fd=self.descriptor)
            except NotADirectoryError:
                continue
            except FileNotFoundError:
                if self._make_mode is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._given) from None
                break
            except PermissionError as error:
                raise PermissionError(error.errno, error.strerror, self._named(name)) from None
        assert self._make_mode is not None, "an existing entry was opened, or raised"
        try:
            os.mkdir(name, self._make_mode, dir_fd=self.descriptor)
        except FileExistsError:  # another rank was faster
            pass
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self._named(name)) from None
        return os.open(name, _PATH, dir_fd=self.descriptor)

    def _note(self, name: str, status: os.stat_result) -> None:
        """Record who could have created the entry `name` of the current folder."""
        owner = self._status.st_uid
        if self._status.st_mode & _OTHERS_WRITE:
            self._note_shared(name, status)
            return
        if owner not in self.trusted and owner not in self.vouched and owner != self._unnameable:
            self.is_protected = False
        if owner == 0 and self._is_roots and not stat.S_ISLNK(status.st_mode):
            self.vouched |= {status.st_uid} - {self._unnameable}

    def _note_shared(self, name: str, status: os.stat_result) -> None:
        """As `_note`, for a folder that others may write."""
        mode, owner = self._status.st_mode, status.st_uid
        if owner not in self.trusted or status.st_dev != self._status.st_dev:
            mounted_by_uid = _mounted_by(self._named(name))
            if mounted_by_uid == 0:
                self.vouched |= {owner} - {self._unnameable}
                return
            owner = owner if mounted_by_uid is None else mounted_by_uid
        is_trusted = owner in self.trusted
        if not (is_trusted and mode & stat.S_ISVTX):
            self._is_roots = self.is_protected = False
        if not is_trusted and mode & stat.S_IWOTH and self.planted is None:
            self.planted = Planted(self._named(name), owner)

    def _follow(self, link: int) -> None:
        self._links += 1
        if self._links > LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._given)
        target = os.readlink("", dir_fd=link)
        self._left.extendleft(reversed([part for part in target.split("/") if part not in ("", ".")]))
        if target.startswith("/"):
            self._is_roots = self.planted is None
            self._stand(os.open("/", _PATH | os.O_DIRECTORY), "/")

    def _check_link(self, name: str, status: os.stat_result, *, only_own: bool = False) -> None:
        if status.st_uid not in self.trusted and (only_own or self.planted is not None):
            raise UnsafePathError(
                self._named(name), f"a symbolic link that uid {status.st_uid} made, which is not followed"
            )

    @property
    def is_of_the_kernel(self) -> bool:
        """Whether the folder is in /proc, whose links lead to open files without a path."""
        try:
            return self._status.st_dev == os.stat("/proc/self").st_dev
        except OSError:
            return False

    def _named(self, name: str) -> str:
        return os.path.join(self._at, name)
