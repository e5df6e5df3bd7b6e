"""Tells systemd that the daemon is ready, reloading or stopping, and feeds its watchdog, by sd_notify's protocol.

A library for this would be a dependency for one datagram: sd_notify(3) is lines of NAME=value, sent to the socket that
$NOTIFY_SOCKET names.  Without that variable nothing is sent, so the same daemon runs from a shell.

The watchdog is fed only while ticks are published.  Fed from a thread that merely runs, it would show only that this
thread runs.  What a message costs is bounded: the send never waits, and what systemd does not take is lost and logged
once.

`inherited_socket` takes over the hooks' socket from the service manager (socket activation), so that a restart
refuses no hook.

Without this the socket is gone for as long as a restart or an upgrade takes, and a hook that connects then finds no
daemon.  A socket of systemd's (pacecar.socket) stays: hooks connect, what they send waits in the kernel, and the next
daemon reads it.

The protocol is sd_listen_fds(3): descriptors from 3 on, as many as $LISTEN_FDS says, for the process in $LISTEN_PID.  A
library for it would be a dependency for two variables.

Left out: vsock addresses (a virtual machine's, systemd.exec(5)), file descriptors, and `BARRIER=1`.
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
"""Share of the watchdog's time after which it is fed again: sd_watchdog_enabled(3) advises half, and we may be late."""

_log = logging.getLogger(__name__)


FIRST_DESCRIPTOR = 3
"""SD_LISTEN_FDS_START"""

DESCRIPTORS_MAX = 64
"""Most descriptors that are looked at; a unit that passes more is not ours."""


class Notifier:
    """Tells the service manager the daemon's state; does nothing where there is none.  One thread uses it."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET"))
        self._watchdog_ns = _watchdog_ns(environ) if self._address is not None else None
        self._fed_ns: int | None = None
        self._is_lost = False

    @property
    def interval_seconds(self) -> float | None:
        """How often `feed` must be called; None where there is no watchdog."""
        return None if self._watchdog_ns is None else WATCHDOG_SHARE * self._watchdog_ns / 1e9

    def ready(self, status: str) -> None:
        """Report that the start, or a reload, is over."""
        self._say(f"READY=1\nSTATUS={_line(status)}")

    def reloading(self) -> None:
        """Report that a reload begins; `ready` must follow."""
        # Type=notify-reload tells this message from an older one by the time in it (systemd.service(5)).
        self._say(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // NS_PER_MICROSECOND}")

    def stopping(self) -> None:
        """Report that the daemon begins to stop."""
        self._say("STOPPING=1\nSTATUS=stopping")

    def feed(self, now_ns: int, *, is_alive: bool) -> None:
        """Feed the watchdog if that is due and the daemon does its work."""
        if self._watchdog_ns is None or not is_alive:
            return
        if self._fed_ns is None or now_ns - self._fed_ns >= WATCHDOG_SHARE * self._watchdog_ns:
            self._fed_ns = now_ns
            self._say("WATCHDOG=1")

    def _say(self, text: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
                manager.sendto(text.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
            self._is_lost = False
        except OSError as error:
            if not self._is_lost:
                _log.warning("the service manager at NOTIFY_SOCKET does not hear us: %s", error)
            self._is_lost = True


def _line(text: str) -> str:
    """Return `text` as one line: a line feed would begin another assignment."""
    return " ".join(text.split())


def _address(name: str | None) -> str | None:
    if not name:
        return None
    if name.startswith("@"):  # unix(7): the abstract namespace
        return "\0" + name[1:]
    if name.startswith("/"):
        return name
    _log.warning("NOTIFY_SOCKET=%s is neither a path nor an abstract socket: nobody is notified", name)
    return None


def _watchdog_ns(environ: Mapping[str, str]) -> int | None:
    """Return the watchdog's time, if it watches this process (sd_watchdog_enabled(3))."""
    try:
        period = int(environ["WATCHDOG_USEC"])
        watched = int(environ.get("WATCHDOG_PID", os.getpid()))
    except KeyError:
        return None
    except ValueError:
        _log.warning("WATCHDOG_USEC or WATCHDOG_PID is no number: the watchdog is not fed")
        return None
    return period * NS_PER_MICROSECOND if period > 0 and watched == os.getpid() else None


def inherited_socket(environ: Mapping[str, str] = os.environ) -> socket.socket | None:
    """Return the socket for hooks that the service manager handed over; None where it handed over none.

    Any other socket is closed and named in the log: nobody would accept connections on it.
    """
    found: socket.socket | None = None
    for descriptor in _descriptors(environ):
        try:
            handed = socket.socket(fileno=descriptor)
        except OSError as error:
            _log.warning("descriptor %d of LISTEN_FDS is no socket: %s", descriptor, error.strerror)
            continue
        handed.set_inheritable(False)
        if found is None and handed.family == socket.AF_UNIX and handed.type == socket.SOCK_SEQPACKET:
            handed.setblocking(False)
            found = handed
        else:
            _log.warning("LISTEN_FDS hands over %s, which is not used: hooks need one ListenSequentialPacket=", handed)
            handed.close()
    return found


def _descriptors(environ: Mapping[str, str]) -> range:
    if "LISTEN_FDS" not in environ:
        return range(0)
    try:
        count, pid = int(environ["LISTEN_FDS"]), int(environ.get("LISTEN_PID", ""))
    except ValueError:
        _log.warning("LISTEN_FDS or LISTEN_PID is no number: no socket is taken over")
        return range(0)
    if pid != os.getpid():  # meant for a process before us
        return range(0)
    return range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + max(0, min(count, DESCRIPTORS_MAX)))
