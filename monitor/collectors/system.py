"""Reads the kernel and distribution, and resources that may run out: open files, threads, connections; and the clock.

None of it changes within seconds, so it is read at one tick in `CACHED_TICKS` and served at all of them.  The boot time
is in `cpu`, which reads /proc/stat anyway.

The distribution is that of the root file system of process 1 if that is readable, else our own.  In a container our own
would be the image's, so there it is empty, as it is if no file names it.

Left out: tables that only a router fills (neighbours, routes), and entropy, which kernels since 5.18 cannot run out of.

Source: Documentation/admin-guide/sysctl/{fs,kernel}.rst, Documentation/networking/nf_conntrack-sysctl.rst,
os-release(5).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from pacecar.kernel_files.reader import NOT_THERE, KernelFiles, lines_of, whole
from pacecar.records import Outcome, Sample

from ..catalog_sample import sample
from .clock_sync import ClockReader, read_clock
from .source_reader import CachedReading, SourceReading

__all__ = ["SystemCollector"]

CACHED_TICKS = 10
"""Ticks between two readings: a leak of files takes minutes, and a scrape comes every 5 to 15 s."""

OS_TICKS = 600
"""Ticks between two readings of kernel and distribution, which change at a boot or an upgrade."""

OS_RELEASE = Path("/etc/os-release")

COUNTS = {
    "net/netfilter/nf_conntrack_count": "pacecar_host_tracked_connections",
    "net/netfilter/nf_conntrack_max": "pacecar_host_tracked_connections_limit",
    "kernel/hung_task_detect_count": "pacecar_host_hung_tasks_total",
}
"""File below /proc/sys -> the metric of the number in it."""

TEXT_MAX = 64
"""Characters kept of a word of os-release, which becomes a label."""

REFUSED = NOT_THERE | {errno.EPERM, errno.EACCES, errno.ENOSYS}
"""Errors by which the kernel or a sandbox hides the clock's state, or the root of process 1."""


class OpenFiles(NamedTuple):
    """The contents of file-nr: open files of all processes, and their limit."""

    open: int
    limit: int


class SystemCollector:
    """Kernel and distribution, open files, the limit of threads, tracked connections, and the clock's state."""

    name = "system"

    def __init__(
        self,
        files: KernelFiles,
        *,
        clock: ClockReader = read_clock,
        os_release: Path = OS_RELEASE,
        architecture: str | None = None,
    ) -> None:
        self._files = files
        self._clock = clock
        self._os_release = os_release
        self._architecture = architecture or os.uname().machine
        self._samples: CachedReading[list[Sample]] = CachedReading(CACHED_TICKS)
        self._os: CachedReading[list[Sample]] = CachedReading(OS_TICKS // CACHED_TICKS)

    def collect(self) -> Outcome:
        """Read six short files and the clock's state, at one tick in CACHED_TICKS."""
        reading = SourceReading(self._files)
        reading.add_cached(self._samples, lambda: self._read(reading))
        return reading.outcome()

    def _read(self, reading: SourceReading) -> list[Sample]:
        kernel = self._files.proc / "sys"
        samples = list(self._os.get(reading, lambda: self._read_os(reading)))
        files = reading.parsed(kernel / "fs" / "file-nr", parse_file_nr)
        if files is not None:
            samples.append(sample("pacecar_host_open_files", files.open))
            samples.append(sample("pacecar_host_open_files_limit", files.limit))
        limits = [reading.parsed(kernel / "kernel" / name, whole) for name in ("pid_max", "threads-max")]
        known = [limit for limit in limits if limit is not None]
        if len(known) == len(limits):  # the lower one applies, so both are needed
            samples.append(sample("pacecar_host_threads_limit", min(known)))
        for name, metric in COUNTS.items():
            count = reading.parsed(kernel / name, whole)
            if count is not None:
                samples.append(sample(metric, count))
        return samples + self._read_clock(reading)

    def _read_clock(self, reading: SourceReading) -> list[Sample]:
        try:
            state = self._clock()
        except OSError as error:
            if error.errno in REFUSED:
                reading.note_missing(f"adjtimex: {error.strerror or error}")
            else:
                reading.fail(f"adjtimex: {error.strerror or error}")
            return []
        if state is None:
            return []
        return [
            sample("pacecar_host_clock_synchronized", int(state.is_synchronized)),
            sample("pacecar_host_clock_offset_seconds", state.offset_ns),
            sample("pacecar_host_clock_estimated_error_seconds", state.estimated_error_ns),
            sample("pacecar_host_clock_max_error_seconds", state.max_error_ns),
        ]

    def _read_os(self, reading: SourceReading) -> list[Sample]:
        kernel = reading.parsed(self._files.proc / "sys" / "kernel" / "osrelease", str.strip)
        if kernel is None:
            return []
        failures = reading.failures
        release = parse_os_release(self._os_release_text(reading))
        if reading.failures != failures:  # an empty distribution would be another series
            return []
        words = (release.get("ID", ""), release.get("VERSION_ID", ""))
        return [sample("pacecar_host_os_info", 1, kernel, self._architecture, *words)]

    def _os_release_text(self, reading: SourceReading) -> str:
        try:
            return self._files.read(self._files.proc / "1" / "root" / "etc" / "os-release")
        except OSError as error:
            if error.errno not in REFUSED:
                reading.fail(f"os-release of process 1: {error.strerror or error}")
        mounts = reading.text(self._files.proc / "self" / "mountinfo")
        # An overlay root belongs to an image.
        if mounts is None or any(" / / " in line and " - overlay " in line for line in lines_of(mounts)):
            return ""
        return reading.text(self._os_release) or ""


def parse_file_nr(line: str) -> OpenFiles:
    """Return the contents of /proc/sys/fs/file-nr; raises ValueError.

    The middle one of its three numbers, files allocated but not in use, is always 0 since Linux 2.6.
    """
    fields = line.split()
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} numbers, expected 3")
    return OpenFiles(whole(fields[0]) - whole(fields[1]), whole(fields[2]))


def parse_os_release(text: str) -> dict[str, str]:
    """Return the variables of an os-release file; other lines are skipped, as os-release(5) requires."""
    variables: dict[str, str] = {}
    for line in lines_of(text):
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            variables[name.strip()] = value.strip().strip("\"'")[:TEXT_MAX]
    return variables
