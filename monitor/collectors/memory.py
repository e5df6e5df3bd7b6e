"""Reads memory, swap, paging, huge pages, and the time that tasks stalled on resources (PSI).

Used memory is not total minus free, which includes the page cache that the kernel gives back.  Nor is it total minus
caches: shared memory is part of `Cached`, cannot be given back, and is where data loader workers put batches.  So used
= total - free - buffers - (cached + reclaimable slab - shared), as in htop.

The huge pages in /proc/meminfo are only those of the default size; each size has a folder in /sys.

psutil is not used: its virtual_memory() warns and guesses if a field is missing.

Source: proc(5), "/proc/meminfo" and "/proc/vmstat"; Documentation/accounting/psi.rst;
Documentation/admin-guide/mm/hugetlbpage.rst.
"""

from __future__ import annotations

import os
import re

from pacecar.kernel_files.memory import parse_meminfo_line
from pacecar.kernel_files.processors import parse_pressure_line
from pacecar.kernel_files.reader import KernelFiles, whole
from pacecar.records import Outcome, Sample

from ..catalog_sample import sample
from .source_reader import CachedReading, SourceReading

__all__ = ["MemoryCollector"]

RESOURCES = ("cpu", "memory", "io", "irq")

MEMINFO = {
    "MemTotal": "pacecar_host_memory_size_bytes",
    "MemAvailable": "pacecar_host_memory_available_bytes",
    "Cached": "pacecar_host_memory_cached_bytes",
    "Shmem": "pacecar_host_memory_shared_bytes",
    "Dirty": "pacecar_host_memory_dirty_bytes",
    "Writeback": "pacecar_host_memory_writeback_bytes",
    "AnonPages": "pacecar_host_memory_anonymous_bytes",
    "Mapped": "pacecar_host_memory_mapped_bytes",
    "Slab": "pacecar_host_memory_slab_bytes",
    "PageTables": "pacecar_host_memory_page_tables_bytes",
    "Committed_AS": "pacecar_host_memory_committed_bytes",
    "HardwareCorrupted": "pacecar_host_memory_corrupted_bytes",
    "Unevictable": "pacecar_host_memory_unevictable_bytes",
    "AnonHugePages": "pacecar_host_memory_transparent_huge_bytes",
    "SwapTotal": "pacecar_host_swap_size_bytes",
}

VMSTAT_EVENTS = {
    "pgfault": "pacecar_host_page_faults_total",
    "pgmajfault": "pacecar_host_major_page_faults_total",
    "oom_kill": "pacecar_host_oom_kills_total",
}
VMSTAT_PAGES = {"pswpin": "pacecar_host_swap_in_bytes_total", "pswpout": "pacecar_host_swap_out_bytes_total"}

VMSTAT_LINES = (*VMSTAT_EVENTS, *VMSTAT_PAGES)
"""Prefixes of the lines of vmstat that are served: five of two hundred."""

CACHED_READINGS = 4
"""Readings (at up to three ticks each) per reading of the huge page pools, which change rarely and cost two files
each."""

POOLS_MAX = 16
"""Sizes of huge pages; arm64 has the most, four."""


class MemoryCollector:
    """Memory, swap, paging, huge pages and pressure."""

    name = "memory"
    is_rarely_read = True

    def __init__(self, files: KernelFiles) -> None:
        self._files = files
        self._meminfo, self._vmstat = files.proc / "meminfo", files.proc / "vmstat"
        self._pressure = [(resource, files.proc / "pressure" / resource) for resource in RESOURCES]
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._pools: CachedReading[list[Sample]] = CachedReading(CACHED_READINGS)

    def collect(self) -> Outcome:
        """Read /proc/meminfo, /proc/vmstat and /proc/pressure/* once, and sometimes the pools of huge pages."""
        reading = SourceReading(self._files)
        meminfo = dict(reading.lines(self._meminfo, parse_meminfo_line))
        for key, metric in MEMINFO.items():
            if key in meminfo:
                reading.add(metric, meminfo[key])
        used = used_bytes(meminfo)
        if used is not None:
            reading.add("pacecar_host_memory_used_bytes", used)
        if "SwapTotal" in meminfo and "SwapFree" in meminfo:
            reading.add("pacecar_host_swap_used_bytes", meminfo["SwapTotal"] - meminfo["SwapFree"])
        for key, count in reading.lines(self._vmstat, parse_vmstat_line, only=VMSTAT_LINES):
            if key in VMSTAT_EVENTS:
                reading.add(VMSTAT_EVENTS[key], count)
            else:
                reading.add(VMSTAT_PAGES[key], count * self._page_bytes)
        reading.add_cached(self._pools, lambda: self._huge_pages(reading))
        for resource, path in self._pressure:
            for kind, stalled_ns in reading.lines(path, parse_pressure_line):
                reading.add("pacecar_host_pressure_stalled_seconds_total", stalled_ns, resource, kind)
        return reading.outcome()

    def _huge_pages(self, reading: SourceReading) -> list[Sample]:
        samples: list[Sample] = []
        folder = self._files.sys / "kernel" / "mm" / "hugepages"
        pools = [n for n in reading.names(folder) or [] if re.fullmatch(r"hugepages-\d+kB", n)]
        for pool in reading.first(pools, POOLS_MAX, "sizes of huge pages"):
            page = pool.removeprefix("hugepages-")
            page_bytes = int(page.removesuffix("kB")) * 1024
            for name, metric in (
                ("nr_hugepages", "pacecar_host_hugepages_size_bytes"),
                ("free_hugepages", "pacecar_host_hugepages_free_bytes"),
            ):
                pages = reading.parsed(folder / pool / name, whole)
                if pages is not None:
                    samples.append(sample(metric, pages * page_bytes, page))
        return samples


def parse_vmstat_line(line: str) -> tuple[str, int] | None:
    """Return (key, count) of a row that is served, None for others; raises ValueError."""
    key, _, count = line.partition(" ")
    return (key, whole(count)) if key in VMSTAT_EVENTS or key in VMSTAT_PAGES else None


def used_bytes(meminfo: dict[str, int]) -> int | None:
    """Return memory in use without caches; None if a part is missing."""
    try:
        cache = meminfo["Cached"] + meminfo["SReclaimable"] - meminfo["Shmem"]
        return meminfo["MemTotal"] - meminfo["MemFree"] - meminfo["Buffers"] - cache
    except KeyError:
        return None
