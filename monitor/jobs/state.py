"""Holds the daemon's present state, the latest snapshot of the host and the jobs, behind one lock; values out.

Ticks and the socket server write, scrapes read.  A reader gets frozen values, so that it can take its time over them
and a slow scrape holds up nobody.

Left out on purpose: history.  Prometheus is the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Absent, Failed, JobHello, JobRecord, Ok, Sample, Snapshot
from pacecar.records.job_identity import JobKey

from ..catalog_sample import sample
from ..fault_containment import FaultContainment
from ..ingest.command_routing import RankSteps
from ..ingest.log_limiter import LogLimiter
from ..recorder.triggers import TriggerPace
from .evictions import Displaced
from .job_table import JobTable, JobView

__all__ = ["DaemonState"]

LINES_PER_MINUTE = 64
"""Jobs that are named when they are forgotten: a node's, at the end of a reservation."""

_OUTCOMES = {"ok": Ok, "absent": Absent, "failed": Failed}

_log = logging.getLogger(__name__)


class DaemonState:
    """The latest snapshot and the jobs.  All methods may be called from any thread."""

    def __init__(
        self,
        clock: Clock,
        *,
        jobs_max: int,
        ranks_max: int,
        job_forget_seconds: float,
        faults: FaultContainment | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._notices = LogLimiter(_log, LINES_PER_MINUTE, clock)
        self._snapshot: Snapshot | None = None
        forget_ns = int(job_forget_seconds * NS_PER_SECOND)
        self._jobs = JobTable(clock, jobs_max=jobs_max, ranks_max=ranks_max, forget_ns=forget_ns, faults=faults)

    def limit(self, *, jobs_max: int, ranks_max: int, job_forget_seconds: float) -> None:
        """Change the limits; what is there beyond them stays until it is over."""
        with self._lock:
            self._jobs.limit(jobs_max=jobs_max, ranks_max=ranks_max, forget_ns=int(job_forget_seconds * NS_PER_SECOND))

    def publish(self, snapshot: Snapshot) -> None:
        """Make `snapshot` the latest, and forget the jobs that sent nothing for too long."""
        with self._lock:
            self._snapshot = snapshot
            gone = self._jobs.forget()
        for key in gone:
            self._notices.tell(logging.INFO, "forgotten", "job %s: forgotten, it said nothing for too long", key)

    def snapshot(self) -> Snapshot | None:
        """Return the latest snapshot; None before the first tick."""
        with self._lock:
            return self._snapshot

    def jobs(self) -> tuple[JobView, ...]:
        """Return the jobs as they are now."""
        with self._lock:
            return self._jobs.view()

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many jobs there are, who found no room or made it, and how the latest tick went."""
        with self._lock:
            snapshot, of_jobs = self._snapshot, list(self._jobs.own_samples())
        yield from of_jobs
        if snapshot is not None:
            age_ns = max(0, self._clock.monotonic_ns() - snapshot.started_ns)
            yield sample("pacecar_daemon_snapshot_age_seconds", age_ns)
            yield from _tick_samples(snapshot)

    def paces(self) -> list[TriggerPace]:
        """Return the running jobs, with how long ago any rank ended a step."""
        with self._lock:
            return self._jobs.paces()

    def uid_of(self, key: JobKey) -> int | None:
        """Return whose the job `key` is; None: there is none."""
        with self._lock:
            return self._jobs.uid_of(key)

    def record(
        self, record: JobRecord, *, hello: JobHello, uid: int, owner: int, size: int = 0
    ) -> tuple[Displaced, ...]:
        """Take a record of `size` bytes and return what made room for it; raises FrameError as `JobTable.take`."""
        with self._lock:
            return self._jobs.record(record, hello=hello, uid=uid, owner=owner, size=size)

    def leave(self, hello: JobHello, owner: int) -> bool:
        """Note that the connection `owner` is gone; return whether it went without a goodbye."""
        with self._lock:
            return self._jobs.leave(hello, owner)

    def rank_steps(self, key: JobKey) -> RankSteps:
        """Return where the ranks of the job `key` on this node are, and a step that none has reached yet."""
        with self._lock:
            return self._jobs.rank_steps(key)


def _tick_samples(snapshot: Snapshot) -> Iterator[Sample]:
    yield sample("pacecar_daemon_tick_lateness_seconds", snapshot.lateness_ns)
    for collector, duration_ns in snapshot.durations_ns.items():
        yield sample("pacecar_collector_duration_seconds", duration_ns, collector)
    for collector, outcome in snapshot.outcomes.items():
        for word, kind in _OUTCOMES.items():
            yield sample("pacecar_collector_outcome", int(isinstance(outcome, kind)), collector, word)
