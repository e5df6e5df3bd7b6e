r"""Counts Xid errors from the driver's event set and the kernel log, each error once.

Each source misses some.  The event set reports at once and by device, but only while we listen, and not every
code.  The kernel log has all of them, but on most machines only root may read it.  A report that the other source made
of the same GPU and code within PAIR_SECONDS is the same error.

    NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.

/dev/kmsg returns one record per read, `priority,sequence,microseconds,flags;text` (Documentation/ABI/testing/dev-kmsg).
Reading starts at its end: earlier errors are not counted.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample

from .driver import NothingNewError, Nvml, NvmlError

__all__ = ["KNOWN_XIDS", "KernelLog", "LoggedXid", "XidReports", "XidSources", "XidTally", "bus_of", "parse_xid"]

KNOWN_XIDS = (13, 31, 48, 63, 64, 74, 79, 94, 95, 119)
"""Codes that start at zero, because no increase shows in a series that begins at one: illegal instruction, page fault,
double-bit ECC, remapping (63, 64), NVLink, fallen off the bus, ECC (94, 95), GSP timeout."""

CODES_MAX = 64
"""Different codes counted for one GPU; about two hundred exist."""

PAIR_SECONDS = 10
PENDING_MAX = 256
RECORD_BYTES_MAX = 8192
RECORDS_MAX = 512
"""Kernel log records read in one tick; the rest of a flood is read at the next."""

EVENTS_MAX = 64
"""Events read in one tick; the rest waits in the driver."""

NO_GPU = "unknown"
"""The label of an Xid whose PCI address belongs to no known GPU."""

_LINE = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")

_log = logging.getLogger(__name__)


class LoggedXid(NamedTuple):
    """An Xid in the kernel log; `bus` is in the form of `bus_of`."""

    bus: str
    code: int


def bus_of(pci_bus_id: str) -> str:
    """Return domain, bus and device of a PCI address in one spelling: `00000000:3B:00.0` is `0000:3b:00`."""
    domain, _, rest = pci_bus_id.partition(":")
    if not rest or not set(domain) <= set("0123456789abcdefABCDEF") or not domain:
        return pci_bus_id.lower()
    return f"{int(domain, 16):04x}:{rest.partition('.')[0].lower()}"


def parse_xid(record: str) -> LoggedXid | None:
    """Return the Xid in a record of the kernel log; None if it holds none."""
    found = _LINE.search(record)
    return None if found is None else LoggedXid(bus_of(found["bus"]), int(found["code"]))


class XidTally:
    """Counts by GPU and code; each error once, whichever source reported it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._unpaired: deque[tuple[int, str, str, int]] = deque(maxlen=PENDING_MAX)

    def start_at_zero(self, gpu: str) -> None:
        """Start the well-known codes of `gpu` at zero."""
        for code in KNOWN_XIDS:
            self._counts.setdefault((gpu, code), 0)

    def record(self, source: str, gpu: str, code: int, now_ns: int) -> bool:
        """Record one report; return whether it is a new error."""
        while self._unpaired and now_ns - self._unpaired[0][0] > PAIR_SECONDS * NS_PER_SECOND:
            self._unpaired.popleft()
        for report in self._unpaired:
            if report[1] != source and report[2:] == (gpu, code):
                self._unpaired.remove(report)
                return False
        self._unpaired.append((now_ns, source, gpu, code))
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
        """Open at the end; raises OSError, which is healthy: on most machines only root may read it."""
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
                if error.errno == errno.EPIPE:  # records were overwritten before we read them; the next read works
                    continue
                raise
            if not record:
                break
            # The device returns one record per read; a file in its place (a test, a copy) returns many lines.
            for line in record.decode("utf-8", "replace").splitlines():
                xid = parse_xid(line)
                if xid is not None:
                    found.append(xid)
        return found

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class XidReports(NamedTuple):
    """The reports of one tick as (source, GPU label, code), and what went wrong."""

    reports: list[tuple[str, str, int]]
    failure: NvmlError | None


class XidSources:
    """Reads both sources once a tick, and finds the GPUs that the errors belong to.

    `listen` runs on a worker's thread, because reading the event set is a driver call that may hang.  All other methods
    belong to the collector's thread while the worker is idle.
    """

    def __init__(self, nvml: Nvml, clock: Clock, kernel_log: str) -> None:
        self._nvml = nvml
        self._clock = clock
        self._log = KernelLog(kernel_log)
        self._tally = XidTally()
        self._label_of_index: dict[int, str] = {}
        self._label_of_bus: dict[str, str] = {}
        self._has_events = False
        self._watched: set[str] = set()
        self._has_log = False
        self._counts: dict[tuple[str, int], int] = {}
        self._samples: Sequence[Sample] = ()

    def open(self) -> None:
        """Open the kernel log; if that is not allowed, log one line."""
        try:
            self._log.open()
            self._has_log = True
        except OSError as error:
            _log.info("Xid errors are not read from the kernel log: %s", error)

    def close(self) -> None:
        """Close the kernel log."""
        self._log.close()
        self._has_log = False

    def attach(self, gpus: list[tuple[int, str, str]], watched: Collection[int]) -> None:
        """Use the GPUs of a new session, as (index, label, PCI address); the driver reports events of `watched`."""
        self._has_events = bool(watched)
        self._watched = {label for index, label, _ in gpus if index in watched}
        self._label_of_index = {index: label for index, label, _ in gpus}
        self._label_of_bus.update({bus_of(address): label for _, label, address in gpus})
        for _, label, _ in gpus:
            if self._has_log or label in self._watched:
                self._tally.start_at_zero(label)

    def detach(self) -> None:
        """Stop reading the driver's events: its event set is void."""
        self._has_events = False

    @property
    def is_listening(self) -> bool:
        """Whether any source would report an Xid."""
        return self._has_events or self._has_log

    def listen(self) -> XidReports:
        """Return what the sources reported since the last call."""
        reports = [("log", self._label_of_bus.get(xid.bus, NO_GPU), xid.code) for xid in self._read_log()]
        for _ in range(EVENTS_MAX if self._has_events else 0):
            try:
                event = self._nvml.event()
            except NothingNewError:
                break
            except NvmlError as error:
                return XidReports(reports, error)
            reports.append(("event", self._label_of_index.get(event.gpu_index, NO_GPU), event.xid))
        return XidReports(reports, None)

    def note(self, found: XidReports) -> None:
        """Count the reports, and log each error once."""
        for source, gpu, code in found.reports:
            if self._tally.record(source, gpu, code, self._clock.monotonic_ns()):
                _log.warning("gpu %s: Xid %d", gpu, code)

    def samples(self) -> Sequence[Sample]:
        """Return the counts of each GPU that has a source of errors."""
        counts = {
            (gpu, code): count
            for (gpu, code), count in self._tally.counts().items()
            if self._has_log or (self._has_events and gpu in self._watched)
        }
        if counts != self._counts:
            self._counts = counts
            self._samples = [
                Sample("pacecar_gpu_xid_errors_total", (gpu, str(code)), count) for (gpu, code), count in counts.items()
            ]
        return self._samples

    def _read_log(self) -> list[LoggedXid]:
        try:
            return self._log.read()
        except OSError as error:
            _log.warning("Xid errors are no longer read from the kernel log: %s", error)
            self.close()
            return []
