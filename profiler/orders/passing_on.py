"""Passes an order on to the ranks of a job and gathers their replies, whichever of them are stopped.

Ranks ask each other over the sockets that hangs are asked about (`hangs.account_road`): no collective, so no rank waits
for another, no port and no secret of its own, and a thread of pacecar's answers while the training thread computes.

Up to WHOLE_MAX ranks are asked directly.  In a larger job the asker asks one *relay* of each subgroup (`pass_on`),
itself for its own, which asks the others of it (`order`): at 1024 ranks no rank has more than 79 conversations.

    asker ---pass_on--- first rank of each subgroup ---order--- its other ranks
          `--pass_on--- (first one silent) last rank of that subgroup ---order--- its other ranks

A stopped rank cannot pass anything on, and is only known to be stopped because it does not answer in time.  So every
question has a deadline, those of a relay's are shorter than the relay's own, and all are asked side by side: a silent
rank costs time, once for all of them, but no other rank's reply.  A relay that is silent is replaced once, by the last
rank of its subgroup, mostly on another host.  So an order has gone round in RELAYS * RELAY_SECONDS, 1.3 s.  Ranks whose
relays were both silent were not asked, and that is said of them.

Of a silent rank is said what the kernel tells a rank on its host, and how long ago it was last heard from: in a gather
of its subgroup, which needs a message of each rank, or in an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pacecar.analysis.hang.sentences import process_words
from pacecar.records.hangs import ProcessState
from pacecar.records.job_orders import JobOrder, RankReply

from ..hangs.account_road import Question, RankReplies, Road, Silence, ask
from ..ranks.exchange.subgroups import Subgroup

__all__ = ["MEMBER_SECONDS", "RELAY_SECONDS", "OrderPassing", "Peers"]

MEMBER_SECONDS = 0.4
"""How long a rank may take to answer: a busy interpreter lets other threads run after 5 ms, 0.1 s on a bad day."""

STATE_SECONDS = 0.15
"""How long a rank that has just answered may take to say what the kernel knows of its neighbours."""

RELAY_SECONDS = 0.65
"""How long a relay may take: both of the above, and the two ways."""

RELAYS = 2

AT_ONCE_MAX = 128
"""Sockets of the asking rank: one for each relay of 2048 ranks, and few beside the 1024 open files of a process."""


class Peers(Protocol):
    """The other ranks, as `HangWatch` knows them."""

    @property
    def road(self) -> Road | None:
        """Where the ranks listen."""
        ...

    def heard(self, ranks: Iterable[int]) -> None:
        """Note that these ranks showed now that they run."""
        ...

    def heard_ns(self, rank: int) -> int | None:
        """Return when `rank` was last heard from (monotonic)."""
        ...

    def processes(
        self, silent: Sequence[int], heard: Sequence[int], *, seconds: float = ...
    ) -> Mapping[int, ProcessState]:
        """Return the processes of `silent` ranks, by the word of ranks on their hosts."""
        ...


class OrderPassing:
    """One rank's part; `own_reply` carries an order out on this rank, without waiting.  For any thread."""

    def __init__(
        self,
        peers: Peers,
        rank: int,
        world_size: int,
        subgroup: Subgroup,
        own_reply: Callable[[JobOrder], RankReply],
        now_ns: Callable[[], int],
        *,
        ask: Callable[..., Mapping[int, Any]] = ask,
    ) -> None:
        self._peers = peers
        self._rank = rank
        self._subgroup = subgroup
        ends = (*subgroup.leaders[1:], world_size)
        self._groups = [range(first, end) for first, end in zip(subgroup.leaders, ends, strict=True)]
        self._own_reply = own_reply
        self._now_ns = now_ns
        self._ask = ask

    def to_all(self, order: JobOrder) -> list[RankReply]:
        """Return the reply of every rank, in order of rank."""
        if self._subgroup.is_whole:
            return self.to_subgroup(order)
        replies: list[RankReply] = []
        left: Collection[range] = self._groups
        for attempt in range(RELAYS):
            relays = {self._relay(group, attempt): group for group in left}
            answers = self._question(relays, order, "pass_on", RELAY_SECONDS)
            replies += [reply for relay in relays for reply in _replies(answers[relay])]
            left = [group for relay, group in relays.items() if isinstance(answers[relay], Silence)]
            if not left:
                break
        for group in left:
            words = f"not asked: neither rank {group[0]} nor rank {group[-1]} answers, which would have passed it on"
            replies += [self._silent(rank, words) for rank in group]
        return sorted(replies, key=lambda reply: reply.rank)

    def to_subgroup(self, order: JobOrder) -> list[RankReply]:
        """Return the replies of the ranks of this one's subgroup, in order of rank."""
        others = [rank for rank in self._subgroup.members if rank != self._rank]
        return sorted([self._own_reply(order), *self._of(others, order)], key=lambda reply: reply.rank)

    def to_one(self, rank: int, order: JobOrder) -> RankReply:
        """Return the reply of `rank`."""
        return self._own_reply(order) if rank == self._rank else self._of([rank], order)[0]

    def _of(self, ranks: Sequence[int], order: JobOrder) -> list[RankReply]:
        answers = self._question(ranks, order, "order", MEMBER_SECONDS) if ranks else {}
        silent = {rank: answer for rank, answer in answers.items() if isinstance(answer, Silence)}
        heard = [rank for rank in answers if rank not in silent]
        self._peers.heard(heard)
        states = self._peers.processes([*silent], [self._rank, *heard], seconds=STATE_SECONDS) if silent else {}
        return [
            *(reply for rank in heard for reply in _replies(answers[rank])),
            *(self._silent(rank, _words(why, states.get(rank))) for rank, why in silent.items()),
        ]

    def _relay(self, group: range, attempt: int) -> int:
        if self._rank in group:
            return self._rank
        return group[0] if attempt == 0 else group[-1]

    def _question(
        self, ranks: Iterable[int], order: JobOrder, what: Literal["order", "pass_on"], seconds: float
    ) -> Mapping[int, Any]:
        road = self._peers.road
        if road is None:
            return {rank: Silence("pacecar is closing", was_asked=False) for rank in ranks}
        question = Question(what=what, order=order)
        return self._ask(road, ranks, question, seconds=seconds, at_once=AT_ONCE_MAX)

    def _silent(self, rank: int, words: str) -> RankReply:
        road, heard_ns = self._peers.road, self._peers.heard_ns(rank)
        return RankReply(
            rank=rank,
            state="silent",
            detail=words,
            host="" if road is None else road.doors[rank].address,
            silent_ns=None if heard_ns is None else max(0, self._now_ns() - heard_ns),
        )


def _replies(answer: RankReplies | Silence) -> Sequence[RankReply]:
    return answer.replies if isinstance(answer, RankReplies) else ()


def _words(why: Silence, state: ProcessState | None) -> str:
    """Return why a rank did not answer, by its socket and by the kernel."""
    process = process_words(state)
    if why.refused:
        has_ended = state is not None and not state.exists
        return process if has_ended else "it has left: pacecar is closed there"
    return f"{why.reason}; {process}" if process else why.reason
