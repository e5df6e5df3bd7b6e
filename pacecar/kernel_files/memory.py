"""Parses /proc/meminfo, and /proc/PID/smaps_rollup, which has rows of the same form.

Source: proc(5).
"""

from __future__ import annotations

from .reader import lines_of, whole

__all__ = ["parse_meminfo_line", "rows_bytes"]


def parse_meminfo_line(line: str) -> tuple[str, int] | None:
    """Return (key, bytes); None for rows that are not an amount of memory; raises ValueError or IndexError."""
    key, _, rest = line.partition(":")
    fields = rest.split()
    if len(fields) == 2 and fields[1] == "kB":
        return key, whole(fields[0]) * 1024
    if len(fields) == 1 and key.startswith("HugePages_"):  # pages, not bytes; /sys has them by size
        return None
    raise ValueError("not `key: amount kB`")


def rows_bytes(text: str, *keys: str) -> int | None:
    """Return the sum in bytes of the rows `keys`, None if there are none; raises ValueError."""
    rows = [parse_meminfo_line(line) for line in lines_of(text) if line.partition(":")[0] in keys]
    found = [row[1] for row in rows if row is not None]
    return sum(found) if found else None
