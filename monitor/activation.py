"""Takes over the hooks' socket from the service manager (socket activation), so that a restart refuses no hook.

Without this the socket is gone for as long as a restart or an upgrade takes, and a hook that connects then finds no
daemon.  A socket of systemd's (pacecar.socket) stays: hooks connect, what they send waits in the kernel, and the next
daemon reads it.

The protocol is sd_listen_fds(3): descriptors from 3 on, as many as $LISTEN_FDS says, for the process in $LISTEN_PID.  A
library for it would be a dependency for two variables.

Left out: the port.  A scrape that finds it closed for a second leaves a gap of one sample, and Prometheus shows it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

__all__ = ["inherited_socket"]

FIRST_DESCRIPTOR = 3
"""SD_LISTEN_FDS_START"""

DESCRIPTORS_MAX = 64
"""Most descriptors that are looked at; a unit that passes more is not ours."""

_log = logging.getLogger(__name__)


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
