"""Reads the network interfaces, the RDMA ports and the kernel's TCP settings.

Source: Documentation/ABI/testing/sysfs-class-net, ABI/stable/sysfs-class-infiniband, networking/ip-sysctl.rst and
admin-guide/sysctl/net.rst of the kernel; proc(5) for /proc/net/snmp.
"""

from __future__ import annotations

import os
from pathlib import Path

from pacecar.kernel_files.link_speeds import parse_port_rate, parse_port_state, parse_speed
from pacecar.kernel_files.reader import integer, lines_of

from ..host_access import FactReader
from .model import Interface, Network, RdmaPort, Seen
from .pci import address_of

__all__ = ["SYSCTLS", "read_network"]

INTERFACES_MAX = 256
PORTS_MAX = 256

SYSCTLS = (
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_available_congestion_control",
    "net.ipv4.tcp_slow_start_after_idle",
)


def read_network(reader: FactReader) -> Network:
    """Read interfaces, ports and settings."""
    proc = reader.access.proc
    sysctls: dict[str, Seen[str]] = {}
    for name in SYSCTLS:
        seen = reader.word(proc / "sys" / Path(*name.split(".")))
        if seen is not None:
            sysctls[name] = seen
    sent, again = _segments(reader, proc / "net/snmp")
    return Network(_interfaces(reader), _ports(reader), sysctls, sent, again)


def _interfaces(reader: FactReader) -> tuple[Interface, ...]:
    folder = reader.access.sys / "class/net"
    found = []
    for name in reader.names(folder)[:INTERFACES_MAX]:
        place = folder / name
        if not place.is_dir():
            continue  # bonding_masters is a file among the interfaces
        state = reader.word(place / "operstate")
        speed, mtu, duplex = (
            reader.parsed(place / "speed", parse_speed), reader.number(place / "mtu"), reader.word(place / "duplex")
        )  # fmt: skip
        found.append(
            Interface(
                name=name,
                where=str(place),
                is_physical=(place / "device").exists(),
                state=None if state is None else state.value,
                speed=8 * speed.value if speed is not None and speed.value else None,
                duplex=None if duplex is None else duplex.value,
                mtu=None if mtu is None else mtu.value,
                address=address_of(place / "device"),
                master=_master(place / "master"),
                is_bond=(place / "bonding").is_dir(),
            )
        )
    return tuple(found)


def _master(link: Path) -> str | None:
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return None


def _ports(reader: FactReader) -> tuple[RdmaPort, ...]:
    folder = reader.access.sys / "class/infiniband"
    found: list[RdmaPort] = []
    for device in reader.names(folder):
        for port in reader.names(folder / device / "ports"):
            place = folder / device / "ports" / port
            state = reader.parsed(place / "state", parse_port_state)
            rate = reader.parsed(place / "rate", parse_port_rate)
            layer = reader.word(place / "link_layer")
            found.append(
                RdmaPort(
                    device=device,
                    port=port,
                    where=str(place),
                    state=None if state is None else state.value,
                    rate=None if rate is None else rate.value,
                    link_layer=None if layer is None else layer.value,
                    address=address_of(folder / device / "device"),
                )
            )
    return tuple(found[:PORTS_MAX])


def _segments(reader: FactReader, path: Path) -> tuple[Seen[int] | None, Seen[int] | None]:
    """Return TCP segments sent and retransmitted since boot, in our network namespace."""

    def columns(text: str) -> dict[str, int]:
        names, values = (line.split()[1:] for line in lines_of(text) if line.startswith("Tcp:"))
        return dict(zip(names, map(integer, values), strict=True))

    read = reader.parsed(path, columns)
    if read is None or not {"OutSegs", "RetransSegs"} <= read.value.keys():
        return None, None
    return Seen(read.value["OutSegs"], read.where), Seen(read.value["RetransSegs"], read.where)
