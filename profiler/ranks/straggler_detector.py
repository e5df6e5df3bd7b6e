"""Finds stragglers: which rank is late, in which phase, for what cause, and since which step.

Step times do not show the slowest rank: under synchronous training all ranks take equally long.  What differs is how a
rank fills the step.  Its *own* time is the time in which it does not wait for others.  A rank is late in a range of
steps when

    its own time exceeds the median of the others' by more than a bound, and
    the others wait longer than it does, by at least AGREEMENT of that excess

The bound is the largest of ABSOLUTE_NS, RELATIVE of the step, and NOISE_FACTOR times the NOISE_QUANTILE of recent
differences between the ranks of this job, not counting waits for a processor.  So a noisy machine has a higher bound,
and chance rarely makes a rank late: `cusum.EXCEEDS_QUIET` is the rate that the test is designed for.  A CUSUM
(`cusum`) adds up the evidence over ranges, and the same test in the opposite direction decides when lateness ends.

Where ranks meet in the forward or backward (sharded parameters, tensor parallelism; SyncBatchNorm, if windows saw it)
or between them (pipelines), a rank may wait there.  Then that phase counts as waiting, like the tail: timers do not
tell compute and waiting in it apart, and no rank is blamed for what may be either.  On a CPU job samples of the
training thread's stack do (`collective_waits`).  If the timers show nothing, ranges are judged once more with the
sampled waits taken out of forward, backward and rest.  Each such range rests on samples of several seconds, so the
evidence must last SAMPLED_SECONDS.

On a device job the same holds for the phases as the device passed them: its kernels, idle time where its host is late,
and the wait for the last all-reduces.  A device that idles inside a phase looks like one that computes, so compute is
blamed on the host if its own timers have as large an excess there and the device is not a step behind it.

A rank that computes longer because its batches are larger, by tokens or elements, is no slow device: `imbalance`.

A slow link makes all ranks wait alike, so no rank's own time shows it: see `link_diagnosis`.

Pure: rows of ranges in, `Straggler` records out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from msgspec import structs

from pacecar.records import Cause, Straggler

from .collection_diagnosis import Collecting, CollectionDiagnosis
from .cusum import Cusum, excesses, median, upper
from .exchange.phase_sums_message import PHASES, RankRange
from .link_diagnosis import LinkDiagnosis, Slow

__all__ = ["StragglerDetector"]

ABSOLUTE_NS = 1_000_000
"""The smallest excess in a step that matters."""

RELATIVE = 0.10
"""The smallest excess as a share of the step; a smaller one is not worth a line in the log."""

AGREEMENT = 0.5
"""The share of the excess that the others must wait.  A separate measurement, so one wrong clock is not enough."""

NOISE_FACTOR = 2.0
NOISE_QUANTILE = 0.95
HISTORY = 64
"""Ranges that the noise is learned from: about 256 steps."""

FRESH = 16
"""The quantile is taken anew once one in so many values is new; sorting takes longer than all else in a large job."""

WARMUP_RANGES = 4
"""Ranges before any rank can be named: the first steps allocate, compile and fill caches."""

EARLY_WEIGHT = 0.25
"""The weight of evidence against a rank that was late in the warm-up already: what only warms up is over by then."""

CPU_WAIT_SHARE = 0.5
"""A rank that waits for a processor for this share of its excess is not slow in compute: its host is busy."""

STARVED_WEIGHT = 0.5
STARVED_SECONDS = 5.0
"""Other programs occasionally take a rank's processor for seconds.  So this evidence must last STARVED_SECONDS, and
twice as many ranges as any other."""

SAMPLED_SECONDS = 18.0
"""One and a half times the memory of the samples (`collective_waits.SECONDS`)."""

_PARTS: Mapping[Cause, tuple[str, ...]] = {
    Cause.COMPUTE: ("forward", "backward"),
    Cause.DATA_WAIT: ("data_wait",),
    Cause.HOST_BOUND: ("overhead", "rest"),
    Cause.OPTIMIZER_HOST: ("optimizer",),
    Cause.CHECKPOINT: ("checkpoint",),
}
_OWN = tuple(phase for parts in _PARTS.values() for phase in parts)
_HOST_TIMED = {cause: _PARTS[cause] for cause in (Cause.DATA_WAIT, Cause.CHECKPOINT)}
"""What host timers can see in a device job, where a forward ends once its kernels are launched."""

_DEVICE_TIMED: Mapping[Cause, tuple[str, ...]] = {
    Cause.COMPUTE: ("forward", "backward", "optimizer"),
    Cause.HOST_BOUND: ("rest",),
    **_HOST_TIMED,
}


@dataclass(slots=True)
class _Lateness:
    """How a rank was late in one range; `weight` (0..1) is its weight in the test."""

    cause: Cause
    phase: str
    excess_ns: int
    evidence: str
    weight: float = 1.0


@dataclass(slots=True)
class _Suspect:
    """The evidence against one rank for one cause."""

    test: Cusum = field(default_factory=Cusum)
    since_step: int = 0
    excesses: list[int] = field(default_factory=list)
    latest: _Lateness | None = None
    named: Straggler | None = None

    def add(self, late: _Lateness | None, first_step: int, weight_max: float) -> str | None:
        """Add whether the rank was late in the range from `first_step` on; return how the test's state changed."""
        if late is not None:
            if self.test.is_clear:
                self.since_step = first_step
                self.excesses.clear()
            self.latest = late
            self.excesses.append(late.excess_ns)
            del self.excesses[:-HISTORY]
        return self.test.add(late is not None, weight=min(weight_max, late.weight) if late is not None else 1.0)

    @property
    def mean_excess_ns(self) -> int:
        """The mean excess over the late ranges."""
        return sum(self.excesses) // len(self.excesses)


class StragglerDetector:
    """Tests the ranges of one job, one after the other.

    `members` are the ranks that are compared, all of the job unless it is large.  If they are not all, no link is
    named: in a ring a neighbour's link is busy as well, and may be another subgroup's.
    """

    def __init__(self, job: str, world_size: int, members: range | None = None) -> None:
        self._job = job
        self._members = range(world_size) if members is None else members
        self._judges_links = len(self._members) == world_size
        world_size = len(self._members)
        self._noise = _Noise(world_size)
        self._sampled_noise = _Noise(world_size)
        self._link = LinkDiagnosis(world_size)
        self._collections = CollectionDiagnosis()
        self._suspects: dict[tuple[int, Cause], _Suspect] = {}
        self._early: set[tuple[int, Cause]] = set()
        """Who was late in the warm-up, and ever since."""
        self._work: list[deque[int]] = [deque(maxlen=HISTORY) for _ in self._members]
        self._epoch: int | None = None
        self._ranges = 0

    def judge(self, rows: Sequence[RankRange], wall_ns: int) -> list[Straggler]:
        """Test the rows of one range and return stragglers that are new or no longer late, as of `wall_ns`.

        `rows` are in order of rank, at least two.  A range in which a rank has no undisturbed step is skipped.
        """
        one_range = _Range.of(rows)
        if one_range is None:
            return []
        one_range.past_work = self._work
        medians = one_range.medians
        if self._epoch != rows[0].epoch:  # the knobs changed, and with them the usual wait
            self._link.forget()
            self._epoch = rows[0].epoch
        self._ranges += 1
        late = _late(one_range, self._noise)
        sampled = one_range.sampled()
        if sampled is not None and not late:
            late = _late(sampled, self._sampled_noise)
        collecting = self._collections.judge(rows, one_range.waits[0], _own(one_range.waits[0]))
        if collecting is not None:
            late[collecting.rank, Cause.GC] = _of_collections(collecting)
        slow = self._link.judge(rows, medians, is_any_rank_late=bool(late))
        if slow is not None and self._judges_links:
            late[slow.rank, Cause.LINK] = _of_link(slow)
        # Stages of a pipeline may always have unequal work, which is not for one rank to answer.
        has_stages = any("rest" in row.meets_in for row in rows)
        if self._ranges <= WARMUP_RANGES and not has_stages:
            self._early |= late.keys()
        changed = self._update(late, rows[0].first_step, rows[0].last_step, wall_ns)
        if not any(cause is Cause.LINK for _, cause in self._suspects):
            self._link.learn()
        suspected: dict[int, Straggler | None] = {rank: None for rank, _ in self._early}
        for (rank, cause), suspect in self._suspects.items():
            if cause is not Cause.LINK:
                suspected[rank] = suspect.named
        for rank, row in enumerate(rows):
            if row.work is not None and rank not in suspected:
                self._work[rank].append(row.work)
        self._noise.learn(one_range.differences(), suspected, has_stages=has_stages)
        if sampled is not None:
            self._sampled_noise.learn(sampled.differences(), suspected, has_stages=has_stages)
        return changed

    def _update(
        self, late: Mapping[tuple[int, Cause], _Lateness], first: int, last: int, wall_ns: int
    ) -> list[Straggler]:
        if self._ranges <= WARMUP_RANGES:
            return []
        self._early &= late.keys() | self._suspects.keys()
        changed = []
        for key in late:
            self._suspects.setdefault(key, _Suspect())
        for (rank, cause), suspect in list(self._suspects.items()):
            weight_max = EARLY_WEIGHT if (rank, cause) in self._early else 1.0
            change, latest = suspect.add(late.get((rank, cause)), first, weight_max), suspect.latest
            if change == "raised" and latest is not None:
                suspect.named = Straggler(
                    job=self._job,
                    late_rank=self._members[rank],
                    cause=latest.cause,
                    phase=latest.phase,
                    since_step=suspect.since_step,
                    step=last,
                    wall_ns=wall_ns,
                    excess_ns=suspect.mean_excess_ns,
                    evidence=latest.evidence,
                )
                changed.append(suspect.named)
            elif change is not None and suspect.named is not None:
                changed.append(
                    structs.replace(
                        suspect.named, step=last, wall_ns=wall_ns, excess_ns=suspect.mean_excess_ns, ended=True
                    )
                )
                suspect.named = None
            if suspect.test.is_clear:
                del self._suspects[rank, cause]
        return changed


class _Noise:
    """How much the ranks exceed each other while none is late, beyond what each does lastingly.

    What a rank does from the first step on is not noise: it would hide that rank for ever.  Stages of a pipeline are
    unequal by design, so there it is.
    """

    def __init__(self, world_size: int) -> None:
        self._values: deque[int] = deque(maxlen=HISTORY * world_size)
        self._fresh = 0
        self._usual = 0
        self._held_back: list[deque[int]] = [deque(maxlen=HISTORY) for _ in range(world_size)]
        self._lasting: list[deque[int]] = [deque(maxlen=FRESH) for _ in range(world_size)]

    def bound(self, wall_ns: int) -> int:
        """Return the excess in steps of `wall_ns` that chance rarely reaches and that matters."""
        if self._fresh * FRESH >= len(self._values):
            self._fresh, self._usual = 0, upper(self._values, NOISE_QUANTILE) or 0
        return max(ABSOLUTE_NS, round(RELATIVE * wall_ns), round(NOISE_FACTOR * self._usual))

    def learn(self, differences: Sequence[int], suspected: Mapping[int, Straggler | None], *, has_stages: bool) -> None:
        """Add the `differences` of one range, by rank.

        The values of a suspected rank are held back: they are noise if it is cleared, and dropped if it is named.
        """
        for rank, difference in enumerate(differences):
            held_back, lasting = self._held_back[rank], self._lasting[rank]
            lasting.append(difference)
            held_back.append(max(0, difference - (0 if has_stages else max(0, median(lasting)))))
            if rank not in suspected:
                self._values.extend(held_back)
                self._fresh += len(held_back)
            if rank not in suspected or suspected[rank] is not None:
                held_back.clear()


class _Range:
    """How much each rank exceeds the median of the others in one range, by sums of phases; each is computed once."""

    def __init__(
        self,
        rows: Sequence[RankRange],
        host: Sequence[Mapping[str, int]],
        medians: Sequence[Mapping[str, int]],
        parts: Mapping[Cause, tuple[str, ...]],
        *,
        is_sampled: bool = False,
    ) -> None:
        self.rows = rows
        self.is_sampled = is_sampled
        """Whether waits are samples of the last seconds, and in no phase but the tail."""
        self.waits = [("tail",)] if is_sampled else _waits(rows)
        self.medians = medians
        """By phase, on the device if that is known of all ranks, else on the host."""
        self.parts = parts
        """The phases that show each cause."""
        self._host = host
        self.past_work: Sequence[Collection[int]] = [()] * len(rows)
        """The work of each rank in ranges in which it was not suspected."""
        self._excesses: dict[tuple[str, ...], list[int]] = {}
        self._cpu_waits: list[int] | None = None

    @classmethod
    def of(cls, rows: Sequence[RankRange]) -> _Range | None:
        """Return what `rows` tell; None if a rank has no undisturbed step."""
        host = [row.medians for row in rows if row.medians is not None]
        if len(host) < len(rows):
            return None
        if not any(row.on_device for row in rows):
            return cls(rows, host, host, _PARTS)
        passed = [row.device for row in rows if row.device is not None]
        if len(passed) < len(rows):
            return cls(rows, host, host, _HOST_TIMED)
        unmarked = dict.fromkeys(PHASES, 0)
        medians = [unmarked | {"wall": one["wall"], **device} for one, device in zip(host, passed, strict=True)]
        return cls(rows, host, medians, _DEVICE_TIMED)

    def sampled(self) -> _Range | None:
        """Return the same range with sampled waits in the tail; None if a rank has too few samples."""
        waited = [row.waited for row in self.rows if row.waited is not None]
        if len(waited) < len(self.rows) or self.parts is not _PARTS:
            return None
        medians = []
        for host, ratios in zip(self._host, waited, strict=True):
            waits = {phase: min(host[phase], round(ratio * host["wall"])) for phase, ratio in ratios.items()}
            own = {phase: host[phase] - wait for phase, wait in waits.items()}
            medians.append({**host, **own, "tail": host["tail"] + sum(waits.values())})
        found = _Range(self.rows, self._host, medians, _PARTS, is_sampled=True)
        found.past_work = self.past_work
        return found

    @property
    def sees_waits(self) -> bool:
        """Whether a rank's own time and its waits are known, not only some phases."""
        return self.parts is not _HOST_TIMED

    def excesses(self, phases: tuple[str, ...]) -> list[int]:
        """Return the excess of each rank's sum of `phases`."""
        found = self._excesses.get(phases)
        if found is None:
            found = self._excesses[phases] = excesses([sum(map(m.__getitem__, phases)) for m in self.medians])
        return found

    def seconds(self, rank: int) -> float:
        """Return how long the range took `rank`."""
        return self.medians[rank]["wall"] * self.rows[rank].steps / 1e9

    def extra_work_ns(self, rank: int) -> int:
        """Return how much longer `rank` may compute because its batches are larger than the others' median; 0 if not.

        Time grows with the size of a batch, in attention with the square of a sequence's length: so at most with that
        of the size.  Stages of a pipeline are called with different things, whose sizes do not compare: there `rank` is
        compared with itself before.
        """
        work = [row.work for row in self.rows if row.work is not None]
        if len(work) < len(self.rows):
            return 0
        usual = work[rank] - excesses(work)[rank]
        if any("rest" in row.meets_in for row in self.rows):
            usual = median(self.past_work[rank]) if self.past_work[rank] else work[rank]
        computed = [m["forward"] + m["backward"] for m in self.medians]
        if usual <= 0 or work[rank] <= usual:
            return 0
        return round((computed[rank] - excesses(computed)[rank]) * ((work[rank] / usual) ** 2 - 1))

    def late_host(self, rank: int, phase: str, excess: int) -> Cause | None:
        """Return the cause if the host of `rank` is late in launching the work of `phase`; None if it is not."""
        if self.parts is not _DEVICE_TIMED or self.rows[rank].is_behind:
            return None
        passes, optimizer = (
            excesses([sum(map(m.__getitem__, phases)) for m in self._host])[rank]
            for phases in (("forward", "backward"), ("optimizer",))
        )
        if (optimizer if phase == "optimizer" else passes) < AGREEMENT * excess:
            return None
        return Cause.OPTIMIZER_HOST if optimizer > passes else Cause.HOST_BOUND

    def cpu_waits(self) -> list[int] | None:
        """Return how much longer per step each rank waited for a processor; None if a rank cannot tell."""
        if self._cpu_waits is None:
            ratios = [row.around.cpu_wait_ratio for row in self.rows]
            waits = [
                round(ratio * (row.wall_ns or 0))
                for ratio, row in zip(ratios, self.rows, strict=True)
                if ratio is not None
            ]
            self._cpu_waits = excesses(waits) if len(waits) == len(self.rows) else []
        return self._cpu_waits or None

    def collections(self) -> list[int]:
        """Return how much longer per step each rank collected garbage; zeros where that is not known."""
        if any(row.gc_ns is None or not row.measured for row in self.rows):
            return [0] * len(self.rows)
        return excesses([(row.gc_ns or 0) // row.measured for row in self.rows])

    def differences(self) -> list[int]:
        """Return how much each rank exceeds the others, without its known wait for a processor."""
        own = self.excesses(_own(self.waits[0]))
        waits = self.cpu_waits()
        return own if waits is None else [excess - max(0, wait) for excess, wait in zip(own, waits, strict=True)]


def _late(one_range: _Range, noise: _Noise) -> dict[tuple[int, Cause], _Lateness]:
    """Return how each rank was late, by rank and the cause that is tested."""
    bound = noise.bound(median([m["wall"] for m in one_range.medians]))
    ranks = [*range(len(one_range.rows))]
    if one_range.sees_waits:  # most ranks are ruled out at once
        owns = [one_range.excesses(_own(waits)) for waits in one_range.waits]
        ranks = [rank for rank in ranks if any(own[rank] > bound for own in owns)]
    found = ((rank, _lateness(one_range, rank, bound)) for rank in ranks)
    return {(rank, late[0]): late[1] for rank, late in found if late is not None}


@cache
def _own(waits: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(phase for phase in _OWN if phase not in waits)


def _lateness(one_range: _Range, rank: int, bound: int) -> tuple[Cause, _Lateness] | None:
    """Return the cause that is tested and how `rank` was late; None if it was not.

    The cause that is reported may be another: throttling or a busy host explains slow compute.
    """
    parts = one_range.parts
    for waits in one_range.waits:
        own = _own(waits)
        excess = one_range.excesses(own)[rank]
        if one_range.sees_waits and (excess <= bound or -one_range.excesses(waits)[rank] < AGREEMENT * excess):
            continue
        by_cause = {
            cause: one_range.excesses(tuple(phase for phase in phases if phase in own))[rank]
            for cause, phases in parts.items()
        }
        cause = max(by_cause, key=lambda name: by_cause[name])
        if not one_range.sees_waits:
            excess = by_cause[cause]
        if excess > bound and by_cause[cause] > bound / 2:
            phase = max(
                (phase for phase in parts[cause] if phase in own), key=lambda name: one_range.excesses((name,))[rank]
            )
            if one_range.collections()[rank] >= AGREEMENT * excess:
                return None  # one range does not tell a collector that holds others up: see `collection_diagnosis`
            return cause, _describe(one_range, rank, cause, phase, excess, bound)
    return None


def _waits(rows: Sequence[RankRange]) -> list[tuple[str, ...]]:
    """Return the phases in which others may wait, the most likely first.

    `rest` may be the rank's own work or a wait of the script's own (a barrier, a loss summed over ranks).
    """
    meets_in = frozenset().union(*(row.meets_in for row in rows))
    waits = ("tail", *sorted(meets_in))
    return [waits] if "rest" in meets_in else [waits, (*waits, "rest")]


def _describe(one_range: _Range, rank: int, cause: Cause, phase: str, excess: int, bound: int) -> _Lateness:
    """Describe the lateness of `rank`, and correct the cause where throttling or a busy host explains it."""
    row, text = one_range.rows[rank], f"{phase} {_ms(excess)} over the other ranks' median, bound {_ms(bound)}"
    waits = one_range.cpu_waits()
    waited = None if waits is None else waits[rank]
    others = [other.is_throttled for other in one_range.rows if other is not row]
    # At their power limit all devices throttle, which does not make this one slower than the others.
    if cause is Cause.COMPUTE and row.is_throttled and 2 * others.count(True) <= len(others):
        return _Lateness(Cause.THROTTLED, phase, excess, text + "; its device holds its clocks down")
    if waited is None or waited < CPU_WAIT_SHARE * excess:
        late_host = one_range.late_host(rank, phase, excess) if cause is Cause.COMPUTE else None
        if late_host is not None:
            text += "; its host launches that much later, and the device waits"
            return _Lateness(late_host, phase, excess, text)
        if cause is Cause.COMPUTE and one_range.extra_work_ns(rank) >= excess:
            text += "; its batches are as much larger"
            cause = Cause.IMBALANCE
        if one_range.is_sampled:
            text += ", less the sampled waits in collectives"
            return _Lateness(cause, phase, excess, text, weight=min(1.0, 3 * one_range.seconds(rank) / SAMPLED_SECONDS))
        return _Lateness(cause, phase, excess, text)
    seconds = one_range.seconds(rank)
    text += f"; it waited {_ms(waited)} a step longer for a processor"
    return _Lateness(Cause.HOST_BOUND, phase, excess, text, weight=min(STARVED_WEIGHT, 3 * seconds / STARVED_SECONDS))


def _of_collections(found: Collecting) -> _Lateness:
    text = f"its garbage collector takes {_ms(found.excess_ns)} a step longer than the other ranks' median"
    return _Lateness(Cause.GC, found.phase, found.excess_ns, text)


def _of_link(slow: Slow) -> _Lateness:
    text = f"all ranks wait {_ms(slow.excess_ns)} a step longer and none does more work of its own"
    text += f"; only rank {slow.rank}'s sockets are busy"
    return _Lateness(Cause.LINK, "tail", slow.excess_ns, text, weight=slow.weight)


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
