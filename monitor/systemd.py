"""Talks to systemd: reports readiness, feeds the watchdog, and takes over the hooks' socket.

Messages follow sd_notify(3): lines of NAME=value, sent as a datagram to the socket in $NOTIFY_SOCKET.  Without that
variable nothing is sent, so the same daemon runs from a shell.  The watchdog is fed only while ticks are published, not
from a thread that merely runs.  A send never waits: a message that systemd does not accept is lost and logged once.

Without socket activation a restart would remove the hooks' socket, and a hook that connects then would find no daemon.
A socket of systemd (pacecar.socket) stays: hooks connect, the kernel keeps what they send, and the next daemon reads
it.  The protocol is sd_listen_fds(3): descriptors from 3 on, as many as $LISTEN_FDS says, for the process in
$LISTEN_PID.

Left out: vsock addresses (a virtual machine's, systemd.exec(5)), file descriptors, `BARRIER=1`, and a library for so
few lines.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

__all__ = [
    "Notifier",
    "inherited_socket",
]

NS_PER_MICROSECOND = 1000

WATCHDOG_SHARE = 0.4
"""Share of the watchdog's time after which it is fed again: sd_watchdog_enabled(3) advises half, but we may be late."""

_log = logging.getLogger(__name__)


FIRST_DESCRIPTOR = 3
"""SD_LISTEN_FDS_START"""

DESCRIPTORS_MAX = 64
"""Most descriptors that are examined; a unit that passes more is not ours."""


class Notifier:
    """Reports the daemon's state to the service manager, if there is one.  Used by one thread."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET"))
        self._watchdog_ns = _watchdog_ns(environ) if self._address is not None else None
        self._fed_ns: int | None = None
        self._is_lost = False

    @property
    def interval_seconds(self) -> float | None:
        """How often to call `feed`; None without a watchdog."""
        return None if self._watchdog_ns is None else WATCHDOG_SHARE * self._watchdog_ns / 1e9

    def ready(self, status: str) -> None:
        """Report that the start, or a reload, is complete."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def reloading(self) -> None:
        """Report that a reload begins; `ready` must follow."""
        # Type=notify-reload distinguishes this message from an older one by its time (systemd.service(5)).
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // NS_PER_MICROSECOND}")

    def stopping(self) -> None:
        """Report that the daemon is stopping."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def feed(self, now_ns: int, *, is_alive: bool) -> None:
        """Feed the watchdog if that is due and the daemon works."""
        if self._watchdog_ns is None or not is_alive:
            return
        if self._fed_ns is None or now_ns - self._fed_ns >= WATCHDOG_SHARE * self._watchdog_ns:
            self._fed_ns = now_ns
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
                manager.sendto(text.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
            self._is_lost = False
        except OSError as error:
            if not self._is_lost:
                _log.warning("the service manager at NOTIFY_SOCKET cannot be notified: %s", error)
            self._is_lost = True


def _line(text: str) -> str:
    """Return `text` as one line, because a line feed would start another assignment."""
    return " ".join(text.split())


def _address(name: str | None) -> str | None:
    if not name:
        return None
    if name.startswith("@"):  # unix(7): the abstract namespace
        return "\0" + name[1:]
    if name.startswith("/"):
        return name
    _log.warning("NOTIFY_SOCKET=%s is neither a path nor an abstract socket: notifications are not sent", name)
    return None


def _watchdog_ns(environ: Mapping[str, str]) -> int | None:
    """Return the watchdog's time, if it watches this process (sd_watchdog_enabled(3))."""
    try:
        period = int(environ["WATCHDOG_USEC"])
        watched = int(environ.get("WATCHDOG_PID", os.getpid()))
    except KeyError:
        return None
    except ValueError:
        _log.warning("WATCHDOG_USEC or WATCHDOG_PID is not a number: the watchdog is not fed")
        return None
    return period * NS_PER_MICROSECOND if period > 0 and watched == os.getpid() else None


def inherited_socket(environ: Mapping[str, str] = os.environ) -> socket.socket | None:
    """Return the hooks' socket that the service manager passed on; None if there is none.

    Any other socket is closed and logged, because nothing would accept its connections.
    """
    found: socket.socket | None = None
    for descriptor in _descriptors(environ):
        try:
            handed = socket.socket(fileno=descriptor)
        except OSError as error:
            _log.warning("descriptor %d of LISTEN_FDS is not a socket: %s", descriptor, error.strerror)
            continue
        handed.set_inheritable(False)
        if found is None and handed.family == socket.AF_UNIX and handed.type == socket.SOCK_SEQPACKET:
            handed.setblocking(False)
            found = handed
        else:
            _log.warning("LISTEN_FDS passes %s, which is not used: hooks need one ListenSequentialPacket=", handed)
            handed.close()
    return found


def _descriptors(environ: Mapping[str, str]) -> range:
    if "LISTEN_FDS" not in environ:
        return range(0)
    try:
        count, pid = int(environ["LISTEN_FDS"]), int(environ.get("LISTEN_PID", ""))
    except ValueError:
        _log.warning("LISTEN_FDS or LISTEN_PID is not a number: no socket is taken over")
        return range(0)
    if pid != os.getpid():  # meant for a process before us
        return range(0)
    return range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + max(0, min(count, DESCRIPTORS_MAX)))
