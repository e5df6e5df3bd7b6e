"""Reports stragglers, hangs, the job's ledger and what-if bounds as records for the sinks and lines in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median_high

from msgspec import structs

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Cause, HangSuspicion, JobHello, JobLedger, JobRecord, Straggler

from ..hangs.hang_detector import Suspicion
from .exchange.ledger_sums import SUMMED_PHASES, LedgerSums
from .exchange.totals import LedgerTotals
from .what_if import WhatIfSchedule

__all__ = ["LEDGER_SECONDS", "RankReports"]

LEDGER_SECONDS = 1.0
"""Time between two records of the job's ledger.  Each carries the totals, and scrapes are no more frequent."""

REPEAT_SECONDS = 10.0
"""Time between two records of a rank that is still late, for a daemon that was restarted."""

_log = logging.getLogger("pacecar")


class RankReports:
    """Makes the records and log lines of one rank's monitor."""

    def __init__(
        self, hello: JobHello, emit: Callable[[JobRecord], None], clock: Clock, is_pipeline: Callable[[], bool]
    ) -> None:
        self._hello = hello
        self.emit = emit
        """Takes records."""
        self._clock = clock
        self._ledger_ns: int | None = None
        self._unreported: Sequence[LedgerSums] | None = None
        self._late: dict[tuple[int | None, Cause], Straggler] = {}
        self._repeated_ns = 0
        self._what_if = WhatIfSchedule(hello.job, None, emit, is_pipeline)

    def ledger(self, sums: Sequence[LedgerSums]) -> None:
        """Set the sums of all subgroups; emit them when a record is due."""
        self._unreported = sums
        now = self._clock.monotonic_ns()
        if self._ledger_ns is not None and now - self._ledger_ns < LEDGER_SECONDS * NS_PER_SECOND:
            return
        if now - self._repeated_ns >= REPEAT_SECONDS * NS_PER_SECOND:
            self._repeated_ns = now
            for late in self._late.values():
                self.emit(structs.replace(late, wall_ns=self._clock.wall_ns()))
        self._ledger_ns = now
        self._emit_ledger(sums)

    def finish(self) -> None:
        """Emit the last sums."""
        if self._unreported is not None:
            self._emit_ledger(self._unreported)

    def _emit_ledger(self, sums: Sequence[LedgerSums]) -> None:
        paces = [each.paces_ns for each in sums if each.paces_ns is not None]
        if len(paces) < len(sums):
            return
        self._unreported = None
        ranks = sum(each.ranks for each in sums)
        phases = [sum(durations) for durations in zip(*(each.phases_ns for each in sums), strict=True)]
        self.emit(
            JobLedger(
                job=self._hello.job,
                ranks=ranks,
                step=min(each.step for each in sums),
                pace_ns=max(slowest for slowest, _ in paces),
                median_ns=median_high(middle for _, middle in paces),
                total_steps=sum(each.ranks * each.steps for each in sums) // ranks,
                total_wall_ns=sum(phases),
                total_phases_ns=dict(zip(SUMMED_PHASES, phases, strict=True)),
                total_measured_steps=sum(each.measured_steps for each in sums),
            )
        )

    def what_if(self, totals: Sequence[LedgerTotals | None]) -> None:
        """Add the ledgers of all ranks so far; emit the job's what-if bounds when they are due."""
        self._what_if.record(
            totals,
            now_ns=self._clock.monotonic_ns(),
            wall_ns=self._clock.wall_ns(),
            stragglers=self._late.values(),
        )

    def straggler(self, late: Straggler) -> None:
        """Report that a rank is late, or no longer."""
        if late.ended:
            self._late.pop((late.late_rank, late.cause), None)
            _log.warning("pacecar: rank %s is no longer late (%s) at step %d", late.late_rank, late.cause, late.step)
        else:
            self._late[late.late_rank, late.cause] = late
            self._repeated_ns = self._clock.monotonic_ns()
            _log.warning(
                "pacecar: rank %s is late since step %d: %s costs %.1f ms a step (%s)",
                late.late_rank, late.since_step, late.cause, late.excess_ns / 1e6, late.evidence,
            )  # fmt: skip
        self.emit(late)

    def hang(
        self,
        suspicion: Suspicion,
        *,
        collective: str | None = None,
        sequence: int | None = None,
        stack: str | None = None,
    ) -> None:
        """Report that this rank may hang, or steps again."""
        seconds = suspicion.silent_ns / NS_PER_SECOND
        if suspicion.has_ended:
            _log.warning("pacecar: rank %d steps again after %.0f s", self._hello.rank, seconds)
        else:
            _log.warning(
                "pacecar: rank %d may hang: it has not ended step %d for %.0f s and is in %s%s%s",
                self._hello.rank, suspicion.step, seconds, suspicion.phase,
                f", at {stack}" if stack is not None else "",
                f"; last collective: {collective}" if collective is not None else "",
            )  # fmt: skip
        self.emit(
            HangSuspicion(
                job=self._hello.job,
                rank=self._hello.rank,
                step=suspicion.step,
                phase=suspicion.phase,
                wall_ns=self._clock.wall_ns(),
                silent_ns=suspicion.silent_ns,
                last_collective=collective,
                collectives=sequence,
                stack=stack,
                ended=suspicion.has_ended,
            )
        )
