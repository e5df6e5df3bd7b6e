"""Keeps which ranks the job is told to be late: what the always-on detector says, and what cross-rank windows add.

A window's verdict confirms a name, corrects rank or cause, or names a rank that the timers cannot see.  It never
withdraws a name of the detector for nothing: the detector's own test does, and goes on meanwhile.  Another rank takes
its place only if that one explains at least EXPLAINED_RATIO of what it was said to cost.

The cause of a rank that both name: timers know clocks, garbage collections, the work of a step and waits for
processors, which no trace shows; and on a CPU job they know the passes of the model, which are `compute` as a whole.
There the detector's cause stands.  Otherwise the trace tells more.

Pure except for the report and the clock, which are passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from pacecar.analysis.reading.rank_window import WindowFinding, WindowVerdict
from pacecar.clock import Clock
from pacecar.records import Cause, Straggler

__all__ = ["NamedRanks"]

EXPLAINED_RATIO = 0.5

TIMED_ONLY = frozenset({Cause.THROTTLED, Cause.GC, Cause.IMBALANCE})
"""Causes of the detector that a trace calls something else."""

CERTAIN_ERRORS = 2.0
"""A rank that only a window names, beside one that costs more, must cost more than this many standard errors: pacecar's
own work in the recorded steps can make a rank look late by a few milliseconds."""

PHASES: dict[Cause, str] = {
    Cause.DATA_WAIT: "data_wait", Cause.CHECKPOINT: "checkpoint", Cause.OPTIMIZER_HOST: "optimizer",
}  # fmt: skip
"""The phase of a finding by its cause, where the cause tells; elsewhere "rest"."""

Key = tuple[int | None, Cause]

_log = logging.getLogger("pacecar")


class NamedRanks:
    """What is told of late ranks; `report` gets each record that changes it."""

    def __init__(self, job: str, report: Callable[[Straggler], None], clock: Clock, *, on_device: bool) -> None:
        self._job = job
        self._report = report
        self._clock = clock
        self._on_device = on_device
        self._detected: dict[Key, Straggler] = {}
        self._told: dict[Key, Straggler] = {}
        self._instead_of: dict[Key, frozenset[Key]] = {}
        """Names of windows, each with those of the detector that it was given in place of."""
        self._cleared: set[int | None] = set()
        """Ranks that the detector has cleared since the window under way was ordered."""

    def detected(self, changes: Sequence[Straggler]) -> bool:
        """Report what the detector says; return whether it names a rank anew."""
        for each in changes:
            key = (each.late_rank, each.cause)
            if not each.ended:
                self._detected[key] = each
                self._tell(each)
                continue
            self._detected.pop(key, None)
            self._cleared.add(each.late_rank)
            over = [other for other, whose in self._instead_of.items() if whose and not whose & self._detected.keys()]
            for other in {key, *over} & self._told.keys():
                self._take_back(other, each.step)
        return any(not each.ended for each in changes)

    def ordered(self) -> None:
        """Record that a window is ordered."""
        self._cleared.clear()

    def recovered(self, step: int) -> None:
        """Take back what only a window has named: the job is as fast again as before."""
        for key in [key for key, whose in self._instead_of.items() if not whose]:
            self._take_back(key, step)

    def judged(self, verdict: WindowVerdict, first_step: int) -> bool:
        """Report the verdict on the steps from `first_step` on; return whether it changed what is told."""
        before, last = set(self._told), first_step + max(verdict.steps, 1) - 1
        cleared = self._cleared - {rank for rank, _ in self._detected}
        found = self._findings(verdict, first_step, last)
        named = {key: late for key, late in found if late.late_rank not in cleared}
        if not named and verdict.doubt is not None:
            _log.info("pacecar: the recorded steps cannot tell which rank is late: %s", verdict.doubt)
            return False
        # A slow host or stage is not a rank that is fine.
        shared = {rank for found in verdict.findings if len(found.ranks) > 1 for rank in found.ranks}
        explained_ns = sum(late.excess_ns for late in named.values())
        ranks = {rank for rank, _ in named}
        for key, late in [*self._told.items()]:
            if key in named or key[0] in shared:
                continue
            is_explained = key[0] in ranks or explained_ns >= EXPLAINED_RATIO * late.excess_ns
            if key not in self._detected or (named and is_explained):
                self._take_back(key, last)
        for key, late in named.items():
            if key not in self._detected:
                self._instead_of[key] = frozenset(self._detected)
            self._tell(late)
        return set(self._told) != before

    def _tell(self, late: Straggler) -> None:
        self._told[late.late_rank, late.cause] = late
        self._report(late)

    def _take_back(self, key: Key, step: int) -> None:
        late = self._told.pop(key)
        self._instead_of.pop(key, None)
        self._report(structs.replace(late, ended=True, step=max(step, late.step), wall_ns=self._clock.wall_ns()))

    def _findings(self, verdict: WindowVerdict, first_step: int, last: int) -> Iterator[tuple[Key, Straggler]]:
        """Yield a record for each finding about one rank; stages, hosts and imbalance are the job's own shape.

        Where uneven work costs more than a rank's compute, the rank may just have had the longer sequences.
        """
        suspects, is_beside = {rank for rank, _ in self._detected}, False
        uneven_ns = max((found.saved_ns for found in verdict.findings if found.kind == "imbalance"), default=0)
        for found in verdict.findings:
            if found.cause == Cause.COMPUTE and found.saved_ns < uneven_ns:
                continue
            if found.kind in ("rank", "link") and len(found.ranks) == 1 and found.cause in set(Cause):
                is_certain = found.saved_ns > CERTAIN_ERRORS * found.error_ns
                if is_beside and not is_certain and found.ranks[0] not in suspects:
                    continue
                is_beside = True
                key = (found.ranks[0], self._cause(found))
                yield key, self._straggler(key, found, verdict, first_step, last)

    def _cause(self, found: WindowFinding) -> Cause:
        causes = [cause for rank, cause in self._detected if rank == found.ranks[0]]
        known = [cause for cause in causes if not self._on_device or cause in TIMED_ONLY]
        return Cause(found.cause) if not known or found.cause in causes else known[0]

    def _straggler(
        self, key: tuple[int, Cause], found: WindowFinding, verdict: WindowVerdict, first_step: int, last: int
    ) -> Straggler:
        rank, cause = key
        told = self._told.get((rank, cause))
        earliest = [late.since_step for (other, _), late in self._told.items() if other == rank]
        evidence = f"in {verdict.steps} steps that all ranks recorded it costs the job {found.saved_ns / 1e6:.1f} ms of"
        evidence += f" {verdict.wall_ns / 1e6:.1f} ms a step, give or take {found.error_ns / 1e6:.1f} ms"
        evidence += f"; {found.evidence}"
        return Straggler(
            job=self._job,
            late_rank=rank,
            cause=cause,
            phase=PHASES.get(cause, "rest") if told is None else told.phase,
            since_step=min(earliest, default=first_step),
            step=last,
            wall_ns=self._clock.wall_ns(),
            excess_ns=found.saved_ns,
            evidence=evidence,
        )
