"""Tracks late and hung ranks of a job: rank 0 reports on all ranks, and each rank on itself.

A straggler has a series only while it lasts; a counter keeps that there was one.  Rank 0 repeats its reports so that a
restarted daemon learns of them, and a repetition is not counted again.

When ranks suspect a hang, the culprit is often one that does not: a stopped process sends nothing, nor does one with a
blocked interpreter.  So ranks that have been silent since then are reported along with those that wait.  If the ranks
can ask each other, one of them sends a verdict as well, kept until the job goes on.  If no rank says anything, the
daemon may have a verdict of its own (`silent_jobs`), kept until one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Cause, HangSuspicion, HangVerdict, JobLedger, Sample, Straggler
from pacecar.records.job_identity import JobKey

from ..catalog_sample import sample

__all__ = ["STRAGGLERS_MAX", "RankHealth", "RankHealthView", "rank_health_samples"]

STRAGGLERS_MAX = 64
"""Late ranks kept of one job: each is a series, and a job with more has another problem."""

EVIDENCE_CHARACTERS_MAX = 400
"""Characters of the evidence on a late rank that are kept for display."""

RANKS_MAX = 1024
"""Ranks of one job whose hangs are counted."""

SILENT_SECONDS = 3.0
"""A rank is silent if it sent nothing for this long while others suspect a hang.  Ranks suspect one within a second of
each other, and their records take a quarter of a second to arrive."""


class RankHealthView(msgspec.Struct, frozen=True, kw_only=True):
    """The rank health of one job at one moment; `hangs` is rank -> (hangs so far, suspected now).

    `silent` is connected rank -> whether it is silent while others suspect a hang; empty if none does.  `collectives`
    is rank -> collectives that it has begun, for ranks that suspect a hang now and know the number.
    """

    stragglers: tuple[Straggler, ...] = ()
    named: dict[str, int] = {}
    ledger: JobLedger | None = None
    hangs: dict[int, tuple[int, bool]] = {}
    silent: dict[int, bool] = {}
    collectives: dict[int, int] = {}
    verdict: HangVerdict | None = None


class RankHealth:
    """Late ranks and suspected hangs of one job; bounded."""

    def __init__(self) -> None:
        self._late: dict[tuple[int | None, Cause], Straggler] = {}
        self._named: Counter[str] = Counter()
        self._ledger: JobLedger | None = None
        self._hangs: dict[int, tuple[int, bool]] = {}
        self._collectives: dict[int, int | None] = {}
        self._suspected_ns: int | None = None
        self._verdict: HangVerdict | None = None

    def record(self, record: Straggler | JobLedger | HangSuspicion | HangVerdict, now_ns: int) -> None:
        """Add one record."""
        match record:
            case JobLedger():
                self._ledger = record
            case HangSuspicion():
                count, _ = self._hangs.get(record.rank, (0, False))
                if record.rank in self._hangs or len(self._hangs) < RANKS_MAX:
                    self._hangs[record.rank] = (count + (not record.ended), not record.ended)
                    self._collectives[record.rank] = record.collectives
                self._note_suspicion(now_ns)
            case HangVerdict():
                before = self._verdict
                if not record.ended:
                    self._verdict = record
                elif before is not None and (before.rank is None) == (record.rank is None):
                    self._verdict = None
            case Straggler():
                key = (record.late_rank, record.cause)
                if record.ended:
                    self._late.pop(key, None)
                elif key in self._late or len(self._late) < STRAGGLERS_MAX:
                    self._named[record.cause] += key not in self._late
                    self._late[key] = msgspec.structs.replace(
                        record, evidence=record.evidence[:EVIDENCE_CHARACTERS_MAX]
                    )

    @property
    def has_verdict(self) -> bool:
        """Whether a rank has said why the job hangs."""
        return self._verdict is not None and self._verdict.rank is not None

    def leave(self, rank: int) -> None:
        """Record that `rank` left or restarted: it no longer hangs, and the reports of a rank 0 on others are over."""
        if rank in self._hangs:
            self._hangs[rank] = (self._hangs[rank][0], False)
            self._note_suspicion(None)
        if rank == 0:
            self._late.clear()
        if self._verdict is not None and self._verdict.rank == rank:
            self._verdict = None

    def _note_suspicion(self, now_ns: int | None) -> None:
        if not any(is_suspected for _, is_suspected in self._hangs.values()):
            self._suspected_ns = None
        elif self._suspected_ns is None:
            self._suspected_ns = now_ns

    def _silent(self, heard_ns: Mapping[int, int], now_ns: int) -> dict[int, bool]:
        since, long = self._suspected_ns, SILENT_SECONDS * NS_PER_SECOND
        if since is None:
            return {}
        return {
            rank: now_ns - since >= long and now_ns - last >= long and not self._hangs.get(rank, (0, False))[1]
            for rank, last in heard_ns.items()
        }

    def view(self, heard_ns: Mapping[int, int], now_ns: int) -> RankHealthView:
        """Return the current health; `heard_ns` is when each connected rank last sent a record.

        A killed rank can report neither a goodbye nor an end.  So a disconnected rank suspects no hang, and without
        rank 0 no rank is late.
        """
        return RankHealthView(
            stragglers=tuple(self._late.values()) if 0 in heard_ns else (),
            named=dict(self._named),
            ledger=self._ledger,
            verdict=self._verdict if self._verdict is not None and self._verdict.rank in {None, *heard_ns} else None,
            hangs={
                rank: (count, is_suspected and rank in heard_ns) for rank, (count, is_suspected) in self._hangs.items()
            },
            silent=self._silent(heard_ns, now_ns),
            collectives={
                rank: begun
                for rank, begun in self._collectives.items()
                if begun is not None and rank in heard_ns and self._hangs[rank][1]
            },
        )


def rank_health_samples(job: JobKey, health: RankHealthView) -> Iterator[Sample]:
    """Yield the series about late, hung and silent ranks of one job."""
    for late in health.stragglers:
        rank = "" if late.late_rank is None else str(late.late_rank)
        yield sample("pacecar_job_straggler_excess_seconds", late.excess_ns, *job, rank, late.cause)
    for cause, count in health.named.items():
        yield sample("pacecar_job_stragglers_total", count, *job, cause)
    for hung, (count, is_suspected) in health.hangs.items():
        yield sample("pacecar_job_hangs_total", count, *job, str(hung))
        yield sample("pacecar_job_hang_suspected", int(is_suspected), *job, str(hung))
    for behind, collectives in health.collectives.items():
        yield sample("pacecar_job_hang_collectives", collectives, *job, str(behind))
    for rank_number, is_silent in health.silent.items():
        yield sample("pacecar_job_hang_silent", int(is_silent), *job, str(rank_number))
    if (verdict := health.verdict) is not None:
        for culprit in list(dict.fromkeys(verdict.culprits))[:STRAGGLERS_MAX] or ("",):
            yield sample("pacecar_job_hang_verdict", 1, *job, str(culprit), verdict.kind.value)
    if health.ledger is not None:
        yield sample("pacecar_job_pace_seconds", health.ledger.pace_ns, *job)
        yield sample("pacecar_job_median_pace_seconds", health.ledger.median_ns, *job)
        for phase, duration in health.ledger.total_phases_ns.items():
            yield sample("pacecar_job_phase_seconds_total", duration, *job, phase)
