"""Reads Xid errors from the event set and the kernel log once a tick, and finds the GPUs that they belong to.

Both are read on a thread of their own, because the event set is a driver call like any other and may hang.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

from pacecar.clock import Clock
from pacecar.records import Sample

from .driver import NothingNewError, Nvml, NvmlError
from .xid import KernelLog, LoggedXid, XidTally, bus_of

__all__ = ["XidReports", "XidSources"]

EVENTS_MAX = 64
"""Events taken in one tick; what is left waits in the driver."""

NO_GPU = "unknown"
"""The label of an Xid whose PCI address is that of no GPU that we know."""

_log = logging.getLogger(__name__)


class XidReports(NamedTuple):
    """One tick: (source, gpu label, code) as they came, and what went wrong."""

    reports: list[tuple[str, str, int]]
    failure: NvmlError | None


class XidSources:
    """`listen` belongs to the worker's thread, all the rest to the collector's, while the worker is idle."""

    def __init__(self, nvml: Nvml, clock: Clock, kernel_log: str) -> None:
        self._nvml = nvml
        self._clock = clock
        self._log = KernelLog(kernel_log)
        self._tally = XidTally()
        self._label_of_index: dict[int, str] = {}
        self._label_of_bus: dict[str, str] = {}
        self._has_events = False
        self._has_log = False

    def open(self) -> None:
        """Open the kernel log; that it may not be read is worth one line."""
        try:
            self._log.open()
            self._has_log = True
        except OSError as error:
            _log.info("no Xid errors from the kernel log: %s", error)

    def close(self) -> None:
        """Close the kernel log."""
        self._log.close()
        self._has_log = False

    def attach(self, gpus: list[tuple[int, str, str]], *, has_events: bool) -> None:
        """Take the GPUs of a new session as (index, label, PCI address)."""
        self._has_events = has_events
        self._label_of_index = {index: label for index, label, _ in gpus}
        self._label_of_bus.update({bus_of(address): label for _, label, address in gpus})
        if self.is_listening:
            for _, label, _ in gpus:
                self._tally.expect(label)

    def detach(self) -> None:
        """Stop reading the driver's events: its event set is void."""
        self._has_events = False

    @property
    def is_listening(self) -> bool:
        """Whether any source would report an Xid."""
        return self._has_events or self._has_log

    def listen(self) -> XidReports:
        """Return what the sources reported since the last time."""
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

    def note(self, heard: XidReports) -> None:
        """Count the reports, and log each error once."""
        for witness, gpu, code in heard.reports:
            if self._tally.record(witness, gpu, code, self._clock.monotonic_ns()):
                _log.warning("gpu %s: Xid %d", gpu, code)

    def samples(self) -> Iterator[Sample]:
        """Yield the counts; nothing when no source would report an error."""
        if self.is_listening:
            for (gpu, code), count in self._tally.counts().items():
                yield Sample("pacecar_gpu_xid_errors_total", (gpu, str(code)), count)

    def _read_log(self) -> list[LoggedXid]:
        try:
            return self._log.read()
        except OSError as error:
            _log.warning("no more Xid errors from the kernel log: %s", error)
            self.close()
            return []
