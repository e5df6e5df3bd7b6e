"""Reads state, speed, traffic, errors and congestion of each RDMA port (InfiniBand and RoCE), one file per counter.

NCCL over RDMA bypasses the kernel: the interface's counters stand still while the port is full.  The port has its own
counters, one file each; which exist depends on driver, firmware and link layer, and some cannot be read in a guest. So
the files are searched only now and then, each is read on its own, and one that cannot be read loses one sample.

- `port_rcv_data` and `port_xmit_data` count words of four bytes, which only the kernel's documentation of sysfs says.
  Drivers without them (EFA) count bytes in hw_counters/rx_bytes and tx_bytes.
- A port without counters answers "N/A (no PMA)": missing, not an error.
- RoCE's congestion shows only in hw_counters: `np_ecn_marked_roce_packets` (the network marked arriving packets),
  `np_cnp_sent` (this port asked the sender to slow down), `rp_cnp_handled` (this port was asked to).

Some drivers have hw_counters for the device, not for the port; they are served if the device has one port.

Of the driver's counters, those for errors, losses and congestion are served.  The rest (allocations, requests by kind)
is left out, because each name is a series per port.

Source: Documentation/ABI/stable/sysfs-class-infiniband; for names drivers/infiniband/hw/{mlx5/counters.c,
bnxt_re/hw_counters.c, efa/efa_verbs.c, irdma/verbs.c, mana/counters.c}.  psutil does not know RDMA.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pacecar.clock import Clock
from pacecar.kernel_files.link_speeds import INTERFACE_HAS_NONE, parse_port_rate, parse_port_state
from pacecar.kernel_files.reader import KernelFiles, whole
from pacecar.records import Outcome, Sample

from ..catalog_sample import sample
from .rates import Rates
from .source_reader import CachedReading, SourceReading

__all__ = ["RdmaCollector"]

DEVICES_MAX = 64
PORTS_MAX = 16
"""Ports of one device; adapters have one or two."""

FIND_TICKS = 30
"""Ticks between two searches for the files of a device: a driver adds counters only when reloaded, which takes
longer."""

WORD_BYTES = 4

TRAFFIC = {
    "counters/port_rcv_data": ("pacecar_rdma_receive_bytes_total", WORD_BYTES),
    "counters/port_xmit_data": ("pacecar_rdma_transmit_bytes_total", WORD_BYTES),
    "counters/port_rcv_packets": ("pacecar_rdma_receive_packets_total", 1),
    "counters/port_xmit_packets": ("pacecar_rdma_transmit_packets_total", 1),
    "counters/port_xmit_wait": ("pacecar_rdma_transmit_waits_total", 1),
}

INSTEAD = {
    "counters/port_rcv_data": ("hw_counters/rx_bytes", "pacecar_rdma_receive_bytes_total"),
    "counters/port_xmit_data": ("hw_counters/tx_bytes", "pacecar_rdma_transmit_bytes_total"),
    "counters/port_rcv_packets": ("hw_counters/rx_pkts", "pacecar_rdma_receive_packets_total"),
    "counters/port_xmit_packets": ("hw_counters/tx_pkts", "pacecar_rdma_transmit_packets_total"),
}
"""What to read if the standard file does not exist."""

_ERRORS = """
    symbol_error link_error_recovery link_downed port_rcv_errors port_rcv_remote_physical_errors
    port_rcv_switch_relay_errors port_xmit_discards port_xmit_constraint_errors port_rcv_constraint_errors
    local_link_integrity_errors excessive_buffer_overrun_errors VL15_dropped
    req_cqe_error req_cqe_flush_error req_remote_access_errors req_remote_invalid_request req_transport_retries_exceeded
    req_rnr_retries_exceeded resp_cqe_error resp_cqe_flush_error resp_local_length_error resp_remote_access_errors
    rx_icrc_encapsulated rx_dct_connect_error
    max_retry_exceeded rnr_naks_rcvd unrecoverable_err bad_resp_err local_protection_err recoverable_errors
    cmds_err alloc_pd_err create_qp_err reg_mr_err
    requester_timeout requester_retries_exceeded rnr_nak_retries_exceeded total_fatal_err
"""

_CONGESTION = """
    out_of_sequence out_of_buffer duplicate_request rnr_nak_retry_err packet_seq_err implied_nak_seq_err
    local_ack_timeout_err
    np_cnp_sent np_ecn_marked_roce_packets rp_cnp_handled rp_cnp_ignored
    roce_adp_retrans roce_adp_retrans_to roce_slow_restart roce_slow_restart_cnps roce_slow_restart_trans
    rx_roce_drops rx_roce_discards to_retransmits seq_err_naks_rcvd rx_ecn_marked_pkts tx_cnp_pkts rx_cnp_pkts
    rx_drops retrans_bytes retrans_pkts retrans_timeout_events impaired_remote_conn_events unresponsive_remote_events
    cnpHandled cnpIgnored cnpSent RxECNMrkd tcpRetransSegs
    requester_oos_nak requester_rnr_nak responder_rnr_nak responder_oos received_cnps
"""

ERRORS, CONGESTION = frozenset(_ERRORS.split()), frozenset(_CONGESTION.split())


class RdmaCounter(NamedTuple):
    """One counter file, and the series that it feeds."""

    path: Path
    metric: str
    labels: tuple[str, ...]
    factor: int


class Port(NamedTuple):
    """One port of one device, and its files."""

    device: str
    port: str
    folder: Path
    counters: tuple[RdmaCounter, ...]
    info: tuple[str, ...] | None


class RdmaCollector:
    """State, rate, traffic, errors and congestion of each RDMA port."""

    name = "rdma"

    def __init__(self, files: KernelFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._root = files.sys / "class" / "infiniband"
        self._devices: tuple[str, ...] = ()
        self._ports: list[Port] = []
        self._found: CachedReading[list[Port]] = CachedReading(FIND_TICKS)
        self._speeds: dict[tuple[str, ...], int] = {}
        self._rates = Rates()

    def collect(self) -> Outcome:
        """Read every counter of every port once."""
        reading = SourceReading(self._files)
        self._find(reading)
        self._rates.keep(set(self._devices))
        self._speeds = {}
        for port in self._ports:
            if port.info is not None:
                reading.add("pacecar_rdma_port_info", 1, port.device, port.port, *port.info)
            self._state(reading, port)
            for counter in port.counters:
                count = reading.parsed(counter.path, parse_counter)
                if count is None:
                    continue
                reading.add(counter.metric, count * counter.factor, *counter.labels)
                for ratio in self._utilization(counter, count):
                    reading.add(ratio.metric, ratio.value, *ratio.labels)
        return reading.outcome()

    @property
    def is_glance_due(self) -> bool:
        """Whether the speed of any port is known."""
        return bool(self._speeds)

    def glance(self) -> Sequence[Sample]:
        """Read the two traffic counters of each port that is up."""
        found: list[Sample] = []
        for port in self._ports:
            for counter in port.counters:
                if counter.metric in _UTILIZATION and (port.device, port.port) in self._speeds:
                    with suppress(OSError, ValueError):  # a bad file loses one value; the next tick names it
                        count = parse_counter(self._files.read(counter.path).strip())
                        found += [] if count is None else self._utilization(counter, count)
        return found

    def _utilization(self, counter: RdmaCounter, count: int) -> list[Sample]:
        metric, speed = _UTILIZATION.get(counter.metric), self._speeds.get(counter.labels)
        if metric is None or not speed:
            return []
        rate = self._rates.per_second((*counter.labels, metric), count * counter.factor, self._clock.monotonic_ns())
        return [] if rate is None else [sample(metric, rate / speed, *counter.labels)]

    def _state(self, reading: SourceReading, port: Port) -> None:
        labels = (port.device, port.port)
        for name, metric, good in (
            ("state", "pacecar_rdma_port_active", "ACTIVE"),
            ("phys_state", "pacecar_rdma_port_link_up", "LinkUp"),
        ):
            state = reading.parsed(port.folder / name, parse_port_state)
            if state is not None:
                reading.add(metric, int(state == good), *labels)
        speed = reading.parsed(port.folder / "rate", parse_port_rate)
        if speed is not None:
            reading.add("pacecar_rdma_port_link_bytes_per_second", speed, *labels)
            self._speeds[labels] = speed

    def _find(self, reading: SourceReading) -> None:
        """Find out which counters exist, when the devices changed and now and then."""
        names = tuple(reading.first(reading.names(self._root) or [], DEVICES_MAX, "RDMA devices"))
        if names != self._devices:
            self._devices, self._found = names, CachedReading(FIND_TICKS)
        self._ports = self._found.get(reading, lambda: [p for name in names for p in self._find_ports(reading, name)])

    def _find_ports(self, reading: SourceReading, device: str) -> list[Port]:
        folder = self._root / device
        names = reading.names(folder / "ports") or []
        at_device = frozenset(reading.names(folder / "hw_counters") or []) if len(names) == 1 else frozenset()
        ports = []
        for port in reading.first(names, PORTS_MAX, f"ports of {device}"):
            at = folder / "ports" / port
            there = {
                **{f"hw_counters/{name}": folder / "hw_counters" / name for name in at_device},
                **{f"{part}/{name}": at / part / name for part in ("counters", "hw_counters")
                   for name in reading.names(at / part) or []},
            }  # fmt: skip
            facts = (at / "link_layer", folder / "hca_type", folder / "fw_ver")
            failures = reading.failures
            info: tuple[str, ...] | None = tuple(  # not every driver has them
                reading.parsed(path, str.strip, has_none=INTERFACE_HAS_NONE) or "" for path in facts
            )
            if reading.failures != failures:
                info = None
            ports.append(Port(device, port, at, tuple(counters_of(there, (device, port))), info))
        return ports


_UTILIZATION = {
    "pacecar_rdma_receive_bytes_total": "pacecar_rdma_receive_utilization_ratio",
    "pacecar_rdma_transmit_bytes_total": "pacecar_rdma_transmit_utilization_ratio",
}


def counters_of(there: dict[str, Path], labels: tuple[str, str]) -> list[RdmaCounter]:
    """Return the counters to serve among the files `there` (name below the port -> path)."""
    counters = []
    for name, (metric, factor) in TRAFFIC.items():
        if name in there:
            counters.append(RdmaCounter(there[name], metric, labels, factor))
        elif name in INSTEAD and INSTEAD[name][0] in there:
            counters.append(RdmaCounter(there[INSTEAD[name][0]], INSTEAD[name][1], labels, 1))
    for name, path in there.items():
        word = path.name
        if word in ERRORS:
            is_second = name != f"counters/{word}" and f"counters/{word}" in there
            label = name if is_second else word  # a driver's counter with the name of a standard one
            counters.append(RdmaCounter(path, "pacecar_rdma_errors_total", (*labels, label), 1))
        elif word in CONGESTION and name.startswith("hw_counters/"):
            counters.append(RdmaCounter(path, "pacecar_rdma_congestion_events_total", (*labels, word), 1))
    return counters


def parse_counter(line: str) -> int | None:
    """Return the count, None if the port has no such counter; raises ValueError."""
    return None if line.startswith("N/A") else whole(line.strip())
