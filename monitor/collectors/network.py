"""Reads traffic, errors and drops of each network interface (/proc/net/dev), and its link (/sys/class/net).

Loopback and virtual interfaces are included: gloo ranks on one machine use `lo`, and a container's veth is what its job
sees.  An interface without a known speed (-1, or "invalid argument") has no speed series, rather than zero.

Only links have a utilization, that is interfaces with a device or a bond behind them: a veth claims 10 Gbit/s whatever
it can do.  A share of 0.3 over a second may be 1.0 for 300 ms, which is what a step waits for.  So utilization is
windowed and read between ticks too.

psutil is not used: its net_if_stats() asks each interface by ioctl on every call, and it knows no other root.

Left out: InfiniBand and RoCE traffic, which bypasses the kernel and these counters; see `rdma`.

Source: net/core/net-procfs.c; Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from pacecar.clock import Clock
from pacecar.kernel_files.link_speeds import INTERFACE_HAS_NONE, is_link, parse_speed
from pacecar.kernel_files.reader import KernelFiles, lines_of, whole
from pacecar.records import Outcome, Sample

from ..catalog_sample import sample
from .rates import Rates
from .source_reader import CachedReading, SourceReading

__all__ = ["NetworkCollector"]

INTERFACES_MAX = 256

CACHED_TICKS = 10
"""Ticks between two readings of the link facts that rarely change: four files for each interface."""

Parse = Callable[[str], int | None]

_COLUMNS = 16

_SERVED = tuple(
    (column, f"pacecar_host_network_{direction}_{quantity}_total")
    for direction, start in (("receive", 0), ("transmit", 8))
    for column, quantity in enumerate(("bytes", "packets", "errors", "drops"), start)
)
"""Column of /proc/net/dev and its metric."""

_BYTES = (("receive", 0), ("transmit", 8))
"""Direction and the column of its bytes."""

_UP = {"up": 1, "unknown": 1, "down": 0, "lowerlayerdown": 0, "dormant": 0, "notpresent": 0, "testing": 0}
"""RFC 2863 states; loopback and tunnels report `unknown` and pass packets."""


class NetworkLink(NamedTuple):
    """The samples of one interface that rarely change, and its rated speed if it is a link."""

    samples: list[Sample]
    bytes_per_second: int | None


class NetworkCollector:
    """Traffic, errors and drops of each interface, its rated speed, and its utilization."""

    name = "network"

    def __init__(self, files: KernelFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._dev = files.proc / "net" / "dev"
        self._links: dict[str, CachedReading[NetworkLink]] = {}
        self._speeds: dict[str, int] = {}
        self._rates = Rates()

    def collect(self) -> Outcome:
        """Read /proc/net/dev once, and sometimes the link of each interface in it."""
        reading = SourceReading(self._files)
        rows: dict[str, tuple[str, list[str]]] = {}
        for where, line in reading.numbered(self._dev, skip=2):
            try:
                name, fields = split_net_dev_line(line)
            except ValueError as error:
                reading.fail(f"{where}: {error} in {line[:120]!r}")
                continue
            if rows.setdefault(name, (where, fields))[1] is not fields:
                reading.fail(f"{where}: a second row of {name!r}")
        rows = dict(reading.first(list(rows.items()), INTERFACES_MAX, "interfaces"))
        now_ns = self._clock.monotonic_ns()
        self._links = {name: self._links.get(name) or CachedReading(CACHED_TICKS) for name in rows}
        self._speeds = {}
        self._rates.keep(rows.keys())
        for name, (where, fields) in rows.items():
            for column, metric in _SERVED:
                reading.add_number(where, fields[column], metric, name)
            self._link(reading, name)
            reading.add_all(self._utilization(name, fields, now_ns))
        return reading.outcome()

    @property
    def is_glance_due(self) -> bool:
        """Whether the speed of any link is known."""
        return bool(self._speeds)

    def glance(self) -> Sequence[Sample]:
        """Read /proc/net/dev and use the interfaces with a known speed."""
        if not self._speeds:
            return []
        found: list[Sample] = []
        lines = lines_of(self._files.read(self._dev))[2:]
        now_ns = self._clock.monotonic_ns()
        for line in lines:
            if line.rpartition(":")[0].strip() in self._speeds:
                with suppress(ValueError):  # a bad row loses its own values; the next tick names it
                    found += self._utilization(*split_net_dev_line(line), now_ns)
        return found

    def _utilization(self, interface: str, fields: list[str], now_ns: int) -> list[Sample]:
        speed = self._speeds.get(interface)
        if not speed:
            return []
        found = []
        for direction, column in _BYTES:
            with suppress(ValueError):  # already noted as a failure of the counter
                rate = self._rates.per_second((interface, direction), whole(fields[column]), now_ns)
                if rate is not None:
                    metric = f"pacecar_host_network_{direction}_utilization_ratio"
                    found.append(sample(metric, rate / speed, interface))
        return found

    def _link(self, reading: SourceReading, interface: str) -> None:
        link = self._links[interface].get(reading, lambda: self._read_link(reading, interface))
        reading.add_all(link.samples)
        if link.bytes_per_second is not None:
            self._speeds[interface] = link.bytes_per_second

    def _read_link(self, reading: SourceReading, interface: str) -> NetworkLink:
        folder = self._files.sys / "class" / "net" / interface
        samples: list[Sample] = []
        speed = reading.parsed(folder / "speed", parse_speed, has_none=INTERFACE_HAS_NONE)
        if speed is not None:
            samples.append(sample("pacecar_host_network_link_bytes_per_second", speed, interface))
        for name, metric, parse in (
            ("operstate", "pacecar_host_network_up", parse_operstate),
            ("mtu", "pacecar_host_network_mtu_bytes", whole),
            ("carrier_changes", "pacecar_host_network_carrier_changes_total", whole),
        ):
            value = reading.parsed(folder / name, parse, has_none=INTERFACE_HAS_NONE)
            if value is not None:
                samples.append(sample(metric, value, interface))
        return NetworkLink(samples, speed if is_link(reading.names(folder) or []) else None)


def parse_operstate(text: str) -> int:
    """Return 1 for a state that passes packets, else 0; raises ValueError for an unknown state."""
    if text not in _UP:
        raise ValueError(f"{text!r} is not an operational state")
    return _UP[text]


def split_net_dev_line(line: str) -> tuple[str, list[str]]:
    """Return an interface and its counters as text; raises ValueError."""
    name, colon, rest = line.rpartition(":")  # an alias has a colon in its name: eth0:1
    fields = rest.split()
    if colon == "" or len(fields) != _COLUMNS:
        raise ValueError(f"{len(fields)} counters, expected {_COLUMNS}")
    return name.strip(), fields
