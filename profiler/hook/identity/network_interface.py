"""Determines the network interface of this rank's collectives; the daemon sees all interfaces and cannot know.

It follows the libraries' rules as far as they are known: the interface named by the user, else the one that reaches the
job's master.  None if NCCL can use InfiniBand or RoCE, which bypass every interface, or if it is unknown.

Source: Gloo's and NCCL's variables GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME ("=eth0" exactly, "eth" by prefix, "^" not
these), NCCL_IB_DISABLE and NCCL_NET (NVIDIA, NCCL user guide, "Environment variables").

The choices of UCC and MPI, and several interfaces at once, are not covered.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from pacecar.profiler.transport.local_addresses import interface_addresses, route_to

__all__ = ["collective_interface"]

INTERFACES_MAX = 256
"""The most interfaces considered, as many as the daemon serves."""

_DISCARD_PORT = 9


def collective_interface(
    backend: str | None,
    *,
    environ: Mapping[str, str] = os.environ,
    sys_root: Path = Path("/sys"),
) -> str | None:
    """Return the interface's name; None if none is used or it is unknown.  Sends nothing and never raises."""
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
    route = route_to(host, _DISCARD_PORT) if host else None
    return None if route is None else next((name for name in there if route[0] in interface_addresses(name)), None)
