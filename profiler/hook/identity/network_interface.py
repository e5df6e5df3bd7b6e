"""Determines the network interface of this rank's collectives; the daemon sees all interfaces and cannot tell.

It follows the rules of the libraries, as far as they can be known without asking them: the interface that the user
named, else the one from which the job's master is reached.  None where InfiniBand or RoCE is there for NCCL to use,
which bypasses every interface, and where nothing tells.

Source: Gloo's and NCCL's variables GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME ("=eth0" exactly, "eth" by prefix, "^" not
these), NCCL_IB_DISABLE and NCCL_NET (NVIDIA, NCCL user guide, "Environment variables").

Left out: what UCC and MPI choose, and several interfaces at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...transport.local_addresses import interface_addresses, route_to

__all__ = ["collective_interface"]

INTERFACES_MAX = 256
"""The most interfaces considered; as many as the daemon serves."""

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
    route = route_to(host, _DISCARD_PORT) if host else None
    return None if route is None else next((name for name in there if route[0] in interface_addresses(name)), None)
