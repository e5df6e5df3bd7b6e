"""Reads NCCL's log with NCCL_DEBUG=INFO: its network, the transport of each channel, and its warnings.

Only the log shows what is really used: which transport, over which card, with or without GPUDirect RDMA.  Formats
differ between versions (`Channel 00 :`, `Channel 00/0 :`, `0[1b000] -> 1[43000]`, `0[0] -> 1[1]`), so lines are
recognized by the few words that they share.

Source: NCCL's src/transport/{net,p2p,shm}.cc, src/transport/net_ib.cc and src/init.cc (2.4 to 2.30; init timings from
2.22 on, where the name of the function is missing).
"""

from __future__ import annotations

import re
from pathlib import Path

from pacecar.nccl_debug_log import log_lines

from .evidence import FactError
from .job import Line, Log

__all__ = ["LOG_BYTES_MAX", "read_log"]

LOG_BYTES_MAX = 256 * 1024 * 1024
"""NCCL prints its transports at the start; a job may then log for days."""

LINE_MAX = 300
"""Characters of a line that are shown."""

WARNINGS_MAX = 5

_CHANNEL = re.compile(r"\bChannel \d+.*\bvia (NET/[^/]+|P2P|SHM|direct|CollNet|NVLS)(\S*)")
_VERSION = re.compile(r"\bNCCL version (\d[\w.+-]*)")
_HOST = re.compile(r"([\w.-]+):\d+:\d+ \[\d+\] NCCL ")
_NETWORK = re.compile(r"\bUsing network (\S+)")
_INIT = re.compile(r"\bInit timings(?: - \w+)?: rank \d+ nranks \d+ total (\d+(?:\.\d+)?) \(([^)]*)\)")


def read_log(path: Path, *, most_bytes: int = LOG_BYTES_MAX) -> tuple[Log, tuple[str, ...]]:
    """Return the log's contents and notes on what was not read; raises OSError, and FactError if no line is NCCL's."""
    version: str | None = None
    network = no_rdma = None
    transports: dict[str, tuple[Line, int]] = {}
    warnings: list[Line] = []
    hosts: set[str] = set()
    slowest_init: tuple[Line, float, str] | None = None
    is_log, warning_count = False, 0
    with path.open("rb") as stream:
        for number, raw in enumerate(log_lines(stream, most_bytes), start=1):
            if b"NCCL" not in raw:
                continue
            text = raw.decode("utf-8", "replace").strip()
            line = Line(text[:LINE_MAX], f"{path}:{number}")
            found = _VERSION.search(text)
            if found is not None:
                is_log, version = True, version or found[1]
            if "NCCL INFO" not in text and "NCCL WARN" not in text:
                continue
            is_log = True
            host = _HOST.search(text)
            if host is not None:
                hosts.add(host[1])
            if "NCCL WARN" in text:
                warning_count += 1
                if len(warnings) < WARNINGS_MAX:
                    warnings.append(line)
            elif (channel := _CHANNEL.search(text)) is not None:
                name = _transport(channel[1], channel[2])
                first, count = transports.get(name, (line, 0))
                transports[name] = first, count + 1
            elif (timings := _INIT.search(text)) is not None:
                seconds = float(timings[1])
                if slowest_init is None or seconds > slowest_init[1]:
                    slowest_init = line, seconds, _longest(timings[2])
            elif network is None and _NETWORK.search(text):
                network = line
            elif no_rdma is None and "NET/IB : No device found" in text:
                no_rdma = line
        size = stream.seek(0, 2)
    if not is_log:
        raise FactError(f"{path}: no NCCL lines; run the job with NCCL_DEBUG=INFO NCCL_DEBUG_FILE={path.name}")
    log = Log(
        str(path), version, network, no_rdma, transports, tuple(warnings), warning_count, frozenset(hosts), slowest_init
    )
    notes = (f"{path}: only the first {most_bytes >> 20} of {size >> 20} MiB were read",) if size > most_bytes else ()
    return log, notes


def _longest(parts: str) -> str:
    """Return the longest of "name seconds, name seconds, ..."; whatever has another form is passed over."""
    named = re.findall(r"([a-z]\w*) (\d+(?:\.\d+)?)", parts)
    return max(named, key=lambda part: float(part[1]), default=("", ""))[0]


def _transport(kind: str, rest: str) -> str:
    """Return a channel's transport: `NET/IB/GDRDMA`, `NET/IB`, `NET/Socket`, `P2P`, `SHM` ..., without numbers."""
    return f"{kind}/GDRDMA" if kind.startswith("NET/") and "GDRDMA" in rest else kind
