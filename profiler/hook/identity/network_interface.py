"""Determines the network interface of this rank's collectives; the daemon sees all interfaces and cannot tell.

It follows the rules of the libraries, as far as they can be known without asking them: the interface that the user
named, else the one from which the job's master is reached.  None where InfiniBand or RoCE is there for NCCL to use,
which bypasses every interface, and where nothing tells.

Source: Gloo's and NCCL's variables GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME ("=eth0" exactly, "eth" by prefix, "^" not
these), NCCL_IB_DISABLE and NCCL_NET (NVIDIA, NCCL user guide, "Environment variables").

Left out: what UCC and MPI choose, and several interfaces at once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["collective_interface"]

INTERFACES_MAX = 256
"""The most interfaces considered; as many as the daemon serves."""

RESOLVE_SECONDS = 0.5
"""How long looking up the master's name may take: the job has just done so itself, and starting must not wait."""

_SIOCGIFADDR = 0x8915  # netdevice(7)
_NAME_BYTES_MAX = 15
_DISCARD_PORT = 9


def collective_interface(
    backend: str | None,
    *,
    environ: Mapping[str, str] = os.environ,
    sys_root: Path = Path("/sys"),
) -> str | None:
    """Return the interface's name; None where none is used or it cannot be told.  Sends nothing and never raises."""
    if backend is None:
        return None
    try:
        if "nccl" in backend and _has_rdma(environ, sys_root):
            return None
        there = [name for _, name in socket.if_nameindex()][:INTERFACES_MAX]
        named = environ.get("NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME", "")
        return _named(named, there) or _towards(environ.get("MASTER_ADDR", ""), there)
    except OSError:
        return None


def _has_rdma(environ: Mapping[str, str], sys_root: Path) -> bool:
    if environ.get("NCCL_IB_DISABLE") == "1" or environ.get("NCCL_NET", "").lower() == "socket":
        return False
    folder = sys_root / "class" / "infiniband"
    return folder.is_dir() and any(folder.iterdir())


def _named(text: str, there: Sequence[str]) -> str | None:
    """Return the one interface that the user's list selects; None for none or several."""
    wanted = text.split(",")[0]
    if wanted.removeprefix("=") in there:
        return wanted.removeprefix("=")
    found = [name for name in there if wanted and wanted[0] not in "=^" and name.startswith(wanted)]
    return found[0] if len(found) == 1 else None


def _towards(host: str, there: Sequence[str]) -> str | None:
    """Return the interface from whose address packets to `host` would leave; connecting a UDP socket sends none."""
    found: list[str] = []

    def resolve() -> None:
        with suppress(OSError):
            found.append(socket.gethostbyname(host))

    if host:
        thread = threading.Thread(target=resolve, name="pacecar-resolve", daemon=True)
        thread.start()
        thread.join(RESOLVE_SECONDS)
    if not found:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((found[0], _DISCARD_PORT))
        own = probe.getsockname()[0]
        return next((name for name in there if _address(probe, name) == own), None)


def _address(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:_NAME_BYTES_MAX])
    with suppress(OSError):  # it has no IPv4 address
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
