"""Reports stragglers, hangs, the job's ledger and what-if bounds: records for the sinks, one log line for a person."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median_high

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import HangSuspicion, JobHello, JobLedger, JobRecord, Straggler

from .exchange.phase_sums_message import PHASES, RankRange
from .exchange.totals import LedgerTotals
from .hang_detector import Suspicion
from .straggler_detector import LateRankFinding
from .what_if import JobWhatIf

__all__ = ["LEDGER_SECONDS", "RankReports"]

LEDGER_SECONDS = 1.0
"""Time between two records of the job's ledger: each carries the totals, and nobody scrapes faster."""

AGAIN_SECONDS = 10.0
"""Time between two records of a rank that is still late: a restarted daemon has not received the first."""

_log = logging.getLogger("pacecar")


class RankReports:
    """Makes the records and log lines of one rank's monitor."""

    def __init__(self, hello: JobHello, emit: Callable[[JobRecord], None], clock: Clock) -> None:
        self._hello = hello
        self._emit = emit
        self._clock = clock
        self._totals = {phase: 0 for phase in PHASES if phase != "wall"}
        self._steps = 0
        self._measured = 0
        self._said_ns: int | None = None
        self._unsaid: Sequence[RankRange] | None = None
        self._late: dict[tuple[int, str], LateRankFinding] = {}
        self._late_said_ns = 0
        self._ladder = JobWhatIf(hello.job, emit)

    def ledger(self, rows: Sequence[RankRange]) -> None:
        """Add one range of all ranks; emit the sums when a record is due.

        Steps that a rank did not measure count like the mean of those of the range that it did.
        """
        for row in rows:
            if not row.measured:
                continue
            self._measured += row.measured
            parts = {p: d * row.steps // row.measured for p, d in row.sums.items() if p != "wall"}
            for phase, duration in parts.items():
                self._totals[phase] += duration
        self._steps += rows[0].steps
        self._unsaid = rows
        now = self._clock.monotonic_ns()
        if self._said_ns is not None and now - self._said_ns < LEDGER_SECONDS * NS_PER_SECOND:
            return
        if now - self._late_said_ns >= AGAIN_SECONDS * NS_PER_SECOND:
            self._late_said_ns = now
            for finding in self._late.values():
                self._emit(self._record(finding))
        self._said_ns = now
        self._say_ledger(rows)

    def finish(self) -> None:
        """Emit the last sums."""
        if self._unsaid is not None:
            self._say_ledger(self._unsaid)

    def _say_ledger(self, rows: Sequence[RankRange]) -> None:
        paces = [row.wall_ns for row in rows if row.wall_ns is not None]
        if len(paces) < len(rows):
            return
        self._unsaid = None
        self._emit(
            JobLedger(
                job=self._hello.job,
                ranks=len(rows),
                step=rows[0].last_step,
                pace_ns=max(paces),
                median_ns=median_high(paces),
                total_steps=self._steps,
                total_wall_ns=sum(self._totals.values()),
                total_phases_ns=dict(self._totals),
                total_measured_steps=self._measured,
            )
        )

    def ladder(self, totals: Sequence[LedgerTotals | None]) -> None:
        """Add the ledgers of all ranks so far; emit the job's what-if bounds when they are due."""
        self._ladder.record(
            totals,
            now_ns=self._clock.monotonic_ns(),
            wall_ns=self._clock.wall_ns(),
            excesses_ns=[finding.excess_ns for finding in self._late.values()],
        )

    def straggler(self, finding: LateRankFinding) -> None:
        """Report that a rank is late, or no longer."""
        who = f"rank {finding.rank}"
        if finding.has_ended:
            self._late.pop((finding.rank, finding.cause), None)
            _log.warning("pacecar: %s is no longer late (%s); step %d", who, finding.cause, finding.step)
        else:
            self._late[finding.rank, finding.cause] = finding
            self._late_said_ns = self._clock.monotonic_ns()
            _log.warning(
                "pacecar: %s is late since step %d: %s costs %.1f ms a step (%s)",
                who, finding.since_step, finding.cause, finding.excess_ns / 1e6, finding.evidence,
            )  # fmt: skip
        self._emit(self._record(finding))

    def _record(self, finding: LateRankFinding) -> Straggler:
        return Straggler(
            job=self._hello.job,
            late_rank=finding.rank,
            cause=finding.cause,
            phase=finding.phase,
            since_step=finding.since_step,
            step=finding.step,
            wall_ns=self._clock.wall_ns(),
            excess_ns=finding.excess_ns,
            evidence=finding.evidence,
            ended=finding.has_ended,
        )

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
                "pacecar: rank %d may hang: no end of step %d for %.0f s; it is in %s%s%s",
                self._hello.rank, suspicion.step, seconds, suspicion.phase,
                f", at {stack}" if stack is not None else "",
                f"; last collective: {collective}" if collective is not None else "",
            )  # fmt: skip
        self._emit(
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
