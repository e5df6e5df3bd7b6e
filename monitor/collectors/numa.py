"""Reads the size, free memory and page allocations of each NUMA node.

The machine's free memory hides a node that is full: its tasks then take pages from the other node and read them at half
the speed, and no other counter shows it.

    hit       the page came from the node that the task wanted
    miss      it came from this node though the task wanted another
    foreign   the task wanted this node and the page came from another
    local     the task ran on this node;  other: it ran elsewhere

Processor time by node is in `cpu`, which reads /proc/stat anyway.  psutil does not know NUMA nodes.

Source: Documentation/admin-guide/numastat.rst; drivers/base/node.c for the form of meminfo.
"""

from __future__ import annotations

from pacecar.kernel_files.processors import numa_nodes
from pacecar.kernel_files.reader import KernelFiles, whole
from pacecar.records import Outcome

from .source_reader import SourceReading

__all__ = ["NumaCollector"]

NODES_MAX = 256

MEMINFO = {"MemTotal:": "pacecar_host_numa_memory_size_bytes", "MemFree:": "pacecar_host_numa_memory_free_bytes"}

NUMASTAT = {
    "numa_hit": "hit",
    "numa_miss": "miss",
    "numa_foreign": "foreign",
    "local_node": "local",
    "other_node": "other",
}


class NumaCollector:
    """Memory of each NUMA node."""

    name = "numa"
    is_rarely_read = True

    def __init__(self, files: KernelFiles) -> None:
        self._files = files

    def collect(self) -> Outcome:
        """Read meminfo and numastat of each node once."""
        reading = SourceReading(self._files)
        folder = self._files.sys / "devices" / "system" / "node"
        for name in reading.first(numa_nodes(reading.names(folder) or []), NODES_MAX, "NUMA nodes"):
            node = name.removeprefix("node")
            for metric, amount in reading.lines(folder / name / "meminfo", parse_node_meminfo_line):
                reading.add(metric, amount, node)
            for outcome, pages in reading.lines(folder / name / "numastat", parse_numastat_line):
                reading.add("pacecar_host_numa_pages_total", pages, node, outcome)
        return reading.outcome()


def parse_node_meminfo_line(line: str) -> tuple[str, int] | None:
    """Return (metric, bytes) of `Node 0 MemTotal: 16 kB`, None for rows not served; raises ValueError or IndexError."""
    fields = line.split()
    if fields[2] not in MEMINFO:
        return None
    if len(fields) != 5 or fields[4] != "kB":
        raise ValueError("not `Node n key: amount kB`")
    return MEMINFO[fields[2]], whole(fields[3]) * 1024


def parse_numastat_line(line: str) -> tuple[str, int] | None:
    """Return (outcome, pages), None for rows not served; raises ValueError."""
    key, _, pages = line.partition(" ")
    return (NUMASTAT[key], whole(pages)) if key in NUMASTAT else None
