"""Holds the daemon's current state, the latest snapshot of the host and the jobs, behind one lock.

Ticks and the socket server write, scrapes read.  Readers get frozen values, so a slow scrape delays nothing.

Left out on purpose: history.  Prometheus is the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Absent, Failed, Ok, Sample, Snapshot

from ..catalog_sample import sample
from ..fault_containment import FaultContainment
from ..ingest.log_limiter import LogLimiter
from .job_table import JobTable

__all__ = ["DaemonState"]

LINES_PER_MINUTE = 64
"""Forgotten jobs named in the log: all of a node's at the end of a reservation."""

_OUTCOMES = {"ok": Ok, "absent": Absent, "failed": Failed}

_log = logging.getLogger(__name__)


P = ParamSpec("P")
T = TypeVar("T")


def _locked(method: Callable[Concatenate[JobTable, P], T]) -> Callable[Concatenate[DaemonState, P], T]:
    """Return a method that calls `method` of the job table under the lock."""

    @wraps(method)
    def call(self: DaemonState, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self._jobs, *args, **kwargs)

    return call


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

    jobs = _locked(JobTable.view)
    paces = _locked(JobTable.paces)
    uid_of = _locked(JobTable.uid_of)
    record = _locked(JobTable.record)
    leave = _locked(JobTable.leave)
    rank_steps = _locked(JobTable.rank_steps)
    silent_jobs = _locked(JobTable.silent_jobs)
    add_verdict = _locked(JobTable.add_verdict)

    def limit(self, *, jobs_max: int, ranks_max: int, job_forget_seconds: float) -> None:
        """Change the limits; existing jobs and ranks beyond them stay until they are over."""
        with self._lock:
            self._jobs.limit(jobs_max=jobs_max, ranks_max=ranks_max, forget_ns=int(job_forget_seconds * NS_PER_SECOND))

    def publish(self, snapshot: Snapshot) -> None:
        """Store the latest snapshot, and forget the jobs that sent nothing for too long."""
        with self._lock:
            self._snapshot = snapshot
            gone = self._jobs.forget()
        for key in gone:
            self._notices.tell(logging.INFO, "forgotten", "job %s: forgotten, it sent nothing for too long", key)

    def snapshot(self) -> Snapshot | None:
        """Return the latest snapshot; None before the first tick."""
        with self._lock:
            return self._snapshot

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many jobs there are, how many were refused or evicted, and how the latest tick went."""
        with self._lock:
            snapshot, of_jobs = self._snapshot, list(self._jobs.own_samples())
        yield from of_jobs
        if snapshot is not None:
            age_ns = max(0, self._clock.monotonic_ns() - snapshot.started_ns)
            yield sample("pacecar_daemon_snapshot_age_seconds", age_ns)
            yield from _tick_samples(snapshot)


def _tick_samples(snapshot: Snapshot) -> Iterator[Sample]:
    yield sample("pacecar_daemon_tick_lateness_seconds", snapshot.lateness_ns)
    for collector, duration_ns in snapshot.durations_ns.items():
        yield sample("pacecar_collector_duration_seconds", duration_ns, collector)
    for collector, outcome in snapshot.outcomes.items():
        for word, kind in _OUTCOMES.items():
            yield sample("pacecar_collector_outcome", int(isinstance(outcome, kind)), collector, word)
