"""Ranks of a simulated job that pass orders on to each other by calls."""

from __future__ import annotations

from collections import Counter

import msgspec

from pacecar.clock import NS_PER_SECOND
from pacecar.process_state import ProcessIdentity
from pacecar.profiler.hangs.account_road import Door, RankReplies, Road, Silence
from pacecar.profiler.orders.passing_on import OrderPassing
from pacecar.profiler.ranks.exchange.subgroups import subgroup_of
from pacecar.records import Knobs
from pacecar.records.hangs import ProcessState
from pacecar.records.job_orders import JobOrder, RankReply

__all__ = ["HEARD_NS", "NOW_NS", "ORDER", "SimulatedJob"]

ORDER = JobOrder(id="1", action="show", rank_uid=0)
NOW_NS = 100 * NS_PER_SECOND
HEARD_NS = 93 * NS_PER_SECOND


class SimulatedJob:
    """Ranks that ask each other by calls: `stopped` ones never answer, and cost who asks them its whole patience."""

    def __init__(self, ranks: int, stopped: frozenset[int] = frozenset()) -> None:
        process = ProcessIdentity(host="h", pid=1, thread=1, began=1)
        self.road = Road("token", tuple(Door(f"10.0.{rank // 8}.1", 1, process) for rank in range(ranks)))
        self.ranks, self.stopped = ranks, stopped
        self.asked: Counter[int] = Counter()
        """Questions that each rank has sent."""
        self.bytes = self.largest = 0
        self.seconds = 0.0
        """That the asker of all waited for relays in vain."""

    # --- the other ranks, as each sees them ---------------------------------------------------------

    def heard(self, ranks) -> None:
        """Nothing is kept."""

    def heard_ns(self, rank):
        return HEARD_NS

    def processes(self, silent, heard, *, seconds):
        return {rank: ProcessState(pid=rank + 1, state="T") for rank in silent}

    # ------------------------------------------------------------------------------------------------

    def passing(self, rank: int) -> OrderPassing:
        def ask(road, ranks, question, *, seconds, at_once):
            ranks = list(ranks)
            assert len(ranks) <= at_once, "one after the other would take longer"
            self.asked[rank] += len(ranks)
            answers = {other: self._answer(other, question, seconds) for other in ranks}
            if question.what == "pass_on" and any(isinstance(answer, Silence) for answer in answers.values()):
                self.seconds += seconds  # once for all: they are asked side by side
            return answers

        own = RankReply(
            rank=rank, host=f"node{rank // 8:03}.cluster.example", step=123456, phase="backward_tail",
            silent_ns=123456789, pace_ns=234567890, knobs=Knobs(3, {"micro_batch": 8, "bucket_bytes": 2**25}),
        )  # fmt: skip
        group = subgroup_of(rank, self.ranks)
        return OrderPassing(self, rank, self.ranks, group, lambda _: own, lambda: NOW_NS, ask=ask)

    def _answer(self, rank, question, seconds):
        if rank in self.stopped:
            return Silence(f"no answer within {seconds:g} s")
        passing = self.passing(rank)
        replies = passing.to_subgroup(ORDER) if question.what == "pass_on" else [passing.to_one(rank, ORDER)]
        size = len(msgspec.msgpack.encode(RankReplies(tuple(replies))))
        self.bytes += size
        self.largest = max(self.largest, size)
        return RankReplies(tuple(replies))
