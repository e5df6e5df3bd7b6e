"""Several real users of one machine: do something as another user, in a fork, and get back what came of it.

A socket that the other user listens on comes back as one: the kernel goes on naming him as its peer (SO_PEERCRED).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "DAEMON",
    "MS_BIND",
    "OWNER",
    "STRANGER",
    "as_user",
    "commons",
    "in_user_namespace",
    "listen",
    "mounts_of_ones_own",
    "needs_root",
]

DAEMON, OWNER, STRANGER = 61001, 61002, 61003

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_DUMPABLE = 4
ANSWER_BYTES_MAX = 1 << 20
SECONDS_MAX = 60.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")


def as_user(uid: int, act: Callable[[], Any], *, seconds: float = SECONDS_MAX) -> Any:
    """Return what `act()` returns as user and group `uid`, in a fork; what it raises is an AssertionError here."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        try:
            try:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                value = act()
                handles = [value.fileno()] if isinstance(value, socket.socket) else []
                socket.send_fds(there, [pickle.dumps((True, None if handles else value))], handles)
            except BaseException:  # noqa: BLE001  it is raised again on the other side
                there.send(pickle.dumps((False, traceback.format_exc())))
        finally:
            os._exit(0)
    there.close()
    try:
        here.settimeout(seconds)
        said, handles, _, _ = socket.recv_fds(here, ANSWER_BYTES_MAX, 1)
    except TimeoutError:
        os.kill(child, 9)
        raise AssertionError(f"user {uid} did not end within {seconds} s") from None
    finally:
        here.close()
        os.waitpid(child, 0)
    assert said, f"user {uid} died"
    is_done, value = pickle.loads(said)
    assert is_done, value
    return socket.socket(fileno=handles[0]) if handles else value


def listen(path: Path, mode: int = 0o666) -> socket.socket:
    """Listen at `path`, as a daemon does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    path.chmod(mode)
    listener.listen(16)
    return listener


def in_user_namespace(uid: int | None) -> None:
    """Go into a user namespace that knows user `uid` alone, as Apptainer makes one, or nobody; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # after setuid /proc/self is root's otherwise
    if libc.unshare(CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "no user namespaces here")
    if uid is not None:
        Path("/proc/self/uid_map").write_bytes(f"{uid} {uid} 1\n".encode())


def mounts_of_ones_own(*calls: tuple[str, str, str, int, str]) -> None:
    """Mount `(source, target, type, flags, data)` for this process alone; raises OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespaces here")
    for source, target, kind, flags, data in (("none", "/", "", MS_REC | MS_PRIVATE, ""), *calls):
        if not os.path.isdir(target):
            os.mkdir(target)
        if libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None):
            raise OSError(ctypes.get_errno(), "no mounts here")


@contextmanager
def commons(inside: str = "/tmp", mode: int = 0o1777) -> Iterator[Path]:
    """Yield a new folder in which all users may make what they like, as in /tmp; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(dir=inside, prefix="pacecar-test-"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
