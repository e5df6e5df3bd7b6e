"""Reads TCP retransmissions and drops, UDP errors, sockets, and drops and squeezes of the kernel's packet backlog.

gloo, NCCL over sockets and data loaders that read from a server use TCP, which hides loss and turns it into waiting: an
expired retransmission timer stalls the slowest rank by 200 ms, and no interface counts an error.

The counters belong to the daemon's network namespace: in a container with its own network they are that container's.
psutil does not offer them.

Source: RFC 4022 (Tcp), RFC 4113 (Udp); net/ipv4/proc.c for the names and for sockstat; net/core/net-procfs.c for
softnet_stat, whose numbers are hexadecimal, one line a processor: the second column drops, the third squeezes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pacecar.kernel_files.reader import KernelFiles
from pacecar.records import Outcome, Sample

from .source_reader import CachedReading, SourceReading

__all__ = ["TcpCollector"]

Series = tuple[str, tuple[str, ...]]

MEMORY = "pacecar_host_socket_memory_bytes"

CACHED_READINGS = 4
"""Readings (at up to three ticks each) per count of sockets: a leak of them takes minutes."""

SERIES: dict[tuple[str, str], Series] = {
    ("Tcp", "InSegs"): ("pacecar_host_tcp_segments_received_total", ()),
    ("Tcp", "OutSegs"): ("pacecar_host_tcp_segments_sent_total", ()),
    ("Tcp", "RetransSegs"): ("pacecar_host_tcp_segments_retransmitted_total", ()),
    ("Tcp", "InErrs"): ("pacecar_host_tcp_receive_errors_total", ()),
    ("Tcp", "OutRsts"): ("pacecar_host_tcp_resets_sent_total", ()),
    ("Tcp", "CurrEstab"): ("pacecar_host_tcp_connections", ()),
    ("Tcp", "ActiveOpens"): ("pacecar_host_tcp_opens_total", ("active",)),
    ("Tcp", "PassiveOpens"): ("pacecar_host_tcp_opens_total", ("passive",)),
    ("Udp", "InDatagrams"): ("pacecar_host_udp_datagrams_total", ("receive",)),
    ("Udp", "OutDatagrams"): ("pacecar_host_udp_datagrams_total", ("transmit",)),
    ("Udp", "InErrors"): ("pacecar_host_udp_receive_errors_total", ()),
    ("Udp", "RcvbufErrors"): ("pacecar_host_udp_buffer_errors_total", ("receive",)),
    ("Udp", "SndbufErrors"): ("pacecar_host_udp_buffer_errors_total", ("transmit",)),
    ("TcpExt", "TCPFastRetrans"): ("pacecar_host_tcp_retransmissions_total", ("fast",)),
    ("TcpExt", "TCPSlowStartRetrans"): ("pacecar_host_tcp_retransmissions_total", ("slow_start",)),
    ("TcpExt", "TCPSynRetrans"): ("pacecar_host_tcp_retransmissions_total", ("syn",)),
    ("TcpExt", "TCPLostRetransmit"): ("pacecar_host_tcp_retransmissions_total", ("lost",)),
    ("TcpExt", "TCPTimeouts"): ("pacecar_host_tcp_timeouts_total", ()),
    ("TcpExt", "ListenDrops"): ("pacecar_host_tcp_drops_total", ("listen",)),
    ("TcpExt", "TCPBacklogDrop"): ("pacecar_host_tcp_drops_total", ("backlog",)),
    ("TcpExt", "TCPRcvQDrop"): ("pacecar_host_tcp_drops_total", ("receive_queue",)),
}

SOCKETS: dict[tuple[str, str], Series] = {
    ("TCP", "inuse"): ("pacecar_host_tcp_sockets", ("in_use",)),
    ("TCP", "orphan"): ("pacecar_host_tcp_sockets", ("orphan",)),
    ("TCP", "tw"): ("pacecar_host_tcp_sockets", ("time_wait",)),
    ("TCP", "alloc"): ("pacecar_host_tcp_sockets", ("allocated",)),
    ("TCP", "mem"): (MEMORY, ("tcp",)),
    ("UDP", "mem"): (MEMORY, ("udp",)),
}
"""(protocol, key) in sockstat -> series; memory is in pages."""


HEADS_MAX = 64
"""Header lines that are cached; a kernel has about ten, and IcmpMsg's grows with each new kind of message."""


class _Table(NamedTuple):
    """The number of columns of a protocol, and the series of those that are served."""

    columns: int
    served: list[tuple[int, Series]]


class TcpCollector:
    """TCP, UDP and backlog counters of the network namespace, and its sockets."""

    name = "tcp"
    is_rarely_read = True

    def __init__(self, files: KernelFiles) -> None:
        self._files = files
        self._net = files.proc / "net"
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._sockets: CachedReading[list[Sample]] = CachedReading(CACHED_READINGS)
        self._heads: dict[str, _Table] = {}

    def collect(self) -> Outcome:
        """Read /proc/net/snmp, netstat and softnet_stat once, and sometimes sockstat."""
        reading = SourceReading(self._files)
        for name in ("snmp", "netstat"):
            self._tables(reading, self._net / name)
        failures = reading.failures
        rows = reading.lines(self._net / "softnet_stat", parse_softnet_line)
        if rows and reading.failures == failures:  # a sum without one processor would fall
            reading.add("pacecar_host_softnet_drops_total", sum(drops for drops, _ in rows))
            reading.add("pacecar_host_softnet_squeezes_total", sum(squeezes for _, squeezes in rows))
        reading.add_cached(self._sockets, lambda: self._read_sockets(reading))
        return reading.outcome()

    def _read_sockets(self, reading: SourceReading) -> list[Sample]:
        samples: list[Sample] = []
        for where, line in reading.numbered(self._net / "sockstat"):
            protocol, _, rest = line.partition(":")
            words = rest.split()
            if len(words) % 2:
                reading.fail(f"{where}: a key without a number in {line[:120]!r}")
                continue
            for key, text in zip(words[::2], words[1::2], strict=True):
                if (protocol, key) in SOCKETS:
                    metric, labels = SOCKETS[protocol, key]
                    factor = self._page_bytes if metric == MEMORY else 1
                    read = reading.number(where, text, metric, *labels, factor=factor)
                    samples += [] if read is None else [read]
        return samples

    def _tables(self, reading: SourceReading, path: Path) -> None:
        """Add a file of pairs of lines: names, then numbers, both prefixed with the protocol."""
        tables: dict[str, _Table] = {}
        for where, line in reading.numbered(path):
            protocol, _, rest = line.partition(":")
            table = tables.get(protocol)
            if table is None:
                tables[protocol] = self._table(line)
                continue
            fields = rest.split()
            if len(fields) != table.columns:
                reading.fail(f"{where}: {len(fields)} numbers below {table.columns} names in {line[:120]!r}")
                continue
            for column, (metric, labels) in table.served:
                reading.add_number(where, fields[column], metric, *labels)

    def _table(self, head: str) -> _Table:
        """Return the parsed header line `head`; each is parsed once, because the kernel has hundreds of names."""
        table = self._heads.get(head)
        if table is None:
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            protocol, _, rest = head.partition(":")
            names = rest.split()
            served = [
                (column, SERIES[protocol, name]) for column, name in enumerate(names) if (protocol, name) in SERIES
            ]
            table = self._heads[head] = _Table(len(names), served)
        return table


def parse_softnet_line(line: str) -> tuple[int, int]:
    """Return (drops, squeezes) of one processor; raises ValueError or IndexError."""
    fields = line.split()
    return int(fields[1], 16), int(fields[2], 16)
