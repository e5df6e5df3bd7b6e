"""Carries the messages of `phase_sums_message` between ranks, on a gloo group of our own (`side_group`).

A thread may wait for the other ranks as long as it likes, as the group is not one of the job's.  The ranks first
rendezvous in the store, on a connection of their own where the store can be cloned, because a wait on the job's own
connection would block the job.

Gathers are numbered, one is under way at a time, and nobody waits for one.  All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pacecar.torch_internals import lacking

from ...transport.side_address import prove_address
from ...transport.side_group import SideGroup, job_store
from ...transport.store_rendezvous import MEET_SECONDS, meet

__all__ = ["CLOSE_SECONDS", "GlooTransport", "RankTransport"]

CLOSE_SECONDS = 0.3
"""How long `close` waits: at the job's end all ranks post the same gathers, so one completes by then or never."""


class RankTransport(Protocol):
    """Carries one message of each rank to all ranks."""

    @property
    def is_busy(self) -> bool:
        """Whether a gather is under way."""
        ...

    def connect(self, claim: str, name: str, rest: Callable[[float], object]) -> None:
        """Rendezvous with the other ranks, which must come with the same `claim` and `name`; may wait.

        Raises:
            RuntimeError: they do not, or the group cannot be made.
        """
        ...

    def post(self, words: Sequence[int]) -> None:
        """Send `words` to all ranks; the previous gather must have been taken."""
        ...

    def receive(self) -> list[list[int]] | None:
        """Return every rank's words if the gather is complete, else None."""
        ...

    def close(self) -> None:
        """Release the group; a gather under way is abandoned."""
        ...


class GlooTransport(SideGroup):
    """A RankTransport over gloo, between all ranks of the job's default group."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, close_seconds=CLOSE_SECONDS)

    def connect(self, claim: str, name: str, rest: Callable[[float], object]) -> None:
        """Rendezvous with the other ranks and make the group."""
        reason = lacking("ranks")
        if reason is not None:
            raise RuntimeError(reason)
        store = job_store()
        meet(store, self._rank, self._world_size, claim, name=name, seconds=MEET_SECONDS, rest=rest)
        address = prove_address(store, self._rank, self._world_size, name=name, rest=rest)
        self.open(store, name, address, rest)
