"""Finds the container, pod and Slurm job of each rank and of each process on a GPU.

A pid means nothing an hour later, and identity labels would multiply every series.  So there is one info series per
process and rank, to join on.  It is collected on the collector's thread; a scrape only looks it up.

Results are kept for KEPT_SECONDS, because pids are reused and processes can be moved.  A tick reads at most
READS_PER_TICK processes, and PROCESSES_MAX are kept; a series counts those left out.  A departed rank is kept as long
as the daemon keeps its job.

The kubelet's pod-resources socket (gRPC) is not used.  It reports the pod that a GPU was assigned to, but without uid,
container or process, so it is wrong for shared GPUs; and it needs root and a gRPC library as heavy as the daemon.  The
kubelet's log folders contain the names that cgroup paths lack.

Source: proc(5), cgroups(7); the forms of paths and folders in `jobs/cgroup_identity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.kernel_files.cgroups import parse_cgroup_line
from pacecar.kernel_files.reader import KernelFiles
from pacecar.records import JobHello, Outcome, Snapshot

from ..jobs.cgroup_identity import CgroupIdentity, PodName, Residence, membership_of, parse_pod_folder, reside
from .source_reader import SourceReading

__all__ = ["IdentityCollector", "gpu_processes"]

PROCESSES_MAX = 2048
"""Processes kept, some 200 bytes each: two for each rank of a full job table."""

READS_PER_TICK = 256
"""Processes read in one tick, one file each; further new ones are read at the next tick."""

KEPT_SECONDS = 60
PODS_MAX = 1024
"""Pods of a node: Kubernetes recommends 110 and supports several hundred."""

PODS_SECONDS = 10
"""Seconds between two checks of the kubelet's folders while a pod is unknown."""

Key = tuple[str, str, int, int]
"""(job, launch, rank, when it attached) of a rank; ("", "", 0, pid) of any other process."""


@dataclass
class _Entry:
    membership: CgroupIdentity | None
    residence: Residence
    read_ns: int
    seen_ns: int


class IdentityCollector:
    """Finds and keeps where processes run.

    `members` returns (pid, hello) of the ranks, `others` the pids of other processes.
    """

    name = "identity"

    def __init__(
        self,
        files: KernelFiles,
        clock: Clock,
        members: Callable[[], Sequence[tuple[int, JobHello]]],
        others: Callable[[], Iterable[int]],
        *,
        pod_logs: str = "/var/log/pods",
        forget_seconds: float = 900.0,
    ) -> None:
        self._files = files
        self._clock = clock
        self._members = members
        self._others = others
        self._pod_logs = Path(pod_logs)
        self._forget_ns = int(forget_seconds * NS_PER_SECOND)
        self._kept: dict[Key, _Entry] = {}
        self._pods: dict[str, PodName] = {}
        self._pods_ns: int | None = None

    def residence(self, hello: JobHello) -> Residence:
        """Return where a rank runs, as far as known.  From any thread; reads no file."""
        entry = self._kept.get(_key(hello))
        return reside(None, {}, hello) if entry is None else entry.residence

    def collect(self) -> Outcome:
        """Read the processes that are new or were read too long ago."""
        now = self._clock.monotonic_ns()
        reading = SourceReading(self._files)
        ranks = dict(self._members())
        left_out = 0
        reads = READS_PER_TICK
        for pid, hello in (*ranks.items(), *((pid, None) for pid in self._others() if pid not in ranks)):
            key = ("", "", 0, pid) if hello is None else _key(hello)
            entry = self._kept.get(key)
            if entry is None and len(self._kept) >= PROCESSES_MAX and not self._make_room(now):
                left_out += 1
                continue
            if (entry is None or now - entry.read_ns >= KEPT_SECONDS * NS_PER_SECOND) and reads > 0:
                reads -= 1
                membership = self._read(reading, pid)
                entry = self._kept[key] = _Entry(membership, Residence(), now, now)
            if entry is None:
                continue
            entry.seen_ns = now
            self._find_pod(reading, entry, hello, now)
            _add_info(reading, pid, hello, entry.residence)
        for key in [key for key, entry in self._kept.items() if now - entry.seen_ns >= self._forget_ns]:
            del self._kept[key]
        reading.add("pacecar_processes_left_out", left_out)
        return reading.outcome()

    def _read(self, reading: SourceReading, pid: int) -> CgroupIdentity | None:
        """Return the kernel's answer; None if the process has ended, or belongs to another user."""
        rows = reading.lines(self._files.proc / str(pid) / "cgroup", parse_cgroup_line)
        return membership_of(path for found in rows for _, path in found) if rows else None

    def _find_pod(self, reading: SourceReading, entry: _Entry, hello: JobHello | None, now: int) -> None:
        uid = None if entry.membership is None else entry.membership.pod_uid
        is_due = self._pods_ns is None or now - self._pods_ns >= PODS_SECONDS * NS_PER_SECOND
        if uid is not None and uid not in self._pods and is_due:
            self._pods_ns = now
            found = (parse_pod_folder(name) for name in reading.names(self._pod_logs) or ())
            self._pods = dict([pod for pod in found if pod is not None][:PODS_MAX])
        entry.residence = reside(entry.membership, self._pods, hello)

    def _make_room(self, now: int) -> bool:
        """Drop the process that was seen longest ago, unless this tick saw it; return whether one was dropped."""
        oldest = min(self._kept, key=lambda key: self._kept[key].seen_ns)
        if self._kept[oldest].seen_ns == now:
            return False
        del self._kept[oldest]
        return True


def gpu_processes(snapshot: Snapshot) -> set[int]:
    """Return the pids that hold GPU memory at a tick."""
    return {int(sample.labels[1]) for sample in snapshot.of("pacecar_gpu_process_memory_bytes")}


def _key(hello: JobHello) -> Key:
    return hello.job, hello.launch, hello.rank, hello.started_wall_ns


def _add_info(reading: SourceReading, pid: int, hello: JobHello | None, residence: Residence) -> None:
    job, launch, rank = ("", "", "") if hello is None else (hello.job, hello.launch, str(hello.rank))
    reading.add("pacecar_process_info", 1, str(pid), job, launch, rank, *residence)
