"""Keeps the latest records about the whole job that this rank makes: ledger, late ranks, hang, tuner, its attempt.

A `RecordSink`, which costs a dictionary access per record.
"""

from __future__ import annotations

from msgspec import structs

from pacecar.clock import Clock
from pacecar.ledger.attempt_rows import row_between
from pacecar.ledger.attempts import Attempt, charge
from pacecar.records import HangVerdict, JobHello, JobLedger, JobRecord, StepRecord, Straggler, TunerStatus
from pacecar.records.job_orders import LATE_MAX, AttemptSoFar, JobNews

from .two_looks import EVIDENCE_CHARACTERS_MAX, for_a_frame

__all__ = ["LatestNews"]


class LatestNews:
    """The sink; `news` may be called on any thread."""

    dropped = 0

    def __init__(self, hello: JobHello, clock: Clock) -> None:
        self._hello = hello
        self._clock = clock
        self._first: StepRecord | None = None
        self._latest: dict[type, JobRecord] = {}
        self._late: dict[tuple[object, object], Straggler] = {}

    def put(self, record: JobRecord) -> None:
        """Keep `record` if it is news."""
        kind = type(record)
        if kind in (JobLedger, HangVerdict, TunerStatus):
            self._latest[kind] = record
        elif isinstance(record, StepRecord):
            self._latest[kind] = record
            self._first = self._first or record
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
            attempt=self._attempt() if self._hello.rank == 0 else None,
        )
        return None if found == JobNews() else found

    def _attempt(self) -> AttemptSoFar | None:
        """Return where the time of this attempt went; None before its first step has a record."""
        hello, first, last = self._hello, self._first, self._latest.get(StepRecord)
        if first is None or not isinstance(last, StepRecord):
            return None
        life = charge(
            [
                Attempt(
                    began_ns=hello.process_wall_ns or hello.started_wall_ns,
                    rows=[row for row in (row_between(None, first), row_between(first, last)) if row is not None],
                    ended_ns=self._clock.wall_ns(),
                    rendezvous_ns=hello.rendezvous_wall_ns,
                    is_failed=False,
                )
            ]
        )
        if life is None:
            return None
        return AttemptSoFar(
            attempt=hello.attempt,
            wall_ns=life.wall_ns,
            headings_ns={heading: length for heading, length in life.headings_ns.items() if length},
            global_step=last.global_step,
            unsaved_steps=None if last.saved_steps is None else max(0, last.total_steps - last.saved_steps),
        )


def _cut(late: Straggler) -> Straggler:
    return structs.replace(late, evidence=late.evidence[:EVIDENCE_CHARACTERS_MAX])
