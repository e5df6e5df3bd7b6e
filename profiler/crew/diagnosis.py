"""Who is late, at what, and since when?  Rows of all ranks in, findings out.

The slowest rank cannot be read off the step times: under synchronous training all ranks take equally long.  What
differs is how a rank fills the step.  Its *own* time is what it does not spend waiting for others, and a rank is late
in one range of steps when

    its own time exceeds the median of the others' by more than a bound, and
    the others wait longer than it does, by at least AGREEMENT of that excess

The bound is the largest of ABSOLUTE_NS, RELATIVE of the step, and NOISE_FACTOR times what 95 of 100 differences
between ranks of this job stayed under lately.  The last makes a noisy machine ask for more, and being late by chance
rare: EXCEEDS_QUIET is the rate that it is designed for.  `sequence` adds up evidence over ranges.  A finding names the
rank and the phase in which the excess lies; that lateness ended is decided by the same test the other way round.

A slow link makes everybody wait alike, so no rank's own time shows it.  It is the link when all ranks wait, longer than
they used to, and none is late.  The rank behind it is the one whose sockets are busy while the others' only wait (see
`sockets`).  Where sockets cannot tell, "link" is said and no rank; where they could tell and none stands out (a gloo
job) it was not the link, but for example a machine that is busy with something else.

Pure; left out: the words of a log line, and what to do about it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pacecar.profiler.crew.sequence import Evidence
from pacecar.profiler.crew.words import RankRange

__all__ = ["Cause", "Diagnosis", "Finding"]

Cause = Literal["compute", "data_wait", "host", "optimizer", "checkpoint", "link", "throttled"]

ABSOLUTE_NS = 1_000_000
"""Nobody cares about less in a step."""

RELATIVE = 0.10
"""Of the step; under it a rank is not worth a line in the log."""

AGREEMENT = 0.5
"""Of the excess that the others must show as waiting: measured apart, so that an error of one clock is not enough."""

NOISE_FACTOR = 2.0
NOISE_QUANTILE = 0.95
HISTORY = 64
"""Ranges from which the noise is learnt: about 256 steps."""

WARMUP_RANGES = 4
"""Ranges before anybody can be named: the first steps allocate, compile and fill caches."""

BUSY_RATIO_MIN = 0.3
BUSY_STANDS_OUT = 1.5
"""Sockets busy for so much of the time, and so much busier than any other rank's.  In a ring a neighbour has half."""

CPU_WAIT_SHARE = 0.5
"""Of the excess: a rank that waits so much longer for a processor does not compute slowly, it is on a busy host."""

_PARTS: Mapping[Cause, tuple[str, ...]] = {
    "compute": ("forward", "backward"),
    "data_wait": ("data_wait",),
    "host": ("overhead", "rest"),
    "optimizer": ("optimizer",),
    "checkpoint": ("checkpoint",),
}
_HOST_TIMED: tuple[Cause, ...] = ("data_wait", "checkpoint")
"""What host timers know of a device job; its forward ends when the kernels are launched."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank (None: not known which) that was found late, or is so no longer.

    `phase` holds the excess, `excess_ns` is its mean per step over the ranges in evidence, and the job's cost.
    """

    rank: int | None
    cause: Cause
    phase: str
    since_step: int
    step: int
    excess_ns: int
    evidence: str
    has_ended: bool = False


@dataclass(slots=True)
class _Late:
    """One range in which a rank was late."""

    cause: Cause
    phase: str
    excess_ns: int
    bound_ns: int
    is_throttled: bool | None
    cpu_wait_ns: int | None = None

    @property
    def is_starved(self) -> bool:
        """Most of the excess went by while the rank waited for a processor."""
        return self.cpu_wait_ns is not None and self.cpu_wait_ns >= CPU_WAIT_SHARE * self.excess_ns


@dataclass(slots=True)
class _Suspect:
    """What is held against one rank for one cause, or against the link."""

    evidence: Evidence = field(default_factory=Evidence)
    since_step: int = 0
    excesses: list[int] = field(default_factory=list)
    last: _Late | None = None
    votes: Counter[int] = field(default_factory=Counter)
    named: Finding | None = None


class Diagnosis:
    """Judges the ranges of one job, one after the other."""

    def __init__(self, world_size: int, *, sockets_tell: bool) -> None:
        self._sockets_tell = sockets_tell
        self._noise: deque[int] = deque(maxlen=HISTORY * world_size)
        self._held: list[list[int]] = [[] for _ in range(world_size)]
        self._common: deque[int] = deque(maxlen=HISTORY)
        self._own: deque[int] = deque(maxlen=HISTORY)
        self._suspects: dict[tuple[int | None, Cause], _Suspect] = {}
        self._epoch: int | None = None
        self._ranges = 0

    def hear(self, rows: Sequence[RankRange]) -> list[Finding]:
        """Take the rows of one range, in order of rank, of at least two, and return what is new."""
        if any(row.medians is None for row in rows):
            return []
        if self._epoch != rows[0].epoch:  # other knobs: what waiting is usual must be learnt anew
            self._common.clear()
            self._own.clear()
            self._epoch = rows[0].epoch
        self._ranges += 1
        medians = [row.medians or {} for row in rows]
        wall = _median([m["wall"] for m in medians])
        differences = [_difference(medians, rank) for rank in range(len(rows))]
        bound = self._bound(wall, self._noise)
        late = {}
        for rank, row in enumerate(rows):
            found = _lateness(medians, rank, bound, row)
            if found is not None:
                found.cpu_wait_ns = _cpu_wait(rows, rank)
                late[rank] = found
        first, last = rows[0].first_step, rows[0].first_step + rows[0].steps - 1
        findings = self._judge_ranks(late, first, last)
        findings += self._judge_link(rows, medians, wall, late, first, last)
        self._learn(differences)
        return findings

    # --- ranks --------------------------------------------------------------------------------------

    def _judge_ranks(self, late: Mapping[int, _Late], first: int, last: int) -> list[Finding]:
        if self._ranges <= WARMUP_RANGES:
            return []
        findings = []
        for late_rank, found in late.items():
            self._suspects.setdefault((late_rank, found.cause), _Suspect())
        for (rank, cause), suspect in list(self._suspects.items()):
            if rank is None:
                continue
            seen = late.get(rank)
            now = seen if seen is not None and seen.cause == cause else None
            suspect.last = now or suspect.last
            finding = self._weigh(suspect, rank, cause, now, first, last)
            if finding is not None:
                findings.append(finding)
            if suspect.evidence.is_clear:
                del self._suspects[rank, cause]
        return findings

    def _weigh(
        self, suspect: _Suspect, rank: int | None, cause: Cause, now: _Late | None, first: int, last: int
    ) -> Finding | None:
        if now is not None:
            if suspect.evidence.is_clear:
                suspect.since_step = first
                suspect.excesses.clear()
            suspect.excesses.append(now.excess_ns)
            del suspect.excesses[:-HISTORY]
        # Another program on the machine comes and goes: what is only that must last twice as long.
        change = suspect.evidence.add(now is not None, weight=0.5 if now is not None and now.is_starved else 1.0)
        if change == "raised":
            suspect.named = self._finding(suspect, rank, cause, last)
            return suspect.named
        if change == "lowered" and suspect.named is not None:
            ended, suspect.named = suspect.named, None
            mean = sum(suspect.excesses) // len(suspect.excesses)
            return Finding(
                ended.rank, ended.cause, ended.phase, ended.since_step, last, mean, ended.evidence, has_ended=True
            )
        return None

    def _finding(self, suspect: _Suspect, rank: int | None, cause: Cause, last: int) -> Finding:
        mean = sum(suspect.excesses) // len(suspect.excesses)
        if cause == "link" or suspect.last is None:
            standing_out = [r for r, votes in suspect.votes.items() if votes * 2 > len(suspect.excesses)]
            rank = standing_out[0] if standing_out else None
            text = f"all ranks wait {_ms(mean)} more a step and none does more by itself"
            text += f"; only rank {rank}'s sockets are busy" if rank is not None else ""
            return Finding(rank, "link", "tail", suspect.since_step, last, mean, text)
        now = suspect.last
        text = f"{now.phase} {_ms(now.excess_ns)} over the other ranks' median, bound {_ms(now.bound_ns)}"
        said = cause
        if cause == "compute" and now.is_throttled:
            said, text = "throttled", text + "; its device holds its clocks down"
        elif now.is_starved and now.cpu_wait_ns is not None:
            said, text = "host", text + f"; it waited {_ms(now.cpu_wait_ns)} a step longer for a processor"
        return Finding(rank, said, now.phase, suspect.since_step, last, mean, text)

    # --- the link -----------------------------------------------------------------------------------

    def _judge_link(
        self,
        rows: Sequence[RankRange],
        medians: Sequence[Mapping[str, int]],
        wall: int,
        late: Mapping[int, _Late],
        first: int,
        last: int,
    ) -> list[Finding]:
        if any(row.on_device for row in rows):
            return []  # host timers see no waiting there
        common, own = min(m["tail"] for m in medians), max(_own(m) for m in medians)
        # Nothing is usual before the first range: then only sockets can tell.
        usual, usual_own = (_median(self._common), _median(self._own)) if self._common else (0, own)
        bound = self._bound(wall, [abs(value - usual) for value in self._common])
        busiest = _stands_out([row.busy_ratio for row in rows])
        suspect = self._suspects.setdefault((None, "link"), _Suspect())
        growth = common - usual
        is_slow = growth > bound and not late
        if busiest is None:
            is_slow = is_slow and bool(self._common) and own - usual_own < growth / 2 and not self._sockets_tell
        findings = []
        if self._ranges > WARMUP_RANGES:
            if is_slow and busiest is not None:
                suspect.votes[busiest] += 1
            now = _Late("link", "tail", growth, bound, None) if is_slow else None
            finding = self._weigh(suspect, None, "link", now, first, last)
            findings = [finding] if finding is not None else []
        if suspect.evidence.is_clear:
            suspect.votes.clear()
            self._common.append(common)
            self._own.append(own)
        return findings

    # --- noise --------------------------------------------------------------------------------------

    def _bound(self, wall: int, noise: Sequence[int] | deque[int]) -> int:
        bound = max(ABSOLUTE_NS, round(RELATIVE * wall))
        if noise:
            ordered = sorted(noise)
            bound = max(bound, round(NOISE_FACTOR * ordered[int(NOISE_QUANTILE * (len(ordered) - 1))]))
        return bound

    def _learn(self, differences: Sequence[int]) -> None:
        """Remember by how much ranks exceed each other when nobody is named.

        What is under suspicion waits: with the verdict it is noise, or no noise and forgotten.
        """
        open_cases = {rank: suspect for (rank, _), suspect in self._suspects.items() if rank is not None}
        for rank, difference in enumerate(differences):
            held = self._held[rank]
            if difference > 0:
                held.append(difference)
            if rank not in open_cases:
                self._noise.extend(held)
            if rank not in open_cases or open_cases[rank].named is not None:
                held.clear()


def _lateness(medians: Sequence[Mapping[str, int]], rank: int, bound: int, row: RankRange) -> _Late | None:
    """Return in what `rank` was late, or None."""
    mine, others = medians[rank], [m for r, m in enumerate(medians) if r != rank]
    causes = _HOST_TIMED if row.on_device else tuple(_PARTS)
    # `rest` may be the rank's own work, or a wait that the job does by itself (a barrier, a loss summed over ranks).
    for own, waits in ((_own, ("tail",)), (_own_less_rest, ("tail", "rest"))):
        excess = own(mine) - _median([own(other) for other in others])
        waited = _median([sum(other[phase] for phase in waits) for other in others])
        is_agreed = row.on_device or waited - sum(mine[phase] for phase in waits) >= AGREEMENT * excess
        by_cause = {cause: _excess(mine, others, _PARTS[cause]) for cause in causes}
        cause = max(by_cause, key=lambda name: by_cause[name])
        if row.on_device:
            excess = by_cause[cause]
        if excess > bound and is_agreed and by_cause[cause] > bound / 2:
            phase = max(_PARTS[cause], key=lambda name: _excess(mine, others, (name,)))
            return _Late(cause, phase, excess, bound, row.is_throttled)
    return None


def _cpu_wait(rows: Sequence[RankRange], rank: int) -> int | None:
    """Return how much longer a step `rank` waited for a processor than the others' median did."""
    waits = [row.cpu_wait_ns // row.steps for row in rows if row.cpu_wait_ns is not None]
    if len(waits) < len(rows):
        return None
    return waits[rank] - _median(waits[:rank] + waits[rank + 1 :])


def _difference(medians: Sequence[Mapping[str, int]], rank: int) -> int:
    others = [_own(m) for r, m in enumerate(medians) if r != rank]
    return _own(medians[rank]) - _median(others)


def _own(row: Mapping[str, int]) -> int:
    return sum(row[phase] for parts in _PARTS.values() for phase in parts)


def _own_less_rest(row: Mapping[str, int]) -> int:
    return _own(row) - row["rest"]


def _excess(mine: Mapping[str, int], others: Sequence[Mapping[str, int]], phases: Sequence[str]) -> int:
    return sum(mine[p] for p in phases) - _median([sum(other[p] for p in phases) for other in others])


def _stands_out(ratios: Sequence[float | None]) -> int | None:
    """Return the rank whose sockets are busy while no other's are; None when none is, or somebody does not know."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios) or len(known) < 2:
        return None
    second, most = sorted(known)[-2:]
    return ratios.index(most) if most >= BUSY_RATIO_MIN and most >= BUSY_STANDS_OUT * second else None


def _median(values: Sequence[int] | deque[int]) -> int:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
