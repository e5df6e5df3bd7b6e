"""Keeps the latest records about the whole job that this rank makes: ledger, late ranks, hang, tuner.

A `RecordSink`, which costs a dictionary access per record.
"""

from __future__ import annotations

from msgspec import structs

from pacecar.records import HangVerdict, JobLedger, JobRecord, Straggler, TunerStatus
from pacecar.records.job_orders import LATE_MAX, JobNews

from .two_looks import EVIDENCE_CHARACTERS_MAX, for_a_frame

__all__ = ["LatestNews"]


class LatestNews:
    """The sink; `news` may be called on any thread."""

    dropped = 0

    def __init__(self) -> None:
        self._latest: dict[type, JobRecord] = {}
        self._late: dict[tuple[object, object], Straggler] = {}

    def put(self, record: JobRecord) -> None:
        """Keep `record` if it is news."""
        kind = type(record)
        if kind in (JobLedger, HangVerdict, TunerStatus):
            self._latest[kind] = record
        elif isinstance(record, Straggler):
            late = {key: one for key, one in self._late.items() if key != (record.late_rank, record.cause)}
            if not record.ended:
                late[record.late_rank, record.cause] = record
            self._late = late

    def close(self, timeout_seconds: float) -> None:
        """Do nothing: nothing is delivered."""

    def news(self) -> JobNews | None:
        """Return what is known; None: nothing."""
        ledger, hang, tuner = (self._latest.get(kind) for kind in (JobLedger, HangVerdict, TunerStatus))
        is_over = isinstance(hang, HangVerdict) and hang.ended
        found = JobNews(
            ledger=ledger if isinstance(ledger, JobLedger) else None,
            late=tuple(_cut(late) for late in [*self._late.values()][-LATE_MAX:]),
            hang=for_a_frame(hang) if isinstance(hang, HangVerdict) and not is_over else None,
            tuner=tuner if isinstance(tuner, TunerStatus) else None,
        )
        return None if found == JobNews() else found


def _cut(late: Straggler) -> Straggler:
    return structs.replace(late, evidence=late.evidence[:EVIDENCE_CHARACTERS_MAX])
