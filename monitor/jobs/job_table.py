"""Keeps the jobs that train on this node, and the last record of each kind from each rank.

Counters are the hook's own totals, which travel in every step record; so records that were dropped on the way, or a
daemon that was restarted, lose nothing.  What is counted here (switches, decisions, verdicts) counts what arrived.

Everything is bounded: jobs, ranks, recent decisions, and the bytes of what a rank and a job sent.  A job that sends
nothing for `job_forget_seconds` is forgotten with all its series.  One that is over is forgotten at once when the same
user starts a job of that name again: what it leaves behind is of one launch.

Jobs and ranks are shared out among users: `evictions` chooses which makes room for a newcomer.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import (
    CollectiveWindow,
    Decision,
    EstimateCheck,
    Goodbye,
    HangSuspicion,
    JobHello,
    JobLedger,
    JobRecord,
    KnobSwitch,
    ProcessStop,
    Sample,
    StepRecord,
    Straggler,
    TunerOrder,
    TunerStatus,
    Verdict,
    Vitals,
    WhatIf,
)
from pacecar.records.final_totals import completed
from pacecar.records.job_identity import JobKey
from pacecar.wire import FrameError, Refusal

from ..catalog_sample import sample
from ..fault_containment import ContainedPart, FaultContainment
from ..histogram import DurationHistogram, Histogram
from ..ingest.command_routing import RankSteps
from ..recorder.triggers import TriggerPace
from .evictions import (  # fmt: skip
    JOB_BYTES_MAX,
    KEPT_OF_RANK,
    RANK_BYTES_MAX,
    Displaced,
    Evictions,
    Kept,
    NoRoomError,
    label_bytes,
)
from .rank_health import RankHealth, RankHealthView

__all__ = ["JobTable", "JobTally", "JobView", "RankView"]

RECENT_MAX = 32
"""Decisions and verdicts of a job that are kept to show; their counts go on."""

MEETING_SECONDS = 1.0
"""How far ahead commands are placed: hooks look for them four times a second; twice that, and as much again for a busy
machine."""

LEAD_STEPS_MAX = 10_000
"""Most steps ahead, however short they are: a job of microseconds would never get there."""

TALLIES_MAX = 256
"""Kinds of decision or verdict counted for one job; further kinds are not counted one by one."""

REASON_CHARACTERS_MAX = 400
"""Characters of a reason that are kept to show; a recording has all of it."""


class JobTally(msgspec.Struct, frozen=True):
    """How many decisions (or verdicts) on `knob` were of a kind (or had an outcome)."""

    knob: str
    what: str
    count: int


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as it was at one moment."""

    hello: JobHello
    connected: bool
    step: StepRecord | None
    step_age_ns: int | None
    switch: KnobSwitch | None
    switches: int
    goodbye: Goodbye | None
    vitals: Vitals | None = None
    check: EstimateCheck | None = None
    collectives: CollectiveWindow | None = None
    what_if: WhatIf | None = None


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job as it was at one moment; `orders` is action -> outcome -> how often a person gave it."""

    job: str
    launch: str
    uid: int
    ranks: tuple[RankView, ...]
    tuner: TunerStatus | None
    decisions: tuple[Decision, ...]
    verdicts: tuple[Verdict, ...]
    decision_tallies: tuple[JobTally, ...]
    verdict_tallies: tuple[JobTally, ...]
    expected_gain: dict[str, float]
    measured_gain: dict[str, float]
    crew: RankHealthView = RankHealthView()
    orders: dict[str, dict[str, int]] = {}
    forecast_error: dict[str, float] = {}
    what_if: WhatIf | None = None
    step_durations: Histogram | None = None

    @property
    def key(self) -> JobKey:
        """What tells this job from all others."""
        return JobKey(self.job, self.launch)


class _Rank:
    def __init__(self, hello: JobHello, owner: int, now_ns: int) -> None:
        self.began_ns = now_ns
        self.label_bytes = label_bytes(hello)
        self.hello = hello
        self.owner = owner
        self.connected = True
        self.step: StepRecord | None = None
        self.step_ns: int | None = None
        self.heard_ns: int | None = None
        self.switch: KnobSwitch | None = None
        self.switches = 0
        self.goodbye: Goodbye | None = None
        self.vitals: Vitals | None = None
        self.check: EstimateCheck | None = None
        self.collectives: CollectiveWindow | None = None
        self.what_if: WhatIf | None = None
        self.kept = Kept("rank", RANK_BYTES_MAX)

    @property
    def is_over(self) -> bool:
        return self.goodbye is not None or not self.connected

    def view(self, now_ns: int) -> RankView:
        return RankView(
            hello=self.hello,
            connected=self.connected,
            step=self.step,
            step_age_ns=None if self.step_ns is None else now_ns - self.step_ns,
            switch=self.switch,
            switches=self.switches,
            goodbye=self.goodbye,
            vitals=self.vitals,
            check=self.check,
            collectives=self.collectives,
            what_if=self.what_if,
        )


class _Job:
    def __init__(self, key: JobKey, uid: int, now_ns: int) -> None:
        self.key = key
        self.uid = uid
        self.heard_ns = now_ns
        self.ranks: dict[int, _Rank] = {}
        self.began_ns = now_ns
        self.kept = Kept("job", JOB_BYTES_MAX)
        self.crew = RankHealth()
        self.what_if: WhatIf | None = None
        self.step_durations = DurationHistogram()
        self.tuner: TunerStatus | None = None
        self.decisions: deque[Decision] = deque(maxlen=RECENT_MAX)
        self.verdicts: deque[Verdict] = deque(maxlen=RECENT_MAX)
        self.decision_tallies: Counter[tuple[str, str]] = Counter()
        self.verdict_tallies: Counter[tuple[str, str]] = Counter()
        self.order_tallies: Counter[tuple[str, str]] = Counter()
        self.expected_gain: dict[str, float] = {}
        self.measured_gain: dict[str, float] = {}
        self.forecast_error: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        return all(rank.is_over for rank in self.ranks.values())

    @property
    def label_bytes(self) -> int:
        return sum(rank.label_bytes for rank in self.ranks.values())

    def decide(self, decision: Decision) -> None:
        self.decisions.append(_shortened(decision))
        _tally(self.decision_tallies, (decision.knob, decision.kind))
        if decision.expected_gain_ratio is not None and (decision.knob, decision.kind) in self.decision_tallies:
            self.expected_gain[decision.knob] = decision.expected_gain_ratio

    def judge(self, verdict: Verdict) -> None:
        self.verdicts.append(_shortened(verdict))
        _tally(self.verdict_tallies, (verdict.knob, verdict.outcome))
        if verdict.measured_gain_ratio is not None and (verdict.knob, verdict.outcome) in self.verdict_tallies:
            self.measured_gain[verdict.knob] = verdict.measured_gain_ratio
            for decision in self.decisions:
                if decision.decision == verdict.decision and decision.expected_gain_ratio is not None:
                    error = abs(decision.expected_gain_ratio - verdict.measured_gain_ratio)
                    self.forecast_error[verdict.knob] = error

    def view(self, now_ns: int) -> JobView:
        return JobView(
            job=self.key.job,
            launch=self.key.launch,
            uid=self.uid,
            ranks=tuple(self.ranks[rank].view(now_ns) for rank in sorted(self.ranks)),
            tuner=self.tuner,
            decisions=tuple(self.decisions),
            verdicts=tuple(self.verdicts),
            decision_tallies=tuple(JobTally(*key, count) for key, count in self.decision_tallies.items()),
            verdict_tallies=tuple(JobTally(*key, count) for key, count in self.verdict_tallies.items()),
            expected_gain=dict(self.expected_gain),
            measured_gain=dict(self.measured_gain),
            orders=_nested(self.order_tallies),
            forecast_error=dict(self.forecast_error),
            crew=self.crew.view(
                {
                    number: rank.heard_ns
                    for number, rank in self.ranks.items()
                    if rank.connected and rank.goodbye is None and rank.heard_ns is not None
                },
                now_ns,
            ),
            what_if=self.what_if,
            step_durations=self.step_durations.view(),
        )


R = TypeVar("R", Decision, Verdict)


def _shortened(record: R) -> R:
    if len(record.reason) <= REASON_CHARACTERS_MAX:
        return record
    return msgspec.structs.replace(record, reason=record.reason[:REASON_CHARACTERS_MAX])


def _tally(tallies: Counter[tuple[str, str]], key: tuple[str, str]) -> None:
    if key in tallies or len(tallies) < TALLIES_MAX:
        tallies[key] += 1


def _nested(tallies: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Return the counts as nested dictionaries, which JSON can hold."""
    nested: dict[str, dict[str, int]] = {}
    for (outer, inner), count in tallies.items():
        nested.setdefault(outer, {})[inner] = count
    return nested


class JobTable:
    """All jobs of this node.  Not safe for threads by itself: `DaemonState` holds the lock."""

    def __init__(
        self, clock: Clock, *, jobs_max: int, ranks_max: int, forget_ns: int, faults: FaultContainment | None = None
    ) -> None:
        self._clock = clock
        self._faults = faults or FaultContainment()
        self._jobs_max = jobs_max
        self._ranks_max = ranks_max
        self._forget_ns = forget_ns
        self._jobs: dict[JobKey, _Job] = {}
        self._left_out = {"job": 0, "rank": 0}
        self._places = Evictions(self._jobs)

    def uid_of(self, key: JobKey) -> int | None:
        """Return whose the job `key` is; None: there is none."""
        job = self._jobs.get(key)
        return None if job is None else job.uid

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many jobs there are, and how many jobs and ranks found no room or made room for others."""
        yield sample("pacecar_inbox_jobs", len(self))
        for what, count in self._left_out.items():
            yield sample("pacecar_inbox_left_out_total", count, what)
        for what, count in self._places.displaced.items():
            yield sample("pacecar_inbox_displaced_total", count, what)

    def limit(self, *, jobs_max: int, ranks_max: int, forget_ns: int) -> None:
        """Change the limits for newcomers."""
        self._jobs_max, self._ranks_max, self._forget_ns = jobs_max, ranks_max, forget_ns

    def __len__(self) -> int:
        return len(self._jobs)

    def view(self) -> tuple[JobView, ...]:
        """Return all jobs that are not forgotten, by name."""
        self.forget()
        now = self._clock.monotonic_ns()
        views = (self._view(key, now) for key in sorted(self._jobs))
        return tuple(view for view in views if view is not None)

    def _view(self, key: JobKey, now_ns: int) -> JobView | None:
        """Return the job `key`; None where a bug prevents it."""
        try:
            return self._jobs[key].view(now_ns)
        except Exception as error:  # noqa: BLE001  a bug with one job must not cost the page all others
            self._faults.caught(ContainedPart.JOB, f"job {str(key)!r}", error)
            return None

    def rank_steps(self, key: JobKey) -> RankSteps:
        """Return where the ranks of the job `key` are, and a step ahead of all that they will learn of in time.

        It lies MEETING_SECONDS ahead of the rank that is furthest, at the fastest pace that was seen: of the last
        step, and the mean of all, as one long step (a checkpoint) says nothing of the next.
        """
        job = self._jobs.get(key)
        seen = [] if job is None else [rank for rank in job.ranks.values() if rank.connected]
        told = [(rank.step, rank.step_ns) for rank in seen if rank.step is not None and rank.step_ns is not None]
        if not told:
            return RankSteps()
        now = self._clock.monotonic_ns()
        means = [step.totals.wall_ns // max(1, step.total_steps) for step, _ in told]
        pace = max(1, min([*means, *(step.wall_ns for step, _ in told)]))
        margin = round(MEETING_SECONDS * NS_PER_SECOND)
        ahead = max(step.step + (min(now - heard, margin) + margin) / pace for step, heard in told)
        at = max(step.step for step, _ in told)
        return RankSteps(at, at + 2 + min(LEAD_STEPS_MAX, math.ceil(ahead - at)), max(means))

    def paces(self) -> list[TriggerPace]:
        """Return the jobs that are running, with how long ago any rank ended a step."""
        now = self._clock.monotonic_ns()
        paces: list[TriggerPace] = []
        for job in self._jobs.values():
            steps = [(r.step_ns, r.step) for r in job.ranks.values() if not r.is_over and r.step_ns is not None]
            if steps:
                heard_ns, step = max(steps, key=lambda one: one[0])
                paces.append(TriggerPace(str(job.key), now - heard_ns, 0 if step is None else step.wall_ns, job.uid))
        return paces

    def forget(self) -> list[JobKey]:
        """Drop the jobs that sent nothing for too long, and return which."""
        now = self._clock.monotonic_ns()
        gone = [key for key, job in self._jobs.items() if now - job.heard_ns >= self._forget_ns]
        for key in gone:
            del self._jobs[key]
        return gone

    def record(
        self, record: JobRecord, *, hello: JobHello, uid: int, owner: int, size: int = 0
    ) -> tuple[Displaced, ...]:
        """Take a record from the connection `owner` of user `uid` that introduced itself by `hello`.

        `size` is that of its frame in bytes.  Returns what made room for it.

        Raises:
            FrameError: LIMIT when there is no room for another job or rank, or for the record; IDENTITY when the job is
                another user's, or the rank has said hello on a newer connection.
        """
        now = self._clock.monotonic_ns()
        left: list[Displaced] = []
        if size > RANK_BYTES_MAX:
            raise FrameError(Refusal.LIMIT, f"a record of {size} bytes is more than is kept of one rank")
        try:
            job, rank = self._enter(hello, uid, owner, now, left)
        except NoRoomError as full:
            if isinstance(record, JobHello):  # once a rank, however much it goes on to say
                self._left_out[full.kind] += 1
            raise
        if isinstance(record, JobHello):
            rank = self._register(job, rank, record, owner)
            rank.kept.keep("hello", size)
        elif rank.owner != owner:
            raise FrameError(Refusal.IDENTITY, f"rank {hello.rank} of job {hello.job!r} speaks on a newer connection")
        job.heard_ns = rank.heard_ns = now
        field = KEPT_OF_RANK.get(type(record))
        if field is not None and not (isinstance(record, WhatIf) and record.of_rank is None):
            rank.kept.keep(field, size)
        elif isinstance(record, WhatIf | TunerStatus | JobLedger):
            job.kept.keep(type(record).__name__, size)
        match record:
            case StepRecord():
                rank.step, rank.step_ns = record, now
                job.step_durations.observe(record.wall_ns)
            case Vitals():
                rank.vitals = record
            case EstimateCheck():
                rank.check = record
            case CollectiveWindow():
                rank.collectives = record
            case WhatIf(of_rank=None):
                job.what_if = record
            case WhatIf():
                rank.what_if = record
            case KnobSwitch():
                rank.switch = record
                rank.switches += 1
            case Decision():
                job.decide(record)
            case Verdict():
                job.judge(record)
            case TunerStatus():
                job.tuner = record
            case TunerOrder():
                _tally(job.order_tallies, (record.action, record.outcome))
            case Straggler() | JobLedger() | HangSuspicion():
                job.crew.record(record, now)
            case Goodbye():
                rank.goodbye = record
                rank.step = None if rank.step is None else completed(rank.step, record)
                job.crew.leave(hello.rank)
            case ProcessStop() | JobHello():  # a stop is in the rank's ledger, which comes with its step
                pass
        return tuple(left)

    def leave(self, hello: JobHello, owner: int) -> bool:
        """Note that the connection `owner` is gone; return whether it went without a goodbye."""
        job = self._jobs.get(JobKey.of(hello))
        rank = job.ranks.get(hello.rank) if job is not None else None
        if rank is None or rank.owner != owner:
            return False
        rank.connected = False
        return rank.goodbye is None

    def _enter(self, hello: JobHello, uid: int, owner: int, now: int, left: list[Displaced]) -> tuple[_Job, _Rank]:
        """Return job and rank of `hello`, made if need be: also for a job that was forgotten and sends again."""
        key = JobKey.of(hello)
        job = self._jobs.get(key)
        if job is not None and job.uid != uid:
            raise FrameError(Refusal.IDENTITY, f"job {str(key)!r} belongs to uid {job.uid}, not to uid {uid}")
        rank = job.ranks.get(hello.rank) if job is not None else None
        if job is not None and rank is not None:
            return job, rank
        self.forget()
        if job is None:
            self._forget_predecessor(key, uid)
        left += self._places.make_room_for(hello, uid, self._jobs_max, self._ranks_max)
        job = self._jobs.setdefault(key, job or _Job(key, uid, now))
        rank = job.ranks[hello.rank] = _Rank(hello, owner, now)
        return job, rank

    def _register(self, job: _Job, rank: _Rank, hello: JobHello, owner: int) -> _Rank:
        """Return the rank after a hello: the same attach goes on where it was, a new one starts anew."""
        same = (rank.hello.pid, rank.hello.started_wall_ns) == (hello.pid, hello.started_wall_ns)
        if not same:
            rank = job.ranks[hello.rank] = _Rank(hello, owner, self._clock.monotonic_ns())
            job.crew.leave(hello.rank)
        rank.label_bytes = label_bytes(hello)
        rank.hello, rank.owner, rank.connected, rank.goodbye = hello, owner, True, None
        return rank

    def _forget_predecessor(self, newcomer: JobKey, uid: int) -> None:
        """Forget the jobs of this name and user that are over: `newcomer` is their next start."""
        for key, job in list(self._jobs.items()):
            if key.job == newcomer.job and job.uid == uid and job.is_over:
                del self._jobs[key]
