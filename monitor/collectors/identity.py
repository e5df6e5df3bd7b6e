"""Finds the container, pod and Slurm job of each rank and of each process on a GPU.

A pid says nothing an hour later, and identity as a label of each series would multiply them all.  So identity is one
info series a process and one a rank, to join on.  It is found on the collector's own thread: a scrape only looks it up.

What was found is kept for KEPT_SECONDS and read anew then, because a pid is given to another process sooner or later
and a process can be moved.  At most READS_PER_TICK processes are read in a tick and PROCESSES_MAX kept; how many are
left out is a series.  A rank that went away is kept for as long as the daemon keeps its job.

The kubelet also reports which pod a GPU was given to, by gRPC (its pod-resources socket).  It is not asked: the answer
has neither uid nor container nor process, so it names the pod of a GPU and not of a process, is wrong where a GPU is
shared, and needs root and a gRPC library as heavy as the daemon.  The kubelet's log folders have the names that the
paths lack.

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
"""Processes read in one tick, a file each; new ones beyond that are read at the next tick."""

KEPT_SECONDS = 60
PODS_MAX = 1024
"""Pods of a node: Kubernetes recommends 110 and supports several hundred."""

PODS_SECONDS = 10
"""Seconds between two looks at the kubelet's folders, while a pod is unknown."""

Key = tuple[str, str, int, int]
"""(job, rank, when it attached) of a rank; ("", 0, pid) of a process that is none."""


@dataclass
class _Entry:
    membership: CgroupIdentity | None
    residence: Residence
    read_ns: int
    seen_ns: int


class IdentityCollector:
    """Finds and keeps where processes run.  `members` are (pid, hello) of the ranks, `others` pids of no known rank."""

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
        """Return where a rank runs, as far as it is known; reads nothing, from any thread."""
        entry = self._kept.get(_key(hello))
        return reside(None, {}, hello) if entry is None else entry.residence

    def collect(self) -> Outcome:
        """Read who is new, and who was read too long ago."""
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
            self._look_up(reading, entry, hello, now)
            _tell(reading, pid, hello, entry.residence)
        for key in [key for key, entry in self._kept.items() if now - entry.seen_ns >= self._forget_ns]:
            del self._kept[key]
        reading.add("pacecar_processes_left_out", left_out)
        return reading.outcome()

    def close(self) -> None:
        """Nothing is held open."""

    def _read(self, reading: SourceReading, pid: int) -> CgroupIdentity | None:
        """Return what the kernel says; None when the process has ended, or is not ours to see."""
        rows = reading.lines(self._files.proc / str(pid) / "cgroup", parse_cgroup_line)
        return membership_of(path for found in rows for _, path in found) if rows else None

    def _look_up(self, reading: SourceReading, entry: _Entry, hello: JobHello | None, now: int) -> None:
        uid = None if entry.membership is None else entry.membership.pod_uid
        is_due = self._pods_ns is None or now - self._pods_ns >= PODS_SECONDS * NS_PER_SECOND
        if uid is not None and uid not in self._pods and is_due:
            self._pods_ns = now
            found = (parse_pod_folder(name) for name in reading.names(self._pod_logs) or ())
            self._pods = dict([pod for pod in found if pod is not None][:PODS_MAX])
        entry.residence = reside(entry.membership, self._pods, hello)

    def _make_room(self, now: int) -> bool:
        """Drop the process that was not seen for longest, but none that was seen in this tick; return whether."""
        oldest = min(self._kept, key=lambda key: self._kept[key].seen_ns)
        if self._kept[oldest].seen_ns == now:
            return False
        del self._kept[oldest]
        return True


def gpu_processes(snapshot: Snapshot) -> set[int]:
    """Return the pids that hold memory of a GPU at a tick."""
    return {int(sample.labels[1]) for sample in snapshot.of("pacecar_gpu_process_memory_bytes")}


def _key(hello: JobHello) -> Key:
    return hello.job, hello.launch, hello.rank, hello.started_wall_ns


def _tell(reading: SourceReading, pid: int, hello: JobHello | None, residence: Residence) -> None:
    job, launch, rank = ("", "", "") if hello is None else (hello.job, hello.launch, str(hello.rank))
    reading.add("pacecar_process_info", 1, str(pid), job, launch, rank, *residence)
