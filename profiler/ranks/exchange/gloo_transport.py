"""Carries the messages of `phase_sums_message` between ranks, on a gloo group of our own (`side_group`).

Its ranks are those of one subgroup; in a small job these are all.
The group is not one of the job's, so a thread may wait for the other ranks as long as it likes.  The ranks first
rendezvous in the store, on a separate connection if the store can be cloned, because waiting on the job's connection
would block the job.

Gathers are numbered, one is under way at a time, and no rank waits for one.  All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pacecar.profiler.transport.rendezvous import MEET_SECONDS, meet, prove_address
from pacecar.profiler.transport.side_group import SideGroup, job_store
from pacecar.torch_internals import lacking

from .subgroups import Subgroup

__all__ = ["CLOSE_SECONDS", "GlooTransport", "Meeting"]

CLOSE_SECONDS = 0.3
"""How long `close` waits: at the job's end all ranks post the same gathers, so one completes by then or never."""


class Meeting(NamedTuple):
    """Where the ranks met: the job's store, and this rank's address in groups of pacecar's own."""

    store: Any
    address: str


class GlooTransport(SideGroup):
    """Carries one message of each rank to all ranks of its subgroup of the job's default group."""

    def __init__(self, rank: int, world_size: int, subgroup: Subgroup) -> None:
        super().__init__(rank - subgroup.first, subgroup.ranks, close_seconds=CLOSE_SECONDS, members=subgroup.members)
        self._job = (rank, world_size)
        self._number = subgroup.number

    def connect(self, claim: str, name: str, rest: Callable[[float], object]) -> Meeting | None:
        """Rendezvous with all ranks, which must have the same `claim` and `name`, and make the group; may wait.

        Raises:
            RuntimeError: they have not, or the group cannot be made.
        """
        reason = lacking("ranks")
        if reason is not None:
            raise RuntimeError(reason)
        store = job_store()
        meet(store, *self._job, claim, name=name, seconds=MEET_SECONDS, rest=rest)
        address = prove_address(store, *self._job, name=name, rest=rest)
        self.open(store, f"{name}/subgroup{self._number}", address, rest)
        return Meeting(store, address)
