"""Finds stragglers: which rank is late, in what phase, from which cause, and since which step.

The slowest rank cannot be read off the step times: under synchronous training all ranks take equally long.  What
differs is how a rank fills the step.  Its *own* time is what it does not spend waiting for others, and a rank is late
in one range of steps when

    its own time exceeds the median of the others' by more than a bound, and
    the others wait longer than it does, by at least AGREEMENT of that excess

The bound is the largest of ABSOLUTE_NS, RELATIVE of the step, and NOISE_FACTOR times what 95 of 100 recent differences
between ranks of this job stayed under, waits for a processor left out.  The last raises the bound on a noisy machine
and makes being late by chance rare: `cusum.EXCEEDS_QUIET` is the rate that it is designed for.  A CUSUM (`cusum`) adds
up the evidence over ranges.  A finding names the rank and the phase in which the excess lies.  The end of a rank's
lateness is decided by the same test in the opposite direction.

Where windows saw communication in the forward (SyncBatchNorm, sharded parameters, pipelines), waiting hides there too.
Then forward counts as waiting like the tail, and is not a rank's own time in that comparison.  What such a rank
computes in its forward cannot be told from what it waits there, so slow compute in it is not named; nor is any other
rank for it.

A slow link makes all ranks wait alike, so no rank's own time shows it: see `link_diagnosis`.

Pure.  Left out: the words of a log line, and what to do about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .cusum import Cusum, excesses, median, upper
from .exchange.phase_sums_message import RankRange
from .link_diagnosis import LinkDiagnosis, Slow

__all__ = ["Cause", "LateRankFinding", "StragglerDetector"]

Cause = Literal["compute", "data_wait", "host", "optimizer", "checkpoint", "link", "throttled"]

ABSOLUTE_NS = 1_000_000
"""The least excess in a step that matters to anybody."""

RELATIVE = 0.10
"""The least excess as a ratio of the step; below it a rank is not worth a line in the log."""

AGREEMENT = 0.5
"""The share of the excess that the others must wait: measured separately, so that one clock's error is not enough."""

NOISE_FACTOR = 2.0
NOISE_QUANTILE = 0.95
HISTORY = 64
"""Ranges from which the noise is learnt: about 256 steps."""

WARMUP_RANGES = 4
"""Ranges before anybody can be named: the first steps allocate, compile and fill caches."""

CPU_WAIT_SHARE = 0.5
"""A rank that waits for a processor for this share of its excess does not compute slowly: its host is busy."""

STARVED_WEIGHT = 0.5
STARVED_SECONDS = 5.0
"""Now and then another program takes a rank's processor for seconds.  So such evidence must last twice as many ranges
as any other, and STARVED_SECONDS."""

_PARTS: Mapping[Cause, tuple[str, ...]] = {
    "compute": ("forward", "backward"),
    "data_wait": ("data_wait",),
    "host": ("overhead", "rest"),
    "optimizer": ("optimizer",),
    "checkpoint": ("checkpoint",),
}
_OWN = tuple(phase for parts in _PARTS.values() for phase in parts)
_HOST_TIMED: tuple[Cause, ...] = ("data_wait", "checkpoint")
"""The causes that host timers can see in a device job: there a forward ends when its kernels are launched."""


@dataclass(frozen=True, slots=True)
class LateRankFinding:
    """A rank that was found late, or no longer is.

    `phase` is where the excess lies; `excess_ns` is its mean per step over the late ranges, which is the job's cost.
    """

    rank: int
    cause: Cause
    phase: str
    since_step: int
    step: int
    excess_ns: int
    evidence: str
    has_ended: bool = False


@dataclass(slots=True)
class _PendingSignals:
    """One range in which a rank was late; `weight` (0..1) is its weight in the test."""

    phase: str
    excess_ns: int
    text: str
    said: Cause
    weight: float = 1.0


@dataclass(slots=True)
class _Suspect:
    """The evidence against one rank for one cause."""

    evidence: Cusum = field(default_factory=Cusum)
    since_step: int = 0
    excesses: list[int] = field(default_factory=list)
    last: _PendingSignals | None = None
    named: LateRankFinding | None = None


class StragglerDetector:
    """Tests the ranges of one job, one after the other."""

    def __init__(self, world_size: int) -> None:
        self._noise: deque[int] = deque(maxlen=HISTORY * world_size)
        self._held: list[list[int]] = [[] for _ in range(world_size)]
        self._link = LinkDiagnosis(world_size)
        self._suspects: dict[tuple[int, Cause], _Suspect] = {}
        self._epoch: int | None = None
        self._ranges = 0

    def judge(self, rows: Sequence[RankRange]) -> list[LateRankFinding]:
        """Test the rows of one range, in order of rank, at least two, and return new and ended findings.

        A range in which some rank has no undisturbed step is skipped.
        """
        medians = [row.medians for row in rows if row.medians is not None]
        if len(medians) < len(rows):
            return []
        if self._epoch != rows[0].epoch:  # knobs changed: the usual wait must be learnt anew
            self._link.forget()
            self._epoch = rows[0].epoch
        self._ranges += 1
        wall = median([m["wall"] for m in medians])
        bound = max(
            ABSOLUTE_NS, round(RELATIVE * wall), round(NOISE_FACTOR * (upper(self._noise, NOISE_QUANTILE) or 0))
        )
        of = _Range(rows, medians)
        late: dict[tuple[int, Cause], _PendingSignals] = {}
        for rank in range(len(rows)):
            found = _lateness(of, rank, bound)
            if found is not None:
                cause, late[rank, cause] = found
        slow = self._link.judge(rows, medians, is_anybody_late=bool(late))
        if slow is not None:
            late[slow.rank, "link"] = _of_link(slow)
        findings = self._judge(late, rows[0].first_step, rows[0].last_step)
        if not any(cause == "link" for _, cause in self._suspects):
            self._link.learn()
        self._learn(of.differences())
        return findings

    def _judge(self, late: Mapping[tuple[int, Cause], _PendingSignals], first: int, last: int) -> list[LateRankFinding]:
        if self._ranges <= WARMUP_RANGES:
            return []
        findings = []
        for key in late:
            self._suspects.setdefault(key, _Suspect())
        for key, suspect in list(self._suspects.items()):
            finding = _weigh(suspect, *key, late.get(key), first, last)
            if finding is not None:
                findings.append(finding)
            if suspect.evidence.is_clear:
                del self._suspects[key]
        return findings

    def _learn(self, differences: Sequence[int]) -> None:
        """Add to the noise by how much ranks exceed each other when no rank is named.

        Values of a rank under suspicion are held back: if it is cleared they are noise, if it is named they are
        dropped.
        """
        open_cases = {rank: suspect for (rank, cause), suspect in self._suspects.items() if cause != "link"}
        for rank, difference in enumerate(differences):
            held = self._held[rank]
            held.append(max(0, difference))
            if rank not in open_cases:
                self._noise.extend(held)
            if rank not in open_cases or open_cases[rank].named is not None:
                held.clear()


def _weigh(
    suspect: _Suspect, rank: int, cause: Cause, now: _PendingSignals | None, first: int, last: int
) -> LateRankFinding | None:
    if now is not None:
        if suspect.evidence.is_clear:
            suspect.since_step = first
            suspect.excesses.clear()
        suspect.last = now
        suspect.excesses.append(now.excess_ns)
        del suspect.excesses[:-HISTORY]
    change = suspect.evidence.add(now is not None, weight=now.weight if now is not None else 1.0)
    if change is None or suspect.last is None:
        return None
    mean = sum(suspect.excesses) // len(suspect.excesses)
    if change == "raised":
        said, phase, text = suspect.last.said, suspect.last.phase, suspect.last.text
        suspect.named = LateRankFinding(rank, said, phase, suspect.since_step, last, mean, text)
        return suspect.named
    ended, suspect.named = suspect.named, None
    if ended is None:
        return None
    return LateRankFinding(rank, ended.cause, ended.phase, ended.since_step, last, mean, ended.evidence, has_ended=True)


class _Range:
    """One range: by how much each rank exceeds the median of the others in sums of phases, each computed once."""

    def __init__(self, rows: Sequence[RankRange], medians: Sequence[Mapping[str, int]]) -> None:
        self.rows = rows
        self.waits = _waits(rows)
        self._medians = medians
        self._excesses: dict[tuple[str, ...], list[int]] = {}
        self._cpu_waits: list[int] | None = None

    def excesses(self, phases: tuple[str, ...]) -> list[int]:
        """Return the excess of each rank's sum of `phases`."""
        found = self._excesses.get(phases)
        if found is None:
            found = self._excesses[phases] = excesses([sum(map(m.__getitem__, phases)) for m in self._medians])
        return found

    def cpu_waits(self) -> list[int] | None:
        """Return how much longer per step each rank waited for a processor; None where any rank cannot tell."""
        if self._cpu_waits is None:
            ratios = [row.around.cpu_wait_ratio for row in self.rows]
            waits = [
                round(ratio * (row.wall_ns or 0))
                for ratio, row in zip(ratios, self.rows, strict=True)
                if ratio is not None
            ]
            self._cpu_waits = excesses(waits) if len(waits) == len(self.rows) else []
        return self._cpu_waits or None

    def differences(self) -> list[int]:
        """Return by how much each rank exceeds the others, less its known wait for a processor."""
        own = self.excesses(_own(self.waits[0]))
        waits = self.cpu_waits()
        return own if waits is None else [excess - max(0, wait) for excess, wait in zip(own, waits, strict=True)]


def _own(waits: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(phase for phase in _OWN if phase not in waits)


def _lateness(of: _Range, rank: int, bound: int) -> tuple[Cause, _PendingSignals] | None:
    """Return the cause for which `rank` was late, or None."""
    is_on_device = of.rows[rank].on_device
    for waits in of.waits:
        own = _own(waits)
        excess = of.excesses(own)[rank]
        if not is_on_device and (excess <= bound or -of.excesses(waits)[rank] < AGREEMENT * excess):
            continue
        by_cause = {
            cause: of.excesses(tuple(phase for phase in _PARTS[cause] if phase in own))[rank]
            for cause in (_HOST_TIMED if is_on_device else _PARTS)
        }
        cause = max(by_cause, key=lambda name: by_cause[name])
        if is_on_device:
            excess = by_cause[cause]
        if excess > bound and by_cause[cause] > bound / 2:
            phase = max(_PARTS[cause], key=lambda name: of.excesses((name,))[rank])
            return cause, _describe(of, rank, cause, phase, excess, bound)
    return None


def _waits(rows: Sequence[RankRange]) -> list[tuple[str, ...]]:
    """Return the phases in which others may wait, most likely first.

    `rest` may be the rank's own work, or a wait that the job does by itself (a barrier, a loss summed over ranks).
    """
    if any(row.waits_in_forward for row in rows):
        return [("tail", "forward"), ("tail", "forward", "rest")]
    return [("tail",), ("tail", "rest")]


def _describe(of: _Range, rank: int, cause: Cause, phase: str, excess: int, bound: int) -> _PendingSignals:
    """Describe the lateness of `rank`, and correct the cause where throttling or a busy host explains it."""
    row, text = of.rows[rank], f"{phase} {_ms(excess)} over the other ranks' median, bound {_ms(bound)}"
    waits = of.cpu_waits()
    waited = None if waits is None else waits[rank]
    others = [other.is_throttled for other in of.rows if other is not row]
    # At the limit of their power all devices throttle: that is not why this one is slower.
    if cause == "compute" and row.is_throttled and 2 * others.count(True) <= len(others):
        return _PendingSignals(phase, excess, text + "; its device holds its clocks down", "throttled")
    if waited is None or waited < CPU_WAIT_SHARE * excess:
        return _PendingSignals(phase, excess, text, cause)
    seconds = (row.medians or {})["wall"] * row.steps / 1e9
    text += f"; it waited {_ms(waited)} a step longer for a processor"
    return _PendingSignals(phase, excess, text, "host", weight=min(STARVED_WEIGHT, 3 * seconds / STARVED_SECONDS))


def _of_link(slow: Slow) -> _PendingSignals:
    text = f"all ranks wait {_ms(slow.excess_ns)} more a step and none does more by itself"
    text += f"; only rank {slow.rank}'s sockets are busy"
    return _PendingSignals("tail", slow.excess_ns, text, "link", weight=slow.weight)


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
