"""How much memory is there, and who waits for it?  /proc/meminfo, and the stall times of /proc/pressure.

"Used" is not total minus free: that counts the page cache, which the kernel gives back.  It is also not total minus
the caches: shared memory sits in `Cached`, cannot be given back, and is where data loader workers put batches.  So
used = total - free - buffers - (cached + reclaimable slab - shared), as htop counts.

Source: proc(5), "/proc/meminfo"; Documentation/accounting/psi.rst.
"""

from __future__ import annotations

from pacecar.monitor.collectors.reading import Files, Reading, whole
from pacecar.records import Outcome

__all__ = ["MemoryCollector"]

RESOURCES = ("cpu", "memory", "io", "irq")


class MemoryCollector:
    """Memory, swap and pressure."""

    name = "memory"

    def __init__(self, files: Files) -> None:
        self._files = files

    def collect(self) -> Outcome:
        """Read /proc/meminfo and /proc/pressure/* once."""
        reading = Reading(self._files)
        meminfo = dict(reading.lines(self._files.proc / "meminfo", parse_meminfo_line))
        for key, metric in (
            ("MemTotal", "pacecar_host_memory_size_bytes"),
            ("MemAvailable", "pacecar_host_memory_available_bytes"),
            ("Cached", "pacecar_host_memory_cached_bytes"),
            ("SwapTotal", "pacecar_host_swap_size_bytes"),
        ):
            if key in meminfo:
                reading.add(metric, meminfo[key])
        used = used_bytes(meminfo)
        if used is not None:
            reading.add("pacecar_host_memory_used_bytes", used)
        if "SwapTotal" in meminfo and "SwapFree" in meminfo:
            reading.add("pacecar_host_swap_used_bytes", meminfo["SwapTotal"] - meminfo["SwapFree"])
        for resource in RESOURCES:
            for kind, stalled_ns in reading.lines(self._files.proc / "pressure" / resource, parse_pressure_line):
                reading.add("pacecar_host_pressure_stalled_seconds_total", stalled_ns, resource, kind)
        return reading.outcome()

    def close(self) -> None:
        """Nothing is held open."""


def parse_meminfo_line(line: str) -> tuple[str, int] | None:
    """Return (key, bytes); None for rows that are not an amount of memory; raises ValueError or IndexError."""
    key, _, rest = line.partition(":")
    fields = rest.split()
    if len(fields) == 2 and fields[1] == "kB":
        return key, whole(fields[0]) * 1024
    if len(fields) == 1 and key.startswith("HugePages_"):  # pages, not bytes
        return None
    raise ValueError("not `key: amount kB`")


def used_bytes(meminfo: dict[str, int]) -> int | None:
    """Return memory in use without caches; None when a part is missing."""
    try:
        cache = meminfo["Cached"] + meminfo["SReclaimable"] - meminfo["Shmem"]
        return meminfo["MemTotal"] - meminfo["MemFree"] - meminfo["Buffers"] - cache
    except KeyError:
        return None


def parse_pressure_line(line: str) -> tuple[str, int]:
    """Return (kind, nanoseconds stalled since boot); raises ValueError or IndexError."""
    kind, *fields = line.split()
    if kind not in ("some", "full"):
        raise ValueError(f"unknown kind {kind!r}")
    totals = dict(field.split("=", 1) for field in fields)
    if "total" not in totals:
        raise ValueError("no total")
    return kind, whole(totals["total"]) * 1000
