"""Holds what the daemon knows of one job and its ranks: the latest record of each kind, counts, and recent decisions.

`JobTable` changes these objects under the lock of `DaemonState`; everyone else gets a frozen `JobView`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import msgspec

from pacecar.clock import NS_PER_SECOND
from pacecar.records import (
    CollectiveWindow,
    Decision,
    EstimateCheck,
    Goodbye,
    HangSuspicion,
    HangVerdict,
    JobHello,
    JobLedger,
    JobRecord,
    Knobs,
    KnobSwitch,
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

from ..histogram import DurationHistogram, Histogram
from .rank_health import RankHealth, RankHealthView
from .silent_jobs import SILENT_SECONDS, SILENT_STEPS, SilentJob, SilentRank

__all__ = ["JobView", "RankView", "TrackedJob", "TrackedRank", "label_bytes"]

RECENT_MAX = 32
"""Decisions and verdicts of a job that are kept for display; all are counted."""

TALLIES_MAX = 256
"""Kinds of decision, verdict or order counted for one job; further kinds are not counted."""

REASON_CHARACTERS_MAX = 400
"""Characters of a reason that are kept for display; a recording has all of it."""

RANK_BYTES_MAX = 16 * 1024
"""Encoded bytes of the records kept of one rank; usually four thousand."""

JOB_BYTES_MAX = 16 * 1024
"""Encoded bytes of the records kept of one job besides its ranks', decisions, verdicts and stragglers."""

SERIES_OF_A_RANK = 70
"""Roughly, the series of a rank that have the job's name as a label."""

LATEST_OF_RANK: dict[type, str] = {
    StepRecord: "step", Vitals: "vitals", EstimateCheck: "check", CollectiveWindow: "collectives", WhatIf: "what_if",
    KnobSwitch: "switch", Goodbye: "goodbye",
}  # fmt: skip
"""Type of record -> the field of `RankView` that holds the latest one."""

Tallies = dict[tuple[str, str], int]
R = TypeVar("R", Decision, Verdict)


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank at one moment."""

    hello: JobHello
    connected: bool
    step: StepRecord | None = None
    step_age_ns: int | None = None
    switch: KnobSwitch | None = None
    switches: int = 0
    goodbye: Goodbye | None = None
    vitals: Vitals | None = None
    check: EstimateCheck | None = None
    collectives: CollectiveWindow | None = None
    what_if: WhatIf | None = None

    @property
    def knobs(self) -> Knobs | None:
        """The newest knobs that the rank reported; it reports a switch before the first step under it."""
        reported = [record.knobs for record in (self.step, self.switch) if record is not None]
        return max(reported, key=lambda knobs: knobs.epoch, default=None)


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job at one moment.

    Tallies count decisions by (knob, kind), verdicts by (knob, outcome) and people's orders by (action, outcome).
    """

    job: str
    launch: str
    uid: int
    ranks: tuple[RankView, ...]
    tuner: TunerStatus | None = None
    decisions: tuple[Decision, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    decision_tallies: Tallies = {}
    verdict_tallies: Tallies = {}
    order_tallies: Tallies = {}
    expected_gain: dict[str, float] = {}
    measured_gain: dict[str, float] = {}
    forecast_error: dict[str, float] = {}
    health: RankHealthView = RankHealthView()
    what_if: WhatIf | None = None
    step_durations: Histogram | None = None

    @property
    def key(self) -> JobKey:
        """The job's unique key."""
        return JobKey(self.job, self.launch)


class _KeptBytes:
    """Counts the encoded bytes of the records kept of a rank or a job, by field."""

    def __init__(self, what: str, bytes_max: int) -> None:
        self._what = what
        self._bytes_max = bytes_max
        self._sizes: dict[str, int] = {}

    def keep(self, field: str, size: int) -> None:
        """Record that `field` now holds `size` bytes; raises FrameError (LIMIT) if the sum would be too large."""
        total = size + sum(kept for name, kept in self._sizes.items() if name != field)
        if total > self._bytes_max:
            raise FrameError(
                Refusal.LIMIT, f"{total} bytes of records to keep of one {self._what} is over {self._bytes_max}"
            )
        self._sizes[field] = size


class TrackedRank:
    """One rank; `owner` is the number of the connection that speaks for it."""

    def __init__(self, hello: JobHello, owner: int, now_ns: int) -> None:
        self.began_ns = now_ns
        self.label_bytes = label_bytes(hello)
        self.hello = hello
        self.owner = owner
        self.connected = True
        self.step_ns: int | None = None
        self.heard_ns: int | None = None
        self.switches = 0
        self.latest: dict[str, Any] = {}
        """The latest records, by `LATEST_OF_RANK`."""
        self.kept = _KeptBytes("rank", RANK_BYTES_MAX)

    @property
    def step(self) -> StepRecord | None:
        """The latest step."""
        step: StepRecord | None = self.latest.get("step")
        return step

    @property
    def is_over(self) -> bool:
        """Whether the rank said goodbye or is not connected."""
        return "goodbye" in self.latest or not self.connected

    def view(self, now_ns: int) -> RankView:
        """Return the rank as it is now."""
        age_ns = None if self.step_ns is None else now_ns - self.step_ns
        return RankView(
            hello=self.hello, connected=self.connected, step_age_ns=age_ns, switches=self.switches, **self.latest
        )


class TrackedJob:
    """One job."""

    def __init__(self, key: JobKey, uid: int, now_ns: int) -> None:
        self.key = key
        self.uid = uid
        self.heard_ns = now_ns
        self.ranks: dict[int, TrackedRank] = {}
        self.began_ns = now_ns
        self.health = RankHealth()
        self._kept = _KeptBytes("job", JOB_BYTES_MAX)
        self._what_if: WhatIf | None = None
        self._step_durations = DurationHistogram()
        self._tuner: TunerStatus | None = None
        self._decisions: deque[Decision] = deque(maxlen=RECENT_MAX)
        self._verdicts: deque[Verdict] = deque(maxlen=RECENT_MAX)
        self._decision_tallies: Tallies = {}
        self._verdict_tallies: Tallies = {}
        self._order_tallies: Tallies = {}
        self._expected_gain: dict[str, float] = {}
        self._measured_gain: dict[str, float] = {}
        self._forecast_error: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether all ranks are over."""
        return all(rank.is_over for rank in self.ranks.values())

    @property
    def label_bytes(self) -> int:
        """Roughly the bytes of all ranks' labels."""
        return sum(rank.label_bytes for rank in self.ranks.values())

    def add(self, record: JobRecord, rank: TrackedRank, size: int, now_ns: int) -> None:
        """Add a record of `rank`, of `size` encoded bytes; raises FrameError (LIMIT) if that is too much to keep."""
        is_of_job = isinstance(record, TunerStatus | JobLedger | HangVerdict) or (
            isinstance(record, WhatIf) and record.of_rank is None
        )
        if is_of_job:
            self._kept.keep(type(record).__name__, size)
        elif (field := LATEST_OF_RANK.get(type(record))) is not None:
            rank.kept.keep(field, size)
            rank.latest[field] = record
        match record:
            case StepRecord():
                rank.step_ns = now_ns
                self._step_durations.observe(record.wall_ns)
            case WhatIf(of_rank=None):
                self._what_if = record
            case KnobSwitch():
                rank.switches += 1
            case Decision():
                self._add_decision(record)
            case Verdict():
                self._add_verdict(record)
            case TunerStatus():
                self._tuner = record
            case TunerOrder():
                _count(self._order_tallies, (record.action, record.outcome))
            case Straggler() | JobLedger() | HangSuspicion() | HangVerdict():
                self.health.record(record, now_ns)
            case Goodbye():
                if rank.step is not None:
                    rank.latest["step"] = completed(rank.step, record)
                self.health.leave(rank.hello.rank)
            case _:  # kept above; a ProcessStop is in the rank's ledger, which comes with its step
                pass

    def _add_decision(self, decision: Decision) -> None:
        self._decisions.append(_shortened(decision))
        is_counted = _count(self._decision_tallies, (decision.knob, decision.kind))
        if is_counted and decision.expected_gain_ratio is not None:
            self._expected_gain[decision.knob] = decision.expected_gain_ratio

    def _add_verdict(self, verdict: Verdict) -> None:
        self._verdicts.append(_shortened(verdict))
        is_counted = _count(self._verdict_tallies, (verdict.knob, verdict.outcome))
        if is_counted and verdict.measured_gain_ratio is not None:
            self._measured_gain[verdict.knob] = verdict.measured_gain_ratio
            for decision in self._decisions:
                if decision.decision == verdict.decision and decision.expected_gain_ratio is not None:
                    error = abs(decision.expected_gain_ratio - verdict.measured_gain_ratio)
                    self._forecast_error[verdict.knob] = error

    def silent(self, now_ns: int) -> SilentJob | None:
        """Return the job if no rank of it has said anything for long, nor why it hangs, and not all are over."""
        silent_ns = now_ns - self.heard_ns
        here = [rank for rank in self.ranks.values() if "goodbye" not in rank.latest]
        steps = [step for rank in here if (step := rank.step) is not None]
        if self.is_over or not steps or self.health.has_verdict:
            return None
        longest_ns = max(step.wall_ns for step in steps)
        if silent_ns < max(SILENT_SECONDS * NS_PER_SECOND, SILENT_STEPS * longest_ns):
            return None
        ranks = [SilentRank(one.hello, None if one.step is None else one.step.step, not one.connected) for one in here]
        return SilentJob(self.key, self.uid, silent_ns, ranks)

    def view(self, now_ns: int) -> JobView:
        """Return the job as it is now."""
        heard_ns = {
            n: rank.heard_ns for n, rank in self.ranks.items() if not rank.is_over and rank.heard_ns is not None
        }
        return JobView(
            job=self.key.job,
            launch=self.key.launch,
            uid=self.uid,
            ranks=tuple(self.ranks[rank].view(now_ns) for rank in sorted(self.ranks)),
            tuner=self._tuner,
            decisions=tuple(self._decisions),
            verdicts=tuple(self._verdicts),
            decision_tallies=dict(self._decision_tallies),
            verdict_tallies=dict(self._verdict_tallies),
            order_tallies=dict(self._order_tallies),
            expected_gain=dict(self._expected_gain),
            measured_gain=dict(self._measured_gain),
            forecast_error=dict(self._forecast_error),
            health=self.health.view(heard_ns, now_ns),
            what_if=self._what_if,
            step_durations=self._step_durations.view(),
        )


def label_bytes(hello: JobHello) -> int:
    """Return roughly the bytes of a rank's labels over all its series."""
    of_rank = (hello.host, hello.device, hello.device_uuid, hello.backend, hello.framework, hello.pod_name)
    return SERIES_OF_A_RANK * len(hello.job.encode()) + sum(len(text.encode()) for text in of_rank if text is not None)


def _shortened(record: R) -> R:
    if len(record.reason) <= REASON_CHARACTERS_MAX:
        return record
    return msgspec.structs.replace(record, reason=record.reason[:REASON_CHARACTERS_MAX])


def _count(tallies: Tallies, key: tuple[str, str]) -> bool:
    """Count `key` unless there are too many others; return whether it was counted."""
    is_counted = key in tallies or len(tallies) < TALLIES_MAX
    if is_counted:
        tallies[key] = tallies.get(key, 0) + 1
    return is_counted
