"""Walks a path component by component, and notes who could have put each component there.

open(2) answers a path with whatever lies there now.  In a folder that others may write, that is what they put there: a
symbolic link to a file of ours, a folder of their own, a named pipe on which an open waits for ever.  To look first and
to open afterwards is no cure, for what lies there may be exchanged in between.  So each component is opened relative to
the descriptor of the one before, without following links, and judged by what was opened.

    in a folder that          an entry can come from
    nobody else may write     the folder's owner, and root
    all may write             anybody: it counts as planted unless root or this user owns it, or it is mounted there
    a group may write         a member, whom the folder's owner chose

A link is followed if root or this user made it, or where nothing was planted on the way.  That is stricter than the
kernel's own protected_symlinks (proc_sys_fs(5)), which not every machine sets and which sees no stranger's folder.

In a user namespace (user_namespaces(7)) every user whom it does not map has one and the same number.  That number names
nobody, so it is never "this user", and it is planted in a folder that all may write.

Left out: access control lists.  What they allow shows in the group's bits (acl(5)).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import deque
from types import TracebackType
from typing import NamedTuple

from pacecar.kernel_files.reader import lines_of

__all__ = ["Planted", "UnsafePathError", "Walk", "mounted_by", "unnameable_uid"]

LINKS_MAX = 40
"""Links in one path, as in the kernel (path_resolution(7))."""

_OCTAL = re.compile(r"\\([0-7]{3})")
_FUSE_USER = re.compile(r"\buser_id=(\d+)")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_UIDS = 2**32 - 1
_OVERFLOW_UID = 65534
_PATH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafePathError(PermissionError):
    """Somebody else could have put there what lies at the path; the message names it and its owner."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))


class Planted(NamedTuple):
    """An entry of a folder that all may write, which belongs neither to root nor to this user."""

    path: str
    uid: int


def unnameable_uid(map_file: str = "/proc/self/uid_map") -> int | None:
    """Return the uid that stands for all users whom this user namespace does not map; None where it maps all."""
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
    """Return who mounted a file system at `path`: 0 for root, or whoever made the container; None where nobody did.

    Users mount those of FUSE, and whoever serves one says who owns what in it (mount.fuse3(8)); the kernel notes whose
    it is, and one of which it does not is nobody's.
    """
    try:
        with open("/proc/self/mountinfo", "rb") as stream:
            mounts = stream.read().decode("utf-8", "surrogateescape")
    except OSError:
        return None
    return mounted_by(path, mounts)


def mounted_by(path: str, mountinfo: str) -> int | None:
    """As `_mounted_by`, from the text of proc_pid_mountinfo(5): the last line at `path` counts."""
    found: int | None = None
    for mount in lines_of(mountinfo):
        place, _, rest = mount.partition(" - ")
        if _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), place.split(" ")[4]) != path:
            continue
        kind, _, options = rest.partition(" ")
        user = _FUSE_USER.search(options)
        found = 0 if not kind.startswith("fuse") else int(user[1]) if user else _OVERFLOW_UID
    return found


class Walk:
    """A walk along `path`.  Use it in a `with`: it holds the descriptor of the folder that it stands in.

    `make_mode` makes folders that are missing, with that mode less the umask.  `folder()` or `entry()` is called once
    and does the walking.  Afterwards:

    descriptor: of the folder where the walk ended, good for the dir_fd of os functions and no more (O_PATH).
    name: of the last component in it, for `entry()`.
    planted: the first planted entry on the way, if there is one.
    vouched: owners of what lies on the way in a folder that only root can write.
    is_protected: no folder on the way can be written by others than root, this user and the vouched.
    """

    def __init__(self, path: str | os.PathLike[str], *, make_mode: int | None = None) -> None:
        self._given = os.fsdecode(path)
        self._wanted = self._given if self._given.startswith("/") else os.path.join(os.getcwd(), self._given)
        self._make_mode = make_mode
        self._left: deque[str] = deque()
        self._at = "/"
        self._links = 0
        self._kept = 0
        """Components at the end that are not entered."""
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
        """Nobody else can exchange what was passed since the path last began at `/`."""
        self._status: os.stat_result

    def __enter__(self) -> Walk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def detach(self) -> int:
        """Return the descriptor, which the caller closes."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    @property
    def unnameable(self) -> int | None:
        """The uid of which nothing can be said here."""
        return self._unnameable

    @property
    def status(self) -> os.stat_result:
        """The folder where the walk stands."""
        return self._status

    @property
    def path(self) -> str:
        """The path to the folder, links resolved."""
        return self._at

    def folder(self) -> None:
        """Walk to the folder that `path` names; raises OSError, UnsafePathError among them."""
        self._start(kept=0)
        while self._left:
            self._enter(self._left.popleft())

    def entry(self, *, follow: bool = False, only_own: bool = False) -> os.stat_result | None:
        """Walk to the folder in which `path` lies; return what is there under `name`, None for nothing.

        With `follow` a link there is followed, on the same terms as any other; with `only_own` too it must be of root
        or this user, for whoever shares the folder could let us write into another file of ours.  Raises OSError.
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
                os.close(found)  # in /proc: only the kernel knows where it leads
                found = -1
                found = os.open(name, (_PATH & ~os.O_NOFOLLOW) | os.O_DIRECTORY, dir_fd=self.descriptor)
            elif not stat.S_ISDIR(status.st_mode):
                if self._make_mode is not None and len(self._left) == self._kept:  # as mkdir(2) says of the last one
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._named(name))
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._given)
            at, found = found, -1
            self._stand(at, self._named(name))
        finally:
            if found >= 0:
                os.close(found)

    def _open(self, name: str) -> int:
        # O_DIRECTORY first: without it autofs(5) mounts nothing.
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
        assert self._make_mode is not None, "what is there was opened, or raised"
        try:
            os.mkdir(name, self._make_mode, dir_fd=self.descriptor)
        except FileExistsError:  # another rank was faster
            pass
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self._named(name)) from None
        return os.open(name, _PATH, dir_fd=self.descriptor)

    def _note(self, name: str, status: os.stat_result) -> None:
        """Judge the entry `name` of the folder where we stand."""
        owner = self._status.st_uid
        if self._status.st_mode & _OTHERS_WRITE:
            self._note_shared(name, status)
            return
        if owner not in self.trusted and owner not in self.vouched and owner != self._unnameable:
            self.is_protected = False
        if owner == 0 and self._is_roots and not stat.S_ISLNK(status.st_mode):
            self.vouched |= {status.st_uid} - {self._unnameable}

    def _note_shared(self, name: str, status: os.stat_result) -> None:
        """Judge the entry `name` of a folder that others may write."""
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
        """Whether the folder is of /proc, whose links lead to open files and have no path."""
        try:
            return self._status.st_dev == os.stat("/proc/self").st_dev
        except OSError:
            return False

    def _named(self, name: str) -> str:
        return os.path.join(self._at, name)
