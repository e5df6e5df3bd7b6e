"""Reads the I/O counters of whole disks (/proc/diskstats) and the free space of local file systems (statvfs).

Partitions are left out because the disk's line contains their I/O, loop and RAM disks because they are memory or a file
on another disk.  Network file systems are left out because statvfs hangs if their server is gone, and would block the
local disks.  A mount named in [daemon] mounts gets its own collector, and so its own thread and deadline.  /dev/shm is
kept although it is memory, because data loaders die when it is full.

A file system that the daemon may not access (the kubelet's folders are root's) is healthy, and has one series that says
that nothing else is known.

psutil is not used: disk_partitions() has no device numbers, so it counts a bind mount twice, and disk_usage() has no
inodes.

Source: Documentation/admin-guide/iostats.rst (a sector there is 512 bytes on every disk); proc(5), mountinfo.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection

from pacecar.kernel_files.mounts import Mount, parse_mount
from pacecar.kernel_files.reader import KernelFiles
from pacecar.records import Failed, Ok, Outcome

from .source_reader import ParsedLines, SourceReading

__all__ = ["DiskCollector", "MountCollector"]

SECTOR_BYTES = 512
NS_PER_MS = 1_000_000
DEVICES_MAX = 256
FILESYSTEMS_MAX = 64

_COLUMNS = (
    (3, "pacecar_host_disk_reads_total", 1),
    (5, "pacecar_host_disk_read_bytes_total", SECTOR_BYTES),
    (7, "pacecar_host_disk_writes_total", 1),
    (9, "pacecar_host_disk_written_bytes_total", SECTOR_BYTES),
    (12, "pacecar_host_disk_busy_seconds_total", NS_PER_MS),
    (6, "pacecar_host_disk_read_seconds_total", NS_PER_MS),
    (10, "pacecar_host_disk_write_seconds_total", NS_PER_MS),
    (13, "pacecar_host_disk_queue_seconds_total", NS_PER_MS),
    (11, "pacecar_host_disk_requests_in_flight", 1),
)
"""Column of diskstats, its metric, and the inside unit in one of the kernel's."""

_COLUMNS_MIN = 14
"""Up to the queue; newer kernels appended discards and flushes."""

INODES_UNKNOWN = 2**64 - 1
"""Reported instead of 0 by some file systems without a fixed number of inodes (CephFS: how many are free)."""

REFUSED = frozenset({errno.EACCES, errno.EPERM})
"""Errors of a folder above the mount that the daemon may not enter: the node is fine."""

_MEMORY_DISK = re.compile(r"(loop|ram|zram|fd|sr)\d+")

Statvfs = Callable[[str], os.statvfs_result]


class DiskCollector:
    """Disk counters and the free space of local file systems; those in `named` have their own MountCollector."""

    name = "disk"
    is_rarely_read = True

    def __init__(self, files: KernelFiles, *, named: Collection[str] = (), statvfs: Statvfs = os.statvfs) -> None:
        self._files = files
        self._named = frozenset(named)
        self._statvfs = statvfs
        self._mounts: ParsedLines[Mount] = ParsedLines()

    def collect(self) -> Outcome:
        """Read diskstats, and ask each local file system for its free space."""
        reading = SourceReading(self._files)
        self._disks(reading)
        self._filesystems(reading)
        return reading.outcome()

    def _disks(self, reading: SourceReading) -> None:
        rows: dict[str, tuple[str, list[str]]] = {}
        for where, line in reading.numbered(self._files.proc / "diskstats"):
            fields = line.split()
            if len(fields) < _COLUMNS_MIN:
                reading.fail(f"{where}: {len(fields)} fields, expected at least {_COLUMNS_MIN}, in {line[:120]!r}")
            elif not _MEMORY_DISK.fullmatch(fields[2]) and rows.setdefault(fields[2], (where, fields))[1] is not fields:
                reading.fail(f"{where}: a second row of {fields[2]!r}")
        if not rows:
            return
        whole_disks = reading.names(self._files.sys / "block")
        if whole_disks is not None:  # sysfs writes "!" for a slash in a device name
            known = {name.replace("!", "/") for name in whole_disks}
            rows = {device: row for device, row in rows.items() if device in known}
        for device, (where, fields) in reading.first(list(rows.items()), DEVICES_MAX, "disks"):
            for column, metric, factor in _COLUMNS:
                reading.add_number(where, fields[column], metric, device, factor=factor)

    def _filesystems(self, reading: SourceReading) -> None:
        mountinfo = self._files.proc / "self" / "mountinfo"
        mounts = local_filesystems(reading.lines(mountinfo, parse_mount, before=self._mounts))
        mounts = [mount for mount in mounts if mount.mountpoint not in self._named]
        for mount in reading.first(mounts, FILESYSTEMS_MAX, "file systems"):
            add_filesystem(reading, mount.mountpoint, self._statvfs)


class MountCollector:
    """The free space of one file system of any kind that the user named."""

    def __init__(self, mountpoint: str, files: KernelFiles, *, statvfs: Statvfs = os.statvfs) -> None:
        self.name = f"mount {mountpoint}"
        self._mountpoint = mountpoint
        self._files = files
        self._statvfs = statvfs

    def collect(self) -> Outcome:
        """Ask the file system for its free space; hangs as long as its server does."""
        reading = SourceReading(self._files)
        add_filesystem(reading, self._mountpoint, self._statvfs)
        outcome = reading.outcome()
        if isinstance(outcome, Ok) and reading.failures:  # only the error was read
            return Failed(outcome.reason, outcome.samples)
        return outcome


def add_filesystem(reading: SourceReading, mountpoint: str, statvfs: Statvfs) -> None:
    """Add what `statvfs` reports about the file system at `mountpoint`, and whether it could be read."""
    try:
        room = statvfs(mountpoint)
    except FileNotFoundError:  # unmounted since the list was read
        reading.note_missing(f"{mountpoint}: gone")
        return
    except OSError as error:
        reading.note_error(mountpoint, error, REFUSED)
        reading.add("pacecar_host_filesystem_error", 1, mountpoint)
        return
    reading.add("pacecar_host_filesystem_error", 0, mountpoint)
    reading.add("pacecar_host_filesystem_size_bytes", room.f_blocks * room.f_frsize, mountpoint)
    reading.add("pacecar_host_filesystem_available_bytes", room.f_bavail * room.f_frsize, mountpoint)
    if 0 < room.f_files < INODES_UNKNOWN:  # btrfs and some network file systems report 0 of 0
        reading.add("pacecar_host_filesystem_files", room.f_files, mountpoint)
        if room.f_favail != INODES_UNKNOWN:
            reading.add("pacecar_host_filesystem_files_free", room.f_favail, mountpoint)
    reading.add("pacecar_host_filesystem_read_only", int(room.f_flag & os.ST_RDONLY != 0), mountpoint)


def local_filesystems(mounts: list[Mount]) -> list[Mount]:
    """Return one mount of each local file system, by mount point; a whole one before a bind mount of a part."""
    chosen: dict[str, Mount] = {}
    on_top: dict[str, Mount] = {mount.mountpoint: mount for mount in mounts}  # a later mount hides an earlier one
    for mount in sorted(on_top.values(), key=lambda m: (m.root != "/", len(m.mountpoint), m.mountpoint)):
        overlay_root = mount.mountpoint == "/" and mount.kind == "overlay"
        if mount.source.startswith("/dev/") or overlay_root or mount.mountpoint == "/dev/shm":
            chosen.setdefault(mount.device, mount)
    return sorted(chosen.values(), key=lambda m: m.mountpoint)
