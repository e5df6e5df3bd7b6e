"""What does NCCL say that it does?  Its log with NCCL_DEBUG=INFO: the network, how channels go, and its warnings.

The one witness of what is really used: which transport, over which card, with or without GPUDirect RDMA.  Forms differ
between versions (`Channel 00 :`, `Channel 00/0 :`, `0[1b000] -> 1[43000]`, `0[0] -> 1[1]`), so a line is known by the
few words that all of them have.

Source: what NCCL prints in src/transport/{net,p2p,shm}.cc and src/transport/net_ib.cc, src/init.cc (2.4 to 2.28).
"""

from __future__ import annotations

import re
from pathlib import Path

from pacecar.doctor.jobfacts import Line, Log

__all__ = ["LINES_MAX", "LogError", "read_log"]

LINES_MAX = 5_000_000
LINE_MAX = 300
"""Characters of a line that are shown."""

WARNINGS_MAX = 5

_CHANNEL = re.compile(r"\bChannel \d+.*\bvia (NET/[^/\s]+|P2P|SHM|direct|CollNet|NVLS)(\S*)")
_VERSION = re.compile(r"\bNCCL version (\d[\w.+-]*)")
_HOST = re.compile(r"^(\S+?):\d+:\d+ \[\d+\] NCCL ")
_NETWORK = re.compile(r"\bUsing network (\S+)")


class LogError(ValueError):
    """The file is no log of NCCL's; the message names it."""


def read_log(path: Path) -> Log:
    """Read the log; raises OSError, and LogError where no line of it is NCCL's."""
    version: str | None = None
    network = no_rdma = None
    transports: dict[str, tuple[Line, int]] = {}
    warnings: list[Line] = []
    hosts: set[str] = set()
    is_log, warning_count = False, 0
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, raw in enumerate(stream, start=1):
            if number > LINES_MAX:
                break
            if "NCCL" not in raw:
                continue
            text = raw.strip()
            line = Line(text[:LINE_MAX], f"{path}:{number}")
            found = _VERSION.search(text)
            if found is not None:
                is_log, version = True, version or found[1]
            if "NCCL INFO" not in text and "NCCL WARN" not in text:
                continue
            is_log = True
            host = _HOST.match(text)
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
            elif network is None and _NETWORK.search(text):
                network = line
            elif no_rdma is None and "NET/IB : No device found" in text:
                no_rdma = line
    if not is_log:
        raise LogError(f"{path}: no line of it is NCCL's; run the job with NCCL_DEBUG=INFO NCCL_DEBUG_FILE={path.name}")
    return Log(str(path), version, network, no_rdma, transports, tuple(warnings), warning_count, len(hosts))


def _transport(kind: str, rest: str) -> str:
    """Return how a channel goes: `NET/IB/GDRDMA`, `NET/IB`, `NET/Socket`, `P2P`, `SHM` ..., without numbers."""
    return f"{kind}/GDRDMA" if kind.startswith("NET/") and "GDRDMA" in rest else kind
