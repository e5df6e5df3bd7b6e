"""Keeps the jobs that train on this node, in bounded memory.

Counters are the hook's own totals, which every step record carries; dropped records or a restart of the daemon lose
nothing.  Switches, decisions and verdicts are counted here, as they arrive.

Jobs, ranks, recent decisions and the bytes of what a rank and a job sent are bounded.  A job that sends nothing for
`job_forget_seconds` is forgotten with all its series.  A job that is over is forgotten at once when its user starts
another of the same name.  Users share the table: `evictions` chooses which job or rank makes room for a newcomer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import HangVerdict, JobHello, JobRecord, Sample
from pacecar.records.job_identity import JobKey
from pacecar.wire import FrameError, Refusal

from ..catalog_sample import sample
from ..fault_containment import ContainedPart, FaultContainment
from ..ingest.command_routing import RankSteps
from ..recorder.triggers import TriggerPace
from .evictions import Displaced, Evictions, NoRoomError
from .silent_jobs import SilentJob
from .tracked_job import RANK_BYTES_MAX, JobView, TrackedJob, TrackedRank, label_bytes

__all__ = ["JobTable"]

MEETING_SECONDS = 1.0
"""How far ahead commands are placed: hooks look for them four times a second; the rest is for busy machines."""

LEAD_STEPS_MAX = 10_000
"""Upper bound of that lead: a job with steps of microseconds would never reach a later step."""


class JobTable:
    """All jobs of this node.  Not thread-safe: `DaemonState` holds the lock."""

    def __init__(
        self, clock: Clock, *, jobs_max: int, ranks_max: int, forget_ns: int, faults: FaultContainment | None = None
    ) -> None:
        self._clock = clock
        self._faults = faults or FaultContainment()
        self._jobs_max = jobs_max
        self._ranks_max = ranks_max
        self._forget_ns = forget_ns
        self._jobs: dict[JobKey, TrackedJob] = {}
        self._left_out = {"job": 0, "rank": 0}
        self._evictions = Evictions(self._jobs)

    def uid_of(self, key: JobKey) -> int | None:
        """Return the user of the job `key`; None if it is unknown."""
        job = self._jobs.get(key)
        return None if job is None else job.uid

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many jobs there are, and how many jobs and ranks were refused or evicted."""
        yield sample("pacecar_inbox_jobs", len(self))
        for what, count in self._left_out.items():
            yield sample("pacecar_inbox_left_out_total", count, what)
        for what, count in self._evictions.displaced.items():
            yield sample("pacecar_inbox_displaced_total", count, what)

    def limit(self, *, jobs_max: int, ranks_max: int, forget_ns: int) -> None:
        """Change the limits for newcomers."""
        self._jobs_max, self._ranks_max, self._forget_ns = jobs_max, ranks_max, forget_ns

    def __len__(self) -> int:
        return len(self._jobs)

    def view(self) -> tuple[JobView, ...]:
        """Return all current jobs, by name."""
        self.forget()
        now = self._clock.monotonic_ns()
        views = (self._view(key, now) for key in sorted(self._jobs))
        return tuple(view for view in views if view is not None)

    def _view(self, key: JobKey, now_ns: int) -> JobView | None:
        """Return the job `key`; None if a bug prevents it."""
        try:
            return self._jobs[key].view(now_ns)
        except Exception as error:  # noqa: BLE001  a bug with one job must not remove all others from the page
            self._faults.caught(ContainedPart.JOB, f"job {str(key)!r}", error)
            return None

    def rank_steps(self, key: JobKey) -> RankSteps:
        """Return the step that the ranks of the job `key` have reached, and a later one that all can still agree on.

        The later one is MEETING_SECONDS ahead of the furthest rank at the fastest pace seen, in the last step or on
        average: one long step (a checkpoint) does not predict the next.
        """
        job = self._jobs.get(key)
        ranks = [] if job is None else [rank for rank in job.ranks.values() if rank.connected]
        seen = [(rank.step, rank.step_ns) for rank in ranks if rank.step is not None and rank.step_ns is not None]
        if not seen:
            return RankSteps()
        now = self._clock.monotonic_ns()
        means = [step.totals.wall_ns // max(1, step.total_steps) for step, _ in seen]
        pace = max(1, min([*means, *(step.wall_ns for step, _ in seen)]))
        margin = round(MEETING_SECONDS * NS_PER_SECOND)
        ahead = max(step.step + (min(now - heard, margin) + margin) / pace for step, heard in seen)
        at = max(step.step for step, _ in seen)
        return RankSteps(at, at + 2 + min(LEAD_STEPS_MAX, math.ceil(ahead - at)), max(means))

    def paces(self) -> list[TriggerPace]:
        """Return the running jobs, with the time since any rank's latest step."""
        now = self._clock.monotonic_ns()
        paces: list[TriggerPace] = []
        for job in self._jobs.values():
            steps = [(r.step_ns, r.step) for r in job.ranks.values() if not r.is_over and r.step_ns is not None]
            if steps:
                heard_ns, step = max(steps, key=lambda one: one[0])
                paces.append(TriggerPace(str(job.key), now - heard_ns, 0 if step is None else step.wall_ns, job.uid))
        return paces

    def silent_jobs(self) -> list[SilentJob]:
        """Return the jobs of which no rank says anything."""
        now = self._clock.monotonic_ns()
        return [silent for job in self._jobs.values() if (silent := job.silent(now)) is not None]

    def add_verdict(self, key: JobKey, verdict: HangVerdict) -> None:
        """Record the daemon's own verdict on a job."""
        if (job := self._jobs.get(key)) is not None:
            job.health.record(verdict, self._clock.monotonic_ns())

    def forget(self) -> list[JobKey]:
        """Forget the jobs that sent nothing for too long, and return them."""
        now = self._clock.monotonic_ns()
        gone = [key for key, job in self._jobs.items() if now - job.heard_ns >= self._forget_ns]
        for key in gone:
            del self._jobs[key]
        return gone

    def record(
        self, record: JobRecord, *, hello: JobHello, uid: int, owner: int, size: int = 0
    ) -> tuple[Displaced, ...]:
        """Add a record from the connection `owner` of user `uid` that introduced itself by `hello`.

        `size` is the bytes of its frame.  Returns what was evicted for it.

        Raises:
            FrameError: LIMIT if there is no room for another job or rank, or for the record; IDENTITY if the job is
                another user's, or the rank has said hello on a newer connection.
        """
        now = self._clock.monotonic_ns()
        if size > RANK_BYTES_MAX:
            raise FrameError(Refusal.LIMIT, f"a record of {size} bytes is more than is kept of one rank")
        try:
            job, rank, displaced = self._find(hello, uid, owner, now)
        except NoRoomError as full:
            if isinstance(record, JobHello):  # count a rank once, however much it goes on to send
                self._left_out[full.kind] += 1
            raise
        if isinstance(record, JobHello):
            rank = self._register(job, rank, record, owner)
            rank.kept.keep("hello", size)
        elif rank.owner != owner:
            raise FrameError(Refusal.IDENTITY, f"rank {hello.rank} of job {hello.job!r} has a newer connection")
        job.heard_ns = rank.heard_ns = now
        job.add(record, rank, size, now)
        return displaced

    def leave(self, hello: JobHello, owner: int) -> bool:
        """Record that the connection `owner` is gone; return whether it left without a goodbye."""
        job = self._jobs.get(JobKey.of(hello))
        rank = job.ranks.get(hello.rank) if job is not None else None
        if rank is None or rank.owner != owner:
            return False
        rank.connected = False
        return "goodbye" not in rank.latest

    def _find(
        self, hello: JobHello, uid: int, owner: int, now: int
    ) -> tuple[TrackedJob, TrackedRank, tuple[Displaced, ...]]:
        """Return job and rank of `hello`, and what was evicted for them if they are new or were forgotten."""
        key = JobKey.of(hello)
        job = self._jobs.get(key)
        if job is not None and job.uid != uid:
            raise FrameError(Refusal.IDENTITY, f"job {str(key)!r} belongs to uid {job.uid}, not to uid {uid}")
        rank = job.ranks.get(hello.rank) if job is not None else None
        if job is not None and rank is not None:
            return job, rank, ()
        self.forget()
        if job is None:
            self._forget_predecessors(key, uid)
        displaced = self._evictions.make_room_for(hello, uid, self._jobs_max, self._ranks_max)
        job = self._jobs.setdefault(key, job or TrackedJob(key, uid, now))
        rank = job.ranks[hello.rank] = TrackedRank(hello, owner, now)
        return job, rank, tuple(displaced)

    def _register(self, job: TrackedJob, rank: TrackedRank, hello: JobHello, owner: int) -> TrackedRank:
        """Return the rank after a hello: the same attach continues, a new one starts from nothing."""
        if (rank.hello.pid, rank.hello.started_wall_ns) != (hello.pid, hello.started_wall_ns):
            rank = job.ranks[hello.rank] = TrackedRank(hello, owner, self._clock.monotonic_ns())
            job.health.leave(hello.rank)
        rank.label_bytes = label_bytes(hello)
        rank.hello, rank.owner, rank.connected = hello, owner, True
        rank.latest.pop("goodbye", None)
        return rank

    def _forget_predecessors(self, newcomer: JobKey, uid: int) -> None:
        """Forget earlier launches of the job `newcomer` by the same user that are over."""
        for key, job in list(self._jobs.items()):
            if key.job == newcomer.job and job.uid == uid and job.is_over:
                del self._jobs[key]
