"""Reads limits, use and throttling of the control groups (v1 and v2) of the daemon and of the ranks it knows.

A container with a limit of 8 processors on a machine of 64 looks idle from outside and is stopped for half of every 100
ms inside.  Only `throttled` shows that; the machine's utilization does not.

The limit that counts is the tightest from the group up to the root: a pod may be limited where its container is not.
CPU limit and throttling are those of the tightest level; use is the group's own.

Two files give the folder of a group: /proc/PID/cgroup names the group below the root of its hierarchy, and
/proc/self/mountinfo says which part of a hierarchy is mounted where.  In a container that is often only its own part;
with the host's /sys mounted too, `cgroup_mounts` finds the path.  A group outside all mounts is left out.  If both
versions are mounted, a controller is in v1 if its hierarchy is listed, else in v2.

    v2   cpu.max  cpu.stat  memory.max  memory.current  memory.events
    v1   cpu.cfs_quota_us, cpu.cfs_period_us, cpu.stat  cpuacct.usage
         memory.limit_in_bytes, memory.usage_in_bytes, memory.failcnt, memory.oom_control

`cgroup_member_info` lists the ranks of each group, to join on: ranks of one container share a group and its numbers.
psutil does not know control groups.

Source: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, scheduler/sched-bwc.rst; cgroups(7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pacecar.kernel_files.cgroups import (
    V2,
    Levels,
    levels_of,
    parse_cgroup_line,
    parse_cpu_max,
    parse_flat_line,
    parse_memory_limit,
)
from pacecar.kernel_files.mounts import parse_mount
from pacecar.kernel_files.reader import KernelFiles, whole
from pacecar.records import Outcome

from .cgroup_mounts import CgroupMounts
from .source_reader import ParsedLines, SourceReading

__all__ = ["CgroupCollector", "CgroupMember"]

CONTROLLERS = ("cpu", "cpuacct", "memory")
"""The v1 controllers that are read.  Two groups of one name may share some of them and not others."""

GROUPS_MAX = 64
"""Groups that are read, some ten files each.  A node has as many as it has containers with ranks."""


class CgroupMember(NamedTuple):
    """A process whose group is read: the daemon, or a rank of a job."""

    pid: str
    kind: str
    training_job: str = ""
    rank: str = ""
    launch: str = ""


class Mounted(NamedTuple):
    """A hierarchy, the part of it that is mounted, and where."""

    hierarchy: str
    root: str
    mountpoint: str


class CgroupLimit(NamedTuple):
    """A CPU limit, and the throttling counters of the level that has it."""

    cpus: float
    periods: int | None
    throttled_periods: int | None
    throttled_ns: int | None


class CgroupCollector:
    """Limits, use and throttling of the groups of the daemon and of the ranks that `members` names."""

    name = "cgroup"
    is_rarely_read = True

    def __init__(self, files: KernelFiles, members: Callable[[], Sequence[CgroupMember]]) -> None:
        self._files = files
        self._members = members
        self._view = CgroupMounts(files.proc / "self" / "root")
        self._mounts: ParsedLines[list[Mounted]] = ParsedLines()

    def collect(self) -> Outcome:
        """Read the groups of the daemon and of all known ranks, each group once."""
        reading = SourceReading(self._files)
        rows = reading.lines(self._files.proc / "self" / "mountinfo", parse_cgroup_mount, before=self._mounts)
        found_mounts = [mount for found in rows for mount in found]
        mounts = {mount.hierarchy: mount for mount in found_mounts}
        host = next((mount for mount in found_mounts if mount.hierarchy == V2 and mount.root.startswith("/..")), None)
        own = next((mount for mount in found_mounts if mount.hierarchy == V2 and mount.root == "/"), None)
        if host is not None and own is not None:
            mounts[V2] = Mounted(V2, "/", str(self._view.folder(host.mountpoint)))
        groups: dict[str, dict[str, str]] = {}
        for member in (CgroupMember("self", "daemon"), *self._members()):
            paths = self._paths(reading, member)
            if host is not None and own is not None and V2 in paths:
                path = self._view.outside(
                    paths.pop(V2), own_mountpoint=own.mountpoint, host_mountpoint=host.mountpoint, host_root=host.root
                )
                if path is not None:
                    paths[V2] = path
            if not paths:
                continue
            name = group_name(paths)
            if name not in groups and len(groups) >= GROUPS_MAX:
                reading.fail(f"groups beyond the first {GROUPS_MAX} left out, starting with {name}")
                break
            if any(groups.setdefault(name, paths).get(one) != paths.get(one) for one in CONTROLLERS):
                reading.fail(f"/proc/{member.pid}/cgroup: left out, because another group is called {name!r}")
                continue
            labels = (member.kind, member.training_job, member.launch, member.rank)
            reading.add("pacecar_cgroup_member_info", 1, name, *labels)
        for name, paths in groups.items():
            self._cpu(reading, name, mounts, paths)
            self._memory(reading, name, mounts, paths)
        return reading.outcome()

    def _paths(self, reading: SourceReading, member: CgroupMember) -> dict[str, str]:
        """Return hierarchy -> path of the group; empty, which is healthy, if the process has ended."""
        rows = reading.lines(self._files.proc / member.pid / "cgroup", parse_cgroup_line)
        return {hierarchy: path for found in rows for hierarchy, path in found}

    def _levels(self, mounts: dict[str, Mounted], paths: dict[str, str], controller: str) -> tuple[bool, Levels]:
        """Return whether `controller` is in v1, and the group's levels; none if it is outside all mounts."""
        is_v1 = controller in paths and controller in mounts
        mount, path = mounts.get(controller if is_v1 else V2), paths.get(controller if is_v1 else V2)
        if mount is None or path is None:
            return is_v1, ()
        return is_v1, levels_of(self._files.sys / mount.mountpoint.removeprefix("/sys/"), mount.root, path)

    def _cpu(self, reading: SourceReading, name: str, mounts: dict[str, Mounted], paths: dict[str, str]) -> None:
        is_v1, levels = self._levels(mounts, paths, "cpu")
        failures = reading.failures
        limit_of = _limit_v1 if is_v1 else _limit_v2
        limits = [limit for level in levels if (limit := limit_of(reading, level)) is not None]
        if limits and reading.failures == failures:  # an unread level may be tighter
            limit = min(limits, key=lambda limit: limit.cpus)
            reading.add("pacecar_cgroup_cpu_limit_cpus", limit.cpus, name)
            _add(reading, name, "pacecar_cgroup_cpu_periods_total", limit.periods)
            _add(reading, name, "pacecar_cgroup_cpu_throttled_periods_total", limit.throttled_periods)
            _add(reading, name, "pacecar_cgroup_cpu_throttled_seconds_total", limit.throttled_ns)
        is_v1, levels = self._levels(mounts, paths, "cpuacct")
        for own in levels[:1]:
            if is_v1:
                used_ns = reading.parsed(own / "cpuacct.usage", whole)
            else:
                used_ns = _microseconds(_table(reading, own / "cpu.stat").get("usage_usec"))
            _add(reading, name, "pacecar_cgroup_cpu_seconds_total", used_ns)

    def _memory(self, reading: SourceReading, name: str, mounts: dict[str, Mounted], paths: dict[str, str]) -> None:
        is_v1, levels = self._levels(mounts, paths, "memory")
        failures = reading.failures
        file = "memory.limit_in_bytes" if is_v1 else "memory.max"
        limits = [limit for level in levels if (limit := reading.parsed(level / file, parse_memory_limit)) is not None]
        if reading.failures == failures:
            _add(reading, name, "pacecar_cgroup_memory_limit_bytes", min(limits, default=None))
        for own in levels[:1]:
            used = reading.parsed(own / ("memory.usage_in_bytes" if is_v1 else "memory.current"), whole)
            _add(reading, name, "pacecar_cgroup_memory_used_bytes", used)
            events = _table(reading, own / ("memory.oom_control" if is_v1 else "memory.events"))
            hits = reading.parsed(own / "memory.failcnt", whole) if is_v1 else events.get("max")
            _add(reading, name, "pacecar_cgroup_memory_limit_hits_total", hits)
            _add(reading, name, "pacecar_cgroup_oom_kills_total", events.get("oom_kill"))


def _add(reading: SourceReading, name: str, metric: str, value: float | None) -> None:
    if value is not None:
        reading.add(metric, value, name)


def _table(reading: SourceReading, path: Path) -> dict[str, int]:
    return dict(reading.lines(path, parse_flat_line))


def _microseconds(count: int | None) -> int | None:
    return None if count is None else count * 1000


def _limit_v2(reading: SourceReading, level: Path) -> CgroupLimit | None:
    cpus = reading.parsed(level / "cpu.max", parse_cpu_max)
    if cpus is None:
        return None
    stat = _table(reading, level / "cpu.stat")
    return CgroupLimit(
        cpus, stat.get("nr_periods"), stat.get("nr_throttled"), _microseconds(stat.get("throttled_usec"))
    )


def _limit_v1(reading: SourceReading, level: Path) -> CgroupLimit | None:
    quota = reading.parsed(level / "cpu.cfs_quota_us", parse_quota)
    period = reading.parsed(level / "cpu.cfs_period_us", whole)
    if quota is None or not period:
        return None
    stat = _table(reading, level / "cpu.stat")
    return CgroupLimit(quota / period, stat.get("nr_periods"), stat.get("nr_throttled"), stat.get("throttled_time"))


def group_name(paths: dict[str, str]) -> str:
    """Return the path that people use for the group: that of v2, or of memory if v1 has the controllers."""
    for hierarchy in ("memory", "cpu", V2):
        if hierarchy in paths:
            return paths[hierarchy]
    return next(iter(paths.values()))


def parse_cgroup_mount(line: str) -> list[Mounted] | None:
    """Return the hierarchies of a line of mountinfo, None for other file systems; raises ValueError or IndexError."""
    mount = parse_mount(line)
    names = {"cgroup2": (V2,), "cgroup": mount.options}.get(mount.kind)
    return None if names is None else [Mounted(name, mount.root, mount.mountpoint) for name in names]


def parse_quota(line: str) -> int | None:
    """Return microseconds of a period, None for -1, which means no limit; raises ValueError."""
    return None if line.strip() == "-1" else whole(line.strip())
