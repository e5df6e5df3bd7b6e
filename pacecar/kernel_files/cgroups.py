"""Parses the control group of a process, and the limits and counters in a group's folder.

The tightest limit between the group and the root applies, hence `levels_of`.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel; cgroups(7).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from .reader import lines_of, whole

__all__ = [
    "V2",
    "Levels",
    "levels_of",
    "parse_cgroup_line",
    "parse_cpu_max",
    "parse_flat_line",
    "parse_memory_limit",
    "v2_group",
]

LEVELS_MAX = 32
"""Levels from a group to the root; Kubernetes has five."""

GROUPS_REMEMBERED = 256
"""Groups whose folders are cached."""

NO_LIMIT_BYTES = 1 << 62
"""v1 writes "no limit" as the largest multiple of the page size in 63 bits; no machine has half of that."""

V2 = ""
"""The name of the v2 hierarchy in /proc/PID/cgroup; those of v1 are named after their controllers."""

Levels = Sequence[Path]
"""The folders of a group and its parents, up to the mount point."""


def parse_cgroup_line(line: str) -> list[tuple[str, str]]:
    """Return (hierarchy, path) for each controller of a line of /proc/PID/cgroup; raises ValueError."""
    number, controllers, path = line.split(":", 2)
    whole(number)
    return [(name, path) for name in controllers.split(",")]


def v2_group(text: str) -> str | None:
    """Return the path of the v2 group in the text of /proc/PID/cgroup, if any."""
    return next((line[3:] for line in lines_of(text) if line.startswith("0::/")), None)


@lru_cache(maxsize=GROUPS_REMEMBERED)  # asked at every tick for each group, and a path is made for each level
def levels_of(top: Path, root: str, path: str) -> Levels:
    """Return the folders of the group `path` and its parents below `top`, where the subtree `root` is mounted.

    Empty if the group is outside that subtree, or outside our cgroup namespace (`/../..`).
    """
    root = root.rstrip("/")
    if ".." in path.split("/") or (path != root and not path.startswith(f"{root}/")):
        return ()
    parts = [part for part in path.removeprefix(root).split("/") if part]
    return tuple(top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))[:LEVELS_MAX]


def parse_flat_line(line: str) -> tuple[str, int]:
    """Return (key, count) of a flat keyed file; raises ValueError."""
    key, _, count = line.partition(" ")
    return key, whole(count)


def parse_cpu_max(line: str) -> float | None:
    """Return the processors that `quota period` allows, None for `max period`; raises ValueError or IndexError."""
    quota, period = line.split()
    if whole(period) == 0:
        raise ValueError("a period of 0")
    return None if quota == "max" else whole(quota) / whole(period)


def parse_memory_limit(line: str) -> int | None:
    """Return bytes, None for no limit; raises ValueError."""
    if line.strip() == "max":
        return None
    limit = whole(line.strip())
    return None if limit >= NO_LIMIT_BYTES else limit
