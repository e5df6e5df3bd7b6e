"""What crosses the network interfaces?  /proc/net/dev, and each link's rated speed from /sys/class/net.

The loopback and virtual interfaces are kept: gloo ranks on one machine talk over `lo`, and a container's veth is
what its job sees.  An interface that does not know its speed (-1, or "invalid argument") has none here, not zero.

Left out on purpose: InfiniBand and RoCE traffic, which bypasses the kernel and shows in none of these counters.

Source: net/core/net-procfs.c; Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from pacecar.monitor.collectors.reading import Files, Reading, whole
from pacecar.records import Outcome

__all__ = ["NetworkCollector"]

INTERFACES_MAX = 256

BYTES_PER_SECOND_PER_MBIT = 1_000_000 // 8

_COLUMNS = 16
_UNKNOWN_SPEEDS = frozenset({"-1", "4294967295"})  # SPEED_UNKNOWN, as a signed and as an unsigned number


class Traffic(NamedTuple):
    """One line of /proc/net/dev."""

    interface: str
    receive_bytes: int
    receive_packets: int
    receive_errors: int
    receive_drops: int
    transmit_bytes: int
    transmit_packets: int
    transmit_errors: int
    transmit_drops: int


class NetworkCollector:
    """Traffic, errors and drops of each interface, and the rated speed of its link."""

    name = "network"

    def __init__(self, files: Files) -> None:
        self._files = files

    def collect(self) -> Outcome:
        """Read /proc/net/dev once, and the speed of each interface in it."""
        reading = Reading(self._files)
        rows = reading.lines(self._files.proc / "net" / "dev", parse_net_dev_line, skip=2)
        for traffic in reading.first(rows, INTERFACES_MAX, "interfaces"):
            for quantity, value in traffic._asdict().items():
                if quantity != "interface":
                    reading.add(f"pacecar_host_network_{quantity}_total", value, traffic.interface)
            self._speed(reading, traffic.interface)
        return reading.outcome()

    def close(self) -> None:
        """Nothing is held open."""

    def _speed(self, reading: Reading, interface: str) -> None:
        path = self._files.sys / "class" / "net" / interface / "speed"
        try:
            text = self._files.read(path).strip()
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP):  # has no speed
                reading.fail(f"{path}: {error.strerror or error}")
            return
        if text in _UNKNOWN_SPEEDS:
            return
        try:
            speed = whole(text) * BYTES_PER_SECOND_PER_MBIT
        except ValueError as error:
            reading.fail(f"{path}:1: {error}")
            return
        reading.add("pacecar_host_network_link_bytes_per_second", speed, interface)


def parse_net_dev_line(line: str) -> Traffic:
    """Return one interface's counters; raises ValueError."""
    name, colon, rest = line.rpartition(":")  # an alias has a colon in its name: eth0:1
    fields = rest.split()
    if colon == "" or len(fields) != _COLUMNS:
        raise ValueError(f"{len(fields)} counters where {_COLUMNS} are due")
    counters = [whole(field) for field in fields]
    return Traffic(name.strip(), *counters[0:4], *counters[8:12])
