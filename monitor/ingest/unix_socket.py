"""Makes the Unix socket on which the daemon receives hooks, without removing a socket or file that is in use.

A socket file outlives a killed daemon, so the daemon connects to find out whether another one listens.  It replaces a
socket without a listener, but never a live one's socket or any other file.  The socket gets its mode before its name,
so nothing can connect to it too early.

A socket opened by the service manager (`systemd`) is used as it is: its unit defines name, mode and group, and it stays
when the daemon ends.

Left out on purpose: a lock against two daemons that start in the same millisecond on one stale file.  The daemon binds
its TCP port first, and only one daemon can.
"""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from pacecar.path_walk import Walk

__all__ = ["NAME_BYTES_MAX", "UnixSocket", "UnixSocketError"]

BACKLOG = 1024
"""Hooks waiting to be accepted; beyond it connect(2) fails with EAGAIN.  net.core.somaxconn may allow fewer."""

PATH_BYTES_MAX = 107
"""sockaddr_un.sun_path has 108 bytes including the final zero (unix(7))."""

NAME_BYTES_MAX = PATH_BYTES_MAX - len(".4194304")
"""The longest path for a daemon of any pid: it binds to path and pid first (proc(5), pid_max)."""

SYSTEM_DIRECTORY = Path("/run/pacecar")
"""Folder of root's daemon, open to all users' jobs; any other folder belongs to one user."""

_OPTIONS = "--socket or [daemon] socket"
_PROBE_SECONDS = 1.0


class UnixSocketError(RuntimeError):
    """The socket cannot be made; the message names the path and says what to do."""


class UnixSocket:
    """A listening SOCK_SEQPACKET socket with a path."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str | None = None,
        group: str | None = None,
        inherited: socket.socket | None = None,
    ) -> None:
        self.path = Path(path)
        self._inherited = inherited
        self._is_system = self.path.parent == SYSTEM_DIRECTORY
        self._mode = int(mode, 8) if mode is not None else 0o666 if self._is_system else 0o600
        self._group = group
        self._inode: tuple[int, int] | None = None

    def open(self) -> socket.socket:
        """Return the listening, non-blocking socket; raises UnixSocketError."""
        if self._inherited is not None:
            return self._take_over(self._inherited)
        length = len(os.fsencode(self.path)) + len(self._suffix)
        if length > PATH_BYTES_MAX:
            raise UnixSocketError(
                f"socket path {self.path} is {length} bytes long with its temporary suffix,"
                f" {PATH_BYTES_MAX} are possible: choose a shorter one with {_OPTIONS}"
            )
        self._make_folder()
        self._remove_stale()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._bind(listener)
        except OSError as error:
            listener.close()
            raise self._failure(error) from error
        except UnixSocketError:
            listener.close()
            raise
        return listener

    def close(self) -> None:
        """Remove the socket file if it is still ours."""
        if self._inode is None:
            return
        with suppress(OSError):
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) == self._inode:
                self.path.unlink()
        self._inode = None

    def _take_over(self, inherited: socket.socket) -> socket.socket:
        name = inherited.getsockname()
        if os.path.abspath(name) != os.path.abspath(self.path):
            inherited.close()
            raise UnixSocketError(
                f"the service manager opened {name or 'a socket without a name'}, but hooks connect to {self.path}:"
                " ListenSequentialPacket= of the socket unit and [daemon] socket must name the same path"
            )
        if not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            inherited.close()
            raise UnixSocketError(
                f"the service manager handed over {name}, which does not listen: its unit needs Accept=no"
            )
        return inherited

    @property
    def _suffix(self) -> str:
        return f".{os.getpid()}"

    def _bind(self, listener: socket.socket) -> None:
        """Bind to a temporary name, set the mode, listen, and only then take the real name."""
        temporary = self.path.with_name(self.path.name + self._suffix)
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(temporary.lstat().st_mode):  # left by a killed daemon with our pid
                temporary.unlink()
        listener.bind(str(temporary))
        try:
            self._set_access(temporary)
            listener.listen(BACKLOG)
            os.link(temporary, self.path)  # unlike rename, link never replaces a new file
            status = self.path.lstat()
            self._inode = (status.st_dev, status.st_ino)
        finally:
            temporary.unlink()

    def _set_access(self, file: Path) -> None:
        """Set group and mode of the socket itself, even if the folder's owner replaced its name."""
        descriptor = os.open(file, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
                raise UnixSocketError(f"socket {file} was replaced while it was made: choose another folder")
            same = Path(f"/proc/self/fd/{descriptor}")
            self._give_to_group(same)
            same.chmod(self._mode)
        finally:
            os.close(descriptor)

    def _give_to_group(self, file: Path) -> None:
        if self._group is None:
            return
        try:
            number = int(self._group) if self._group.isdecimal() else grp.getgrnam(self._group).gr_gid
            os.chown(file, -1, number)
        except KeyError as error:
            raise UnixSocketError(f"[daemon] socket_group: there is no group {self._group!r} here") from error
        except OSError as error:
            raise UnixSocketError(
                f"[daemon] socket_group: uid {os.geteuid()} cannot give socket {self.path} to group {self._group!r}:"
                f" {error.strerror}; only a member of the group can, or root"
            ) from error

    def _make_folder(self) -> None:
        folder = self.path.parent
        try:
            with Walk(folder, make_mode=0o755 if self._is_system else 0o700) as walk:
                walk.folder()
                owner, planted = walk.status.st_uid, walk.planted
        except OSError as error:
            raise self._failure(error) from error
        where, uid = f"socket folder {folder}", owner
        if planted is not None:
            where, uid = f"{where}: {planted.path}", planted.uid
        elif os.geteuid() == 0 or owner in (0, os.geteuid()):
            return
        raise UnixSocketError(
            f"{where} belongs to uid {uid}, who could listen in your place: choose another with {_OPTIONS}"
        )

    def _remove_stale(self) -> None:
        """Remove a socket without a listener; raises UnixSocketError for anything else that is there."""
        try:
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise UnixSocketError(
                    f"socket path {self.path} exists and is not a socket: move it away or choose another with"
                    f" {_OPTIONS}"
                )
            if self._has_listener():
                raise UnixSocketError(
                    f"a daemon is listening on {self.path} already: stop it, or choose another path with {_OPTIONS}"
                )
            self.path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failure(error) from error

    def _has_listener(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(_PROBE_SECONDS)
            try:
                probe.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except OSError as error:
                if error.errno not in (errno.EPROTOTYPE, errno.EAGAIN) and not isinstance(error, TimeoutError):
                    raise  # else a program listens: on another type of socket, or too busy to accept
        return True

    def _failure(self, error: OSError) -> UnixSocketError:
        return UnixSocketError(
            f"socket {self.path} cannot be made: {error.strerror or error}; choose a writable path with {_OPTIONS}"
        )
