"""Reads the I/O counters of whole disks (/proc/diskstats) and the free space of local file systems (statvfs).

Partitions are left out: their I/O is in the disk's line already.  So are loop and RAM disks, which are memory or a
file on another disk.  Network file systems are left out too: statvfs on a server that is gone hangs, and with it the
reading of the local disks would hang.  Those that matter are named in [daemon] mounts, and each gets a collector
(and so a thread and a deadline) of its own.  /dev/shm is kept although it is memory, because data loaders die when
it is full.

A file system that the daemon may not reach (the kubelet's folders are root's) is healthy and has one series, which says
that nothing else is known of it.

/proc is read here and not through psutil: disk_partitions() gives no device numbers, without which a bind mount is
counted twice, and disk_usage() is statvfs without the inodes.

Source: Documentation/admin-guide/iostats.rst; a sector is 512 bytes there whatever the disk says; proc(5), mountinfo.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

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
"""What file systems without a fixed number of inodes say that do not say 0 (CephFS: how many are free)."""

REFUSED = frozenset({errno.EACCES, errno.EPERM})
"""Errors by which a folder on the way to a mount keeps the daemon out: the node is as it should be."""

_MEMORY_DISK = re.compile(r"(loop|ram|zram|fd|sr)\d+")
_ESCAPE = re.compile(r"\\([0-7]{3})")

Statvfs = Callable[[str], os.statvfs_result]


class Mount(NamedTuple):
    """One line of mountinfo, as far as we need it."""

    device: str
    root: str
    mountpoint: str
    kind: str
    source: str


class DiskCollector:
    """Disk counters and the free space of local file systems; those in `named` have a MountCollector each."""

    name = "disk"

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

    def close(self) -> None:
        """Nothing is held open."""

    def _disks(self, reading: SourceReading) -> None:
        rows: dict[str, tuple[str, list[str]]] = {}
        for where, line in reading.numbered(self._files.proc / "diskstats"):
            fields = line.split()
            if len(fields) < _COLUMNS_MIN:
                reading.fail(f"{where}: {len(fields)} fields where at least {_COLUMNS_MIN} are due in {line[:120]!r}")
            elif not _MEMORY_DISK.fullmatch(fields[2]) and rows.setdefault(fields[2], (where, fields))[1] is not fields:
                reading.fail(f"{where}: a second row of {fields[2]!r}")
        if not rows:
            return
        whole_disks = reading.names(self._files.sys / "block")
        if whole_disks is not None:  # in sysfs a slash in a device name is written "!"
            known = {name.replace("!", "/") for name in whole_disks}
            rows = {device: row for device, row in rows.items() if device in known}
        for device, (where, fields) in reading.first(list(rows.items()), DEVICES_MAX, "disks"):
            for column, metric, factor in _COLUMNS:
                reading.add_number(where, fields[column], metric, device, factor=factor)

    def _filesystems(self, reading: SourceReading) -> None:
        mountinfo = self._files.proc / "self" / "mountinfo"
        mounts = local_filesystems(reading.lines(mountinfo, parse_mountinfo_line, before=self._mounts))
        mounts = [mount for mount in mounts if mount.mountpoint not in self._named]
        for mount in reading.first(mounts, FILESYSTEMS_MAX, "file systems"):
            add_room(reading, mount.mountpoint, self._statvfs)


class MountCollector:
    """The free space of one file system that the user named, whatever kind it is."""

    def __init__(self, mountpoint: str, files: KernelFiles, *, statvfs: Statvfs = os.statvfs) -> None:
        self.name = f"mount {mountpoint}"
        self._mountpoint = mountpoint
        self._files = files
        self._statvfs = statvfs

    def collect(self) -> Outcome:
        """Ask the file system for its free space; hangs as long as its server does."""
        reading = SourceReading(self._files)
        add_room(reading, self._mountpoint, self._statvfs)
        outcome = reading.outcome()
        if isinstance(outcome, Ok) and reading.failures:  # that there is an error is all that was read
            return Failed(outcome.reason, outcome.samples)
        return outcome

    def close(self) -> None:
        """Nothing is held open."""


def add_room(reading: SourceReading, mountpoint: str, statvfs: Statvfs) -> None:
    """Add what `statvfs` says about the file system at `mountpoint`, and whether it said anything."""
    try:
        room = statvfs(mountpoint)
    except FileNotFoundError:  # unmounted since the list was read
        reading.lack(f"{mountpoint}: gone")
        return
    except OSError as error:
        reading.note_error(mountpoint, error, REFUSED)
        reading.add("pacecar_host_filesystem_error", 1, mountpoint)
        return
    reading.add("pacecar_host_filesystem_error", 0, mountpoint)
    reading.add("pacecar_host_filesystem_size_bytes", room.f_blocks * room.f_frsize, mountpoint)
    reading.add("pacecar_host_filesystem_available_bytes", room.f_bavail * room.f_frsize, mountpoint)
    if 0 < room.f_files < INODES_UNKNOWN:  # btrfs and some network file systems have no fixed number: 0 of 0
        reading.add("pacecar_host_filesystem_files", room.f_files, mountpoint)
        if room.f_favail != INODES_UNKNOWN:
            reading.add("pacecar_host_filesystem_files_free", room.f_favail, mountpoint)
    reading.add("pacecar_host_filesystem_read_only", int(room.f_flag & os.ST_RDONLY != 0), mountpoint)


def parse_mountinfo_line(line: str) -> Mount:
    """Return one mount; raises ValueError or IndexError."""
    before, dash, after = line.partition(" - ")
    if dash == "":
        raise ValueError("no ` - ` before the file system type")
    fields, tail = before.split(" "), after.split(" ")
    return Mount(fields[2], _unescape(fields[3]), _unescape(fields[4]), tail[0], _unescape(tail[1]))


def local_filesystems(mounts: list[Mount]) -> list[Mount]:
    """Return one mount for each local file system, by mount point: the whole one before a bind of a part of it."""
    chosen: dict[str, Mount] = {}
    on_top: dict[str, Mount] = {mount.mountpoint: mount for mount in mounts}  # a later mount hides an earlier one
    for mount in sorted(on_top.values(), key=lambda m: (m.root != "/", len(m.mountpoint), m.mountpoint)):
        overlay_root = mount.mountpoint == "/" and mount.kind == "overlay"
        if mount.source.startswith("/dev/") or overlay_root or mount.mountpoint == "/dev/shm":
            chosen.setdefault(mount.device, mount)
    return sorted(chosen.values(), key=lambda m: m.mountpoint)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
