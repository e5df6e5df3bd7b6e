"""Chooses which job or rank is evicted for a newcomer, by max-min fairness among users.

If there is no room, the first of these is evicted:

1. an ended one of a user who holds more than an equal share, and more than the newcomer's user (`fair_share`);
2. an ended one of the newcomer's user;
3. the youngest running one of the user who holds most, if that is more than the newcomer's user holds.

Among ended ones the one with the oldest last record goes.  So a running job is evicted only for a user who has fewer.

Three bounds limit the memory: the number of jobs and ranks, the bytes kept of each (`tracked_job`), and the bytes of
labels, which every scrape writes in each series.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pacecar.records import JobHello
from pacecar.records.job_identity import JobKey
from pacecar.wire import FrameError, Refusal

from ..fair_share import yielding_holder
from .tracked_job import TrackedJob, label_bytes

__all__ = ["LABEL_BYTES_OF_A_RANK", "Displaced", "EvictionCandidate", "Evictions", "Kind", "NoRoomError"]

LABEL_BYTES_OF_A_RANK = 8 * 1024
"""Average bytes of labels that a rank may have over all its series: enough for names of 100 bytes."""

Kind = Literal["job", "rank"]


class EvictionCandidate(NamedTuple):
    """A job, or one `rank` of it, that might be evicted."""

    uid: int
    job: JobKey
    rank: int | None
    is_over: bool
    heard_ns: int
    began_ns: int
    size: int = 1
    """Its use of the shared resource: one place, or bytes of labels."""


class Displaced(NamedTuple):
    """A job or rank that was evicted for another user, or for another job of the same user."""

    victim: EvictionCandidate
    for_uid: int

    def __str__(self) -> str:
        uid, job, rank, is_over, *_ = self.victim
        what = f"job {str(job)!r}" if rank is None else f"rank {rank} of job {str(job)!r}"
        why = "it had ended" if is_over else "the youngest of the user who has most"
        return f"{what} of uid {uid} made room for uid {self.for_uid}: {why}"


def choose_victim(
    candidates: Sequence[EvictionCandidate], uid: int, newcomer: JobKey, most: int, amount: int = 1
) -> EvictionCandidate | None:
    """Return the candidate to evict so that job `newcomer` of `uid` gets `amount` of `most`; None if there is none."""
    held: Counter[int] = Counter()
    for one in candidates:
        held[one.uid] += one.size
    share = most // len(held.keys() | {uid})
    above = [other for other in held if other != uid and held[other] > max(share, held[uid] + amount)]
    for holder in [*sorted(above, key=lambda other: -held[other]), uid]:
        ended = [one for one in candidates if one.uid == holder and one.is_over and one.job != newcomer]
        if ended:
            return min(ended, key=lambda one: one.heard_ns)
    giver = yielding_holder(uid, held, amount)
    if giver is None or held.total() > most:  # a lowered limit evicts nothing that runs
        return None
    return max((one for one in candidates if one.uid == giver), key=lambda one: one.began_ns)


class NoRoomError(FrameError):
    """The maximum of jobs or ranks, as `kind` says, is reached."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(Refusal.LIMIT, message)
        self.kind = kind


class Evictions:
    """Evicts jobs and ranks of a table to make room for others."""

    def __init__(self, jobs: dict[JobKey, TrackedJob]) -> None:
        self._jobs = jobs
        self.displaced = {"job": 0, "rank": 0}

    def make_room_for(self, hello: JobHello, uid: int, jobs_max: int, ranks_max: int) -> list[Displaced]:
        """Evict jobs or ranks until a new rank that says `hello` fits, and return them; raises NoRoomError."""
        displaced: list[Displaced] = []
        if JobKey.of(hello) not in self._jobs:
            displaced += self._make_room("job", hello, uid, jobs_max)
        displaced += self._make_room("rank", hello, uid, ranks_max)
        displaced += self._make_room("rank", hello, uid, ranks_max * LABEL_BYTES_OF_A_RANK, label_bytes(hello))
        return displaced

    def _make_room(self, kind: Kind, hello: JobHello, uid: int, most: int, amount: int = 1) -> list[Displaced]:
        """Evict jobs or ranks until that of `hello` is one of `most`; raises NoRoomError.

        An `amount` above 1 counts the bytes of its labels instead, `most` those of all ranks.
        """
        by_bytes = amount > 1
        displaced: list[Displaced] = []
        while (taken := self._taken(kind, by_bytes=by_bytes)) + amount > most:
            candidates = self._candidates(kind, by_bytes=by_bytes)
            victim = choose_victim(candidates, uid, JobKey.of(hello), most, amount)
            if victim is not None:
                self._evict(kind, victim)
                displaced.append(Displaced(victim, uid))
            if victim is None or (taken > most and not by_bytes):
                own = sum(other.size for other in candidates if other.uid == uid)
                what = f"job {hello.job!r}" if kind == "job" else f"rank {hello.rank} of job {hello.job!r}"
                bound = f"the {most} bytes for labels" if by_bytes else f"{kind}s_max = {most}"
                raise NoRoomError(kind, f"{what} is beyond {bound}, and uid {uid} has {own} of them")
        return displaced

    def _taken(self, kind: Kind, *, by_bytes: bool) -> int:
        if by_bytes:
            return sum(job.label_bytes for job in self._jobs.values())
        return len(self._jobs) if kind == "job" else sum(len(job.ranks) for job in self._jobs.values())

    def _candidates(self, kind: Kind, *, by_bytes: bool) -> list[EvictionCandidate]:
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

    def _evict(self, kind: Kind, victim: EvictionCandidate) -> None:
        self.displaced[kind] += 1
        job = self._jobs[victim.job]
        if victim.rank is not None:
            del job.ranks[victim.rank]
            job.health.leave(victim.rank)
        if victim.rank is None or not job.ranks:
            del self._jobs[victim.job]
