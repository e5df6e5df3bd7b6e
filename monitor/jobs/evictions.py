"""Chooses which job or rank is evicted for a newcomer, by max-min fairness among users, and bounds what is kept of one.

When there is no room, these are evicted, in this order: what has ended of users who hold more than an equal share and
more than the newcomer's user (`fair_share`); what has ended of the newcomer's own user; and the youngest that runs, of
the user who holds most, if that is more than the newcomer's user holds.  Of what has ended, the one goes whose last
record is oldest.  So a running job is evicted only for a user who has fewer.

Places are counted, the bytes of each are bounded, and so are the labels of a user's ranks, which every scrape writes
out in each of their series.  These three bound the memory.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from pacecar.records import CollectiveWindow, EstimateCheck, Goodbye, JobHello, KnobSwitch, StepRecord, Vitals, WhatIf
from pacecar.records.job_identity import JobKey
from pacecar.wire import FrameError, Refusal

from ..fair_share import yielding_holder
from .rank_health import RankHealth

__all__ = [
    "JOB_BYTES_MAX",
    "KEPT_OF_RANK",
    "LABEL_BYTES_OF_A_RANK",
    "RANK_BYTES_MAX",
    "Displaced",
    "EvictionCandidate",
    "Evictions",
    "Kept",
    "Kind",
    "NoRoomError",
    "choose_place",
    "label_bytes",
]  # fmt: skip

RANK_BYTES_MAX = 16 * 1024
"""Bytes of the records that are kept of one rank, as they came; a usual rank has four thousand."""

JOB_BYTES_MAX = 16 * 1024
"""Bytes of the records that are kept of one job beside its ranks', decisions, verdicts and stragglers."""

LABEL_BYTES_OF_A_RANK = 8 * 1024
"""Bytes that ranks may have of labels on the average, over all their series: names of 100 bytes."""

SERIES_OF_A_RANK = 70
"""Series of a rank that have the job's name as a label, about."""

Kind = Literal["job", "rank"]


class EvictionCandidate(NamedTuple):
    """A job, or one `rank` of it, as one that might be evicted."""

    uid: int
    job: JobKey
    rank: int | None
    is_over: bool
    heard_ns: int
    began_ns: int
    size: int = 1
    """What it takes of what is shared out: one place, or bytes of labels."""


class Displaced(NamedTuple):
    """A place that was given up for another user, or for another job of the same."""

    place: EvictionCandidate
    for_uid: int

    def __str__(self) -> str:
        place = self.place
        what = f"job {str(place.job)!r}" if place.rank is None else f"rank {place.rank} of job {str(place.job)!r}"
        why = "it had ended" if place.is_over else "the youngest of the user who has most"
        return f"{what} of uid {place.uid} made room on the board for uid {self.for_uid}: {why}"


def label_bytes(hello: JobHello) -> int:
    """Return what the labels of a rank take in all its series, about."""
    of_rank = (hello.host, hello.device, hello.device_uuid, hello.backend, hello.framework, hello.pod_name)
    return SERIES_OF_A_RANK * len(hello.job.encode()) + sum(len(text.encode()) for text in of_rank if text is not None)


def choose_place(
    places: Sequence[EvictionCandidate], uid: int, newcomer: JobKey, most: int, amount: int = 1
) -> EvictionCandidate | None:
    """Return which of `places` is given up so that job `newcomer` of `uid` gets `amount` of `most`; None: none is."""
    held: Counter[int] = Counter()
    for place in places:
        held[place.uid] += place.size
    share = most // len(held.keys() | {uid})
    above = [other for other in held if other != uid and held[other] > max(share, held[uid] + amount)]
    for holder in [*sorted(above, key=lambda other: -held[other]), uid]:
        ended = [place for place in places if place.uid == holder and place.is_over and place.job != newcomer]
        if ended:
            return min(ended, key=lambda place: place.heard_ns)
    giver = yielding_holder(uid, held, amount)
    if giver is None or held.total() > most:  # over: the limit was lowered, which ends nothing that runs
        return None
    return max((place for place in places if place.uid == giver), key=lambda place: place.began_ns)


class NoRoomError(FrameError):
    """There are as many jobs or ranks as may be; `kind` says of which."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(Refusal.LIMIT, message)
        self.kind = kind


class _Job(Protocol):
    key: JobKey
    uid: int
    heard_ns: int
    began_ns: int
    crew: RankHealth

    @property
    def is_over(self) -> bool: ...
    @property
    def label_bytes(self) -> int: ...
    @property
    def ranks(self) -> MutableMapping[int, Any]: ...


J = TypeVar("J", bound=_Job)


class Evictions(Generic[J]):
    """The jobs and ranks of a table as places; evicts those that make room."""

    def __init__(self, jobs: dict[JobKey, J]) -> None:
        self._jobs = jobs
        self.displaced = {"job": 0, "rank": 0}

    def make_room_for(self, hello: JobHello, uid: int, jobs_max: int, ranks_max: int) -> list[Displaced]:
        """Evict jobs or ranks until a new rank that says `hello` fits, and return them; raises NoRoomError."""
        left: list[Displaced] = []
        if JobKey.of(hello) not in self._jobs:
            self.make_room("job", hello, uid, jobs_max, left)
        self.make_room("rank", hello, uid, ranks_max, left)
        self.make_room("rank", hello, uid, ranks_max * LABEL_BYTES_OF_A_RANK, left, label_bytes(hello))
        return left

    def make_room(
        self, kind: Kind, hello: JobHello, uid: int, most: int, left: list[Displaced], amount: int = 1
    ) -> None:
        """Evict jobs or ranks until that of `hello` is one of `most`, and add them to `left`.

        An `amount` above 1 is the bytes that the labels of its rank take, and `most` those of all.

        Raises:
            NoRoomError: none can be evicted for it.
        """
        by_bytes = amount > 1
        while (taken := self._taken(kind, by_bytes=by_bytes)) + amount > most:
            places = self._list(kind, by_bytes=by_bytes)
            place = choose_place(places, uid, JobKey.of(hello), most, amount)
            if place is not None:
                self._displace(kind, place)
                left.append(Displaced(place, uid))
            if place is None or (taken > most and not by_bytes):
                mine = sum(other.size for other in places if other.uid == uid)
                what = f"job {hello.job!r}" if kind == "job" else f"rank {hello.rank} of job {hello.job!r}"
                bound = f"the {most} bytes for labels" if by_bytes else f"{kind}s_max = {most}"
                raise NoRoomError(kind, f"{what} is beyond {bound}, and uid {uid} has {mine} of them")

    def _taken(self, kind: Kind, *, by_bytes: bool) -> int:
        if by_bytes:
            return sum(job.label_bytes for job in self._jobs.values())
        return len(self._jobs) if kind == "job" else sum(len(job.ranks) for job in self._jobs.values())

    def _list(self, kind: Kind, *, by_bytes: bool) -> list[EvictionCandidate]:
        if kind == "job":
            return [
                EvictionCandidate(j.uid, j.key, None, j.is_over, j.heard_ns, j.began_ns) for j in self._jobs.values()
            ]
        return [
            EvictionCandidate(
                job.uid, job.key, number, rank.is_over, rank.heard_ns or job.heard_ns, rank.began_ns,
                rank.label_bytes if by_bytes else 1,
            )
            for job in self._jobs.values()
            for number, rank in job.ranks.items()
        ]  # fmt: skip

    def _displace(self, kind: Kind, place: EvictionCandidate) -> None:
        self.displaced[kind] += 1
        job = self._jobs[place.job]
        if place.rank is not None:
            del job.ranks[place.rank]
            job.crew.leave(place.rank)
        if place.rank is None or not job.ranks:
            del self._jobs[place.job]


class Kept:
    """How many bytes of records are kept of a rank or a job, by the field that holds them."""

    def __init__(self, what: str, bytes_max: int) -> None:
        self._what = what
        self._bytes_max = bytes_max
        self._sizes: dict[str, int] = {}

    def keep(self, field: str, size: int) -> None:
        """Note that `field` now holds `size` bytes; raises FrameError (LIMIT) where all would be too many."""
        others = sum(kept for name, kept in self._sizes.items() if name != field)
        if others + size > self._bytes_max:
            raise FrameError(
                Refusal.LIMIT, f"{others + size} bytes of records to keep of one {self._what} is over {self._bytes_max}"
            )
        self._sizes[field] = size


KEPT_OF_RANK: dict[type, str] = {
    StepRecord: "step", Vitals: "vitals", EstimateCheck: "check", CollectiveWindow: "collectives", WhatIf: "what_if",
    KnobSwitch: "switch", Goodbye: "goodbye",
}  # fmt: skip
"""Record -> the field of a rank that holds the last one."""
