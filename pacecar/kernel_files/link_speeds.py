"""Reads the nominal speed of network interfaces, and the state and rate of RDMA ports.

An interface reports its speed in Mbit/s, -1 or 4294967295 (the same value, unsigned) if it does not know it, and an
error while it is down.  A virtual interface always reports 10 Gbit/s; `is_link` tells the two apart.

Source: Documentation/ABI/testing/sysfs-class-net, ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from .reader import NOT_THERE, KernelFiles, integer, whole

__all__ = [
    "INTERFACE_HAS_NONE",
    "ActiveRdmaPort",
    "active_rdma_ports",
    "is_link",
    "nominal_speed",
    "parse_port_rate",
    "parse_port_state",
    "parse_speed",
]

BYTES_PER_SECOND_PER_MBIT = 1_000_000 // 8

INTERFACE_HAS_NONE = NOT_THERE | {errno.EINVAL}
"""Errors that mean that an interface has no such value; EINVAL: the speed of one that is down."""

_UNKNOWN_SPEEDS = frozenset({"-1", "4294967295"})  # SPEED_UNKNOWN, as a signed and as an unsigned number


class ActiveRdmaPort(NamedTuple):
    """A port that carries traffic; `link_layer` is None if the driver does not report it."""

    bytes_per_second: int
    link_layer: str | None


def parse_speed(text: str) -> int | None:
    """Return bytes per second for a speed in Mbit/s, None if the link does not know it; raises ValueError."""
    if text in _UNKNOWN_SPEEDS:
        return None
    megabits = integer(text)
    if megabits < 0:
        raise ValueError(f"{text!r} is not a speed")
    return megabits * BYTES_PER_SECOND_PER_MBIT


def is_link(names: Iterable[str]) -> bool:
    """Return whether the interface with these `names` in its folder has a device or a bond behind it."""
    return not {"device", "bonding"}.isdisjoint(names)


def nominal_speed(files: KernelFiles, interface: str) -> int | None:
    """Return the nominal speed of `interface` in bytes per second; None if it reports none or nonsense."""
    text = files.text(files.sys / "class" / "net" / interface / "speed")
    with suppress(ValueError):
        return None if text is None else parse_speed(text.strip())
    return None


def parse_port_state(line: str) -> str:
    """Return `ACTIVE` of `4: ACTIVE`; raises ValueError."""
    number, colon, word = line.partition(":")
    if colon == "":
        raise ValueError("not `number: STATE`")
    whole(number.strip())
    return word.strip()


def parse_port_rate(line: str) -> int:
    """Return bytes per second for `400 Gb/sec (4X NDR)`; raises ValueError or IndexError."""
    amount, unit = line.split()[:2]
    if unit != "Gb/sec":
        raise ValueError(f"unknown unit {unit!r}")
    gigabits = float(amount)
    if not 0 <= gigabits < 1_000_000:
        raise ValueError(f"{amount!r} is not a rate")
    return round(gigabits * 1_000_000_000 / 8)


def active_rdma_ports(files: KernelFiles) -> list[ActiveRdmaPort]:
    """Return the active ports, without those that cannot be read or parsed."""
    found: list[ActiveRdmaPort] = []
    for port in sorted(files.sys.glob("class/infiniband/*/ports/*")):
        with suppress(OSError, ValueError, IndexError):
            if parse_port_state(files.read(port / "state").strip()) == "ACTIVE":
                rate = parse_port_rate(files.read(port / "rate").strip())
                layer = files.text(port / "link_layer")
                found.append(ActiveRdmaPort(rate, None if layer is None else layer.strip() or None))
    return found
