"""Who is late in a job, and which rank may hang?  What rank 0's crew says of all ranks, and each rank of itself.

A straggler is a series while it lasts and gone afterwards; a counter remembers that there was one.  Rank 0 repeats what
lasts, so that a restarted daemon learns of it, and a repetition is not counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from pacecar.monitor.collectors.reading import sample
from pacecar.records import HangSuspicion, JobLedger, Sample, Straggler

__all__ = ["STRAGGLERS_MAX", "Crew", "CrewView", "crew_samples"]

STRAGGLERS_MAX = 64
"""Late ranks kept of one job: each is a series, and a job with more has another trouble."""

RANKS_MAX = 1024
"""Ranks of one job whose hangs are counted."""


class CrewView(msgspec.Struct, frozen=True, kw_only=True):
    """The crew of one job as it was at one moment; `hangs` is rank -> (hangs so far, suspected now)."""

    stragglers: tuple[Straggler, ...] = ()
    named: dict[str, int] = {}
    ledger: JobLedger | None = None
    hangs: dict[int, tuple[int, bool]] = {}


class Crew:
    """What one job's crew said; bounded."""

    def __init__(self) -> None:
        self._late: dict[tuple[int | None, str], Straggler] = {}
        self._named: Counter[str] = Counter()
        self._ledger: JobLedger | None = None
        self._hangs: dict[int, tuple[int, bool]] = {}

    def take(self, record: Straggler | JobLedger | HangSuspicion) -> None:
        """Take one record."""
        match record:
            case JobLedger():
                self._ledger = record
            case HangSuspicion():
                count, _ = self._hangs.get(record.rank, (0, False))
                if record.rank in self._hangs or len(self._hangs) < RANKS_MAX:
                    self._hangs[record.rank] = (count + (not record.ended), not record.ended)
            case Straggler():
                key = (record.late_rank, record.cause)
                if record.ended:
                    self._late.pop(key, None)
                elif key in self._late or len(self._late) < STRAGGLERS_MAX:
                    self._named[record.cause] += key not in self._late
                    self._late[key] = record

    def leave(self, rank: int) -> None:
        """Note that `rank` said goodbye: it hangs no longer, and rank 0 takes with it what it said of others."""
        if rank in self._hangs:
            self._hangs[rank] = (self._hangs[rank][0], False)
        if rank == 0:
            self._late.clear()

    def view(self) -> CrewView:
        """Return what is known now."""
        return CrewView(
            stragglers=tuple(self._late.values()),
            named=dict(self._named),
            ledger=self._ledger,
            hangs=dict(self._hangs),
        )


def crew_samples(job: str, crew: CrewView) -> Iterator[Sample]:
    """Yield the series of one job's crew."""
    for late in crew.stragglers:
        rank = "" if late.late_rank is None else str(late.late_rank)
        yield sample("pacecar_job_straggler_excess_seconds", late.excess_ns, job, rank, late.cause)
    for cause, count in crew.named.items():
        yield sample("pacecar_job_stragglers_total", count, job, cause)
    for hung, (count, is_suspected) in crew.hangs.items():
        yield sample("pacecar_job_hangs_total", count, job, str(hung))
        yield sample("pacecar_job_hang_suspected", int(is_suspected), job, str(hung))
    if crew.ledger is not None:
        yield sample("pacecar_job_pace_seconds", crew.ledger.pace_ns, job)
        yield sample("pacecar_job_median_pace_seconds", crew.ledger.median_ns, job)
        for phase, duration in crew.ledger.total_phases_ns.items():
            yield sample("pacecar_job_phase_seconds_total", duration, job, phase)
