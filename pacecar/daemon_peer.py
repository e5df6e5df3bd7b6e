"""Connects to the daemon's socket, and accepts only a daemon that nobody but root or this user could have put there.

A path is no proof.  Anybody can make `/tmp/pacecar-<uid>/pacecar.sock` before the user's own daemon starts; whoever
listens there would receive all records and could send commands in root's name.  The kernel says who listens
(SO_PEERCRED, unix(7)), and a `Walk` says who could have made the folder.  Accepted is a peer that is

    root, or this user
    the owner of a folder (or of the socket) that lies where only root can write, as /run/pacecar of user pacecar
    a user without a number in this user namespace, where only root and this user can change the path

The same holds for a path that somebody configured: who named it trusts its folder, and the folder's owner is accepted
where root made the folder.  What lies in a folder that all may write must belong to root or this user, or be mounted.
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
    """Somebody else listens at the path, or could: nothing is sent and nothing believed."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EPERM, f"it is not trusted: {why}", path)

    def __str__(self) -> str:
        return str(self.strerror)


def connect(path: str, timeout_seconds: float, *, any_owner: bool = False) -> socket.socket:
    """Return a SOCK_SEQPACKET socket, connected to the daemon at `path`, with this timeout (0: it never blocks).

    `any_owner` accepts everybody, for a root who named the path and believes nothing that he is told.

    Raises:
        UntrustedDaemonError: the peer is none of those above; nothing was sent.
        OSError: nobody listens there.
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
