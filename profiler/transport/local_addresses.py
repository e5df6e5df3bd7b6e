"""Finds addresses of this host: of an interface, on the route to another host, and of the host's own name.

Sends packets only to a name server, and waits for it at most RESOLVE_SECONDS.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["addresses_of_name", "host_identity", "interface_addresses", "is_loopback", "route_to"]

RESOLVE_SECONDS = 0.5
"""The longest a name lookup may take: the job has just looked up its master's name, and must not wait to start."""

_SIOCGIFADDR = 0x8915  # netdevice(7)
_NAME_BYTES_MAX = 15
_SCOPE_LINK = 0x20
_TENTATIVE, _DUPLICATE = 0x40, 0x08
"""IFA_F_TENTATIVE and IFA_F_DADFAILED (linux/if_addr.h): an address with either flag cannot be bound."""


def interface_addresses(name: str, *, net_root: Path = Path("/proc/net")) -> tuple[str, ...]:
    """Return the interface's first IPv4 address and its first IPv6 address that other hosts can use, if any.

    Link-local IPv6 addresses are omitted: they need the number of an interface on the other host.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", name.encode()[:_NAME_BYTES_MAX])
        found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
    with suppress(OSError):  # a kernel without IPv6 has no such file
        for line in (net_root / "if_inet6").read_text().splitlines():
            digits, _, _, scope, flags, interface = line.split()
            usable = int(scope, 16) != _SCOPE_LINK and not int(flags, 16) & (_TENTATIVE | _DUPLICATE)
            if interface == name and usable:
                found.append(str(ipaddress.IPv6Address(int(digits, 16))))
                break
    return tuple(found)


def route_to(host: str, port: int) -> tuple[str, str] | None:
    """Return the local and the remote address that the kernel would choose for a connection to `host`.

    Return None if the name does not resolve in time, or there is no route.
    """
    for family, address in _resolve(host, port):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # on a UDP socket this chooses the addresses and sends nothing
            return str(probe.getsockname()[0]), str(address[0])
    return None


def addresses_of_name(name: str) -> tuple[str, ...]:
    """Return the first address of each family that `name` resolves to and this host can bind."""
    found: dict[int, str] = {}
    for family, address in _resolve(name, 0):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            found.setdefault(family, str(address[0]))
    return tuple(found.values())


def is_loopback(address: str) -> bool:
    """Return whether `address` only reaches this host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def host_identity(*, proc_root: Path = Path("/proc")) -> str:
    """Return a name for this machine and network namespace; processes with the same name share their loopback."""
    try:
        boot = (proc_root / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        return f"{boot} {os.readlink(proc_root / 'self' / 'ns' / 'net')}"
    except OSError:
        return socket.gethostname()


def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []

    def resolve() -> None:
        with suppress(OSError, UnicodeError):
            found.extend((info[0], info[4]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=resolve, name="pacecar-resolve", daemon=True)
    thread.start()
    thread.join(RESOLVE_SECONDS)
    return list(found)
