"""Reads traffic, errors and drops of each network interface (/proc/net/dev), and its link (/sys/class/net).

The loopback and virtual interfaces are kept: gloo ranks on one machine talk over `lo`, and a container's veth is
what its job sees.  An interface that does not know its speed (-1, or "invalid argument") has none here, not zero.

Only links have a utilization, that is interfaces with a device or a bond behind them: a veth calls itself 10 Gbit/s
whatever it can do.  A share of 0.3 over a second may be 1.0 for 300 ms, which is what a step waits for; so utilization
is windowed and glanced at between ticks.

/proc and /sys are read here and not through psutil, whose net_if_stats() asks each interface by ioctl on every call
and knows no other root.

Left out on purpose: InfiniBand and RoCE traffic, which bypasses the kernel and shows in none of these counters; see
`rdma`.

Source: net/core/net-procfs.c; Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pacecar.clock import Clock
from pacecar.kernel_files.network import INTERFACE_HAS_NONE, is_link, parse_speed
from pacecar.kernel_files.reader import KernelFiles, lines_of, whole
from pacecar.records import Outcome, Sample

from ..catalog_sample import sample
from .rates import Rates
from .source_reader import Seldom, SourceReading

__all__ = ["NetworkCollector"]

INTERFACES_MAX = 256

SELDOM_TICKS = 10
"""Ticks between two readings of what rarely changes about a link: four files for each interface."""

Parse = Callable[[str], int | None]

_COLUMNS = 16

_UP = {"up": 1, "unknown": 1, "down": 0, "lowerlayerdown": 0, "dormant": 0, "notpresent": 0, "testing": 0}
"""RFC 2863 states; loopback and tunnels say `unknown` and pass packets."""


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


class NetworkLink(NamedTuple):
    """The samples of one interface that rarely change, and its rated speed when it is a link."""

    samples: list[Sample]
    bytes_per_second: int | None


class NetworkCollector:
    """Traffic, errors and drops of each interface, its rated speed, and how much of that is used."""

    name = "network"

    def __init__(self, files: KernelFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._dev = files.proc / "net" / "dev"
        self._links: dict[str, Seldom[NetworkLink]] = {}
        self._speeds: dict[str, int] = {}
        self._rates = Rates()

    def collect(self) -> Outcome:
        """Read /proc/net/dev once, and now and then the link of each interface in it."""
        reading = SourceReading(self._files)
        rows = reading.first(reading.lines(self._dev, parse_net_dev_line, skip=2), INTERFACES_MAX, "interfaces")
        now_ns = self._clock.monotonic_ns()
        names = {traffic.interface for traffic in rows}
        self._links = {name: self._links.get(name) or Seldom(SELDOM_TICKS) for name in names}
        self._speeds = {}
        self._rates.keep(names)
        for traffic in rows:
            for quantity, value in zip(Traffic._fields[1:], traffic[1:], strict=True):
                reading.add(f"pacecar_host_network_{quantity}_total", value, traffic.interface)
            self._link(reading, traffic.interface)
            for ratio in self._utilization(traffic, now_ns):
                reading.add(ratio.metric, ratio.value, *ratio.labels)
        return reading.outcome()

    def glance(self) -> Sequence[Sample]:
        """Read /proc/net/dev, and of it the interfaces whose speed is known."""
        if not self._speeds:
            return []
        found: list[Sample] = []
        lines = lines_of(self._files.read(self._dev))[2:]
        now_ns = self._clock.monotonic_ns()
        for line in lines:
            if line.rpartition(":")[0].strip() in self._speeds:
                found += self._utilization(parse_net_dev_line(line), now_ns)
        return found

    def close(self) -> None:
        """Nothing is held open."""

    def _utilization(self, traffic: Traffic, now_ns: int) -> list[Sample]:
        speed = self._speeds.get(traffic.interface)
        if not speed:
            return []
        found = []
        for direction, count in (("receive", traffic.receive_bytes), ("transmit", traffic.transmit_bytes)):
            rate = self._rates.per_second((traffic.interface, direction), count, now_ns)
            if rate is not None:
                metric = f"pacecar_host_network_{direction}_utilization_ratio"
                found.append(sample(metric, rate / speed, traffic.interface))
        return found

    def _link(self, reading: SourceReading, interface: str) -> None:
        link = self._links[interface].get(reading, lambda: self._read_link(reading, interface))
        for read in link.samples:
            reading.add(read.metric, read.value, *read.labels)
        if link.bytes_per_second is not None:
            self._speeds[interface] = link.bytes_per_second

    def _read_link(self, reading: SourceReading, interface: str) -> NetworkLink:
        folder = self._files.sys / "class" / "net" / interface
        samples: list[Sample] = []
        speed = self._read(reading, folder / "speed", parse_speed)
        if speed is not None:
            samples.append(sample("pacecar_host_network_link_bytes_per_second", speed, interface))
        for name, metric, parse in (
            ("operstate", "pacecar_host_network_up", parse_operstate),
            ("mtu", "pacecar_host_network_mtu_bytes", whole),
            ("carrier_changes", "pacecar_host_network_carrier_changes_total", whole),
        ):
            value = self._read(reading, folder / name, parse)
            if value is not None:
                samples.append(sample(metric, value, interface))
        return NetworkLink(samples, speed if is_link(reading.names(folder) or []) else None)

    def _read(self, reading: SourceReading, path: Path, parse: Parse) -> int | None:
        try:
            text = self._files.read(path).strip()
        except OSError as error:
            if error.errno not in INTERFACE_HAS_NONE:
                reading.fail(f"{path}: {error.strerror or error}")
            return None
        try:
            return parse(text)
        except ValueError as error:
            reading.fail(f"{path}:1: {error}")
            return None


def parse_operstate(text: str) -> int:
    """Return 1 for a state that passes packets, else 0; raises ValueError for what is no state."""
    if text not in _UP:
        raise ValueError(f"{text!r} is no operational state")
    return _UP[text]


def parse_net_dev_line(line: str) -> Traffic:
    """Return one interface's counters; raises ValueError."""
    name, colon, rest = line.rpartition(":")  # an alias has a colon in its name: eth0:1
    fields = rest.split()
    if colon == "" or len(fields) != _COLUMNS:
        raise ValueError(f"{len(fields)} counters where {_COLUMNS} are due")
    counters = [whole(field) for field in fields]
    return Traffic(name.strip(), *counters[0:4], *counters[8:12])
