"""Connects to the daemon's socket, but only to a trusted daemon.

Anyone can create `/tmp/pacecar-<uid>/pacecar.sock` before the user's own daemon starts, to receive all records and to
send commands in root's name.  So the kernel tells who listens (SO_PEERCRED, unix(7)), and a `Walk` who could have
created the folder.  An accepted peer is one of:

    root, or this user
    the owner of a folder (or of the socket) in a folder that only root can write, such as user pacecar's /run/pacecar
    a user unmapped in this user namespace, if only root and this user can change the path

This also holds for a configured path.  Components in a folder that all may write must be mounts, or owned by root or
this user.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

from pacecar.path_walk import UnsafePathError, Walk

__all__ = ["PEERCRED", "UntrustedDaemonError", "connect"]

PEERCRED = struct.Struct("3i")
"""struct ucred of socket(7): pid, uid, gid."""


class UntrustedDaemonError(PermissionError):
    """Another user listens at the path, or could; nothing was sent."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EPERM, f"it is not trusted: {why}", path)

    def __str__(self) -> str:
        return str(self.strerror)


def connect(path: str, timeout_seconds: float, *, any_owner: bool = False) -> socket.socket:
    """Return a SOCK_SEQPACKET socket, connected to the daemon at `path`, with this timeout (0: it never blocks).

    `any_owner` accepts any peer, for when root named the path and treats answers as untrusted.

    Raises:
        UntrustedDaemonError: the peer is not trusted; nothing was sent.
        OSError: no daemon listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_seconds)
        if any_owner:
            connection.connect(path)
            return connection
        with Walk(path) as walk:
            try:
                found = walk.entry(follow=True)
            except UnsafePathError as error:
                raise UntrustedDaemonError(path, f"{error.filename} is {error.strerror}") from None
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if walk.planted is not None:
                raise UntrustedDaemonError(
                    path, f"{walk.planted.path} belongs to uid {walk.planted.uid}, and anybody could have made it"
                )
            connection.connect(path)
            _check(path, connection, walk)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(path: str, connection: socket.socket, walk: Walk) -> None:
    _, uid, _ = PEERCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size))
    uid &= 0xFFFFFFFF
    if uid in walk.trusted or uid in walk.vouched or (uid == walk.unnameable and walk.is_protected):
        return
    raise UntrustedDaemonError(
        path, f"uid {uid} listens there, who is not root, not this user and not the owner of a folder that root made"
    )
