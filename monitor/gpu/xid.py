r"""Counts Xid errors from two sources, each of which misses some, and counts no error twice.

The driver's event set reports at once and by device, but only while we listen, and not every code.  The kernel log has
all of them, and only root may read it on most machines.  So both are read, and a report of one source that the other
gave of the same GPU and code within PAIR_SECONDS is the same error.

    NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.

/dev/kmsg gives a record a read, `priority,sequence,microseconds,flags;text` (Documentation/ABI/testing/dev-kmsg).
It is read from its end on: errors from before the daemon started are not counted.
"""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND

__all__ = ["KNOWN_XIDS", "KernelLog", "LoggedXid", "XidTally", "bus_of", "parse_xid"]

KNOWN_XIDS = (13, 31, 48, 63, 64, 74, 79, 94, 95, 119)
"""Codes that are counted from zero on, because an increase cannot be seen of a series that begins at one: illegal
instruction, page fault, double-bit ECC, remapping (63, 64), NVLink, fallen off the bus, ECC (94, 95), GSP timeout."""

CODES_MAX = 64
"""Different codes counted of one GPU; there are some two hundred."""

PAIR_SECONDS = 10
PENDING_MAX = 256
RECORD_BYTES_MAX = 8192
RECORDS_MAX = 512
"""Kernel log records read in one tick; the rest of a flood is read at the next."""

_LINE = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")


class LoggedXid(NamedTuple):
    """An Xid in the kernel log; `bus` as `bus_of` writes it."""

    bus: str
    code: int


def bus_of(pci_bus_id: str) -> str:
    """Return domain, bus and device of a PCI address in one spelling: `00000000:3B:00.0` is `0000:3b:00`."""
    domain, _, rest = pci_bus_id.partition(":")
    if not rest or not set(domain) <= set("0123456789abcdefABCDEF") or not domain:
        return pci_bus_id.lower()
    return f"{int(domain, 16):04x}:{rest.partition('.')[0].lower()}"


def parse_xid(record: str) -> LoggedXid | None:
    """Return the Xid in a record of the kernel log; None when there is none."""
    found = _LINE.search(record)
    return None if found is None else LoggedXid(bus_of(found["bus"]), int(found["code"]))


class XidTally:
    """Counts by GPU and code; each error once, whichever source reported it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._unpaired: deque[tuple[int, str, str, int]] = deque(maxlen=PENDING_MAX)

    def expect(self, gpu: str) -> None:
        """Count the well-known codes of `gpu` from zero on."""
        for code in KNOWN_XIDS:
            self._counts.setdefault((gpu, code), 0)

    def record(self, witness: str, gpu: str, code: int, now_ns: int) -> bool:
        """Take one report; return whether it is of an error that is new."""
        while self._unpaired and now_ns - self._unpaired[0][0] > PAIR_SECONDS * NS_PER_SECOND:
            self._unpaired.popleft()
        for report in self._unpaired:
            if report[1] != witness and report[2:] == (gpu, code):
                self._unpaired.remove(report)
                return False
        self._unpaired.append((now_ns, witness, gpu, code))
        if (gpu, code) not in self._counts and sum(1 for known, _ in self._counts if known == gpu) >= CODES_MAX:
            return True
        self._counts[gpu, code] = self._counts.get((gpu, code), 0) + 1
        return True

    def counts(self) -> dict[tuple[str, int], int]:
        """Return (gpu, code) -> errors."""
        return dict(self._counts)


class KernelLog:
    """The kernel log from now on; never waits."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        """Open at the end; raises OSError, which is healthy: only root may read it on most machines."""
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self) -> list[LoggedXid]:
        """Return the Xids since the last read; raises OSError."""
        found: list[LoggedXid] = []
        if self._descriptor is None:
            return found
        for _ in range(RECORDS_MAX):
            try:
                record = os.read(self._descriptor, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before we came; the next read is good
                    continue
                raise
            if not record:
                break
            # The device gives a record a read; a file in its place (a test, a copy) gives many lines.
            for line in record.decode("utf-8", "replace").splitlines():
                xid = parse_xid(line)
                if xid is not None:
                    found.append(xid)
        return found

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
