"""Carries the messages of `range_messages` between ranks by all-gathers on a gloo group of our own, from one thread.

A thread may wait for the other ranks as long as it likes, as the group is not one of the job's (`side_group`).  The
ranks first rendezvous in the store, on a connection of their own where the store can be cloned, because a wait on the
job's own connection would block the job.

Gathers are numbered, one is under way at a time, and nobody waits for one.  All calls come from one thread.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pacecar.torch_internals import lacking

from ..transport.side_group import gather, job_store, make_group
from ..transport.store_rendezvous import MEET_SECONDS, keep_for_ever, meet
from .phase_sums_message import MESSAGE_WORDS

__all__ = ["CLOSE_SECONDS", "GlooTransport", "RankTransport"]

CLOSE_SECONDS = 0.3
"""How long `close` waits: at the job's end all ranks post the same gathers, so one completes by then or never."""

CLOSE_POLL_SECONDS = 0.005


class RankTransport(Protocol):
    """Carries one message of each rank to all ranks."""

    @property
    def is_busy(self) -> bool:
        """Whether a gather is under way."""
        ...

    def open(self, claim: str, name: str, rest: Callable[[float], object]) -> None:
        """Rendezvous with the other ranks, which must come with the same `claim` and `name`; may wait.

        Raises:
            RuntimeError: they do not, or the group cannot be made.
        """
        ...

    def post(self, words: Sequence[int]) -> None:
        """Send `words` to all ranks; the previous gather must have been taken."""
        ...

    def take(self) -> list[list[int]] | None:
        """Return every rank's words if the gather is complete, else None."""
        ...

    def close(self) -> None:
        """Release the group; a gather under way is abandoned."""
        ...


class GlooTransport:
    """A RankTransport over gloo, between all ranks of the job's default group."""

    def __init__(self, rank: int, world_size: int, *, meet_seconds: float = MEET_SECONDS) -> None:
        self._rank = rank
        self._world_size = world_size
        self._meet_seconds = meet_seconds
        self._group: Any = None
        self._work: Any = None
        self._last: Any = None
        # Made once: a gather that is not complete is never followed by another.  The tensors are views of python
        # arrays, because reading and writing through a tensor's own methods costs ten times as much.
        self._words = array("q", bytes(8 * MESSAGE_WORDS))
        self._heard = array("q", bytes(8 * MESSAGE_WORDS * world_size))
        self._mine = torch.frombuffer(self._words, dtype=torch.int64)
        self._all = torch.frombuffer(self._heard, dtype=torch.int64)

    @property
    def is_busy(self) -> bool:
        """Whether a gather is under way."""
        return self._work is not None

    def open(self, claim: str, name: str, rest: Callable[[float], object]) -> None:
        """Rendezvous with the other ranks and make the group."""
        reason = lacking("ranks")
        if reason is not None:
            raise RuntimeError(reason)
        store = job_store()
        meet(store, self._rank, self._world_size, claim, name=name, seconds=self._meet_seconds, rest=rest)
        self._group = make_group(store, name, self._rank, self._world_size, is_lazy=False)

    def post(self, words: Sequence[int]) -> None:
        """Send `words`, MESSAGE_WORDS of them."""
        assert self._work is None, "one gather at a time"
        assert len(words) == MESSAGE_WORDS, "messages are all of one size"
        self._words[:] = array("q", words)
        self._work = gather(self._group, self._all, self._mine)

    def take(self) -> list[list[int]] | None:
        """Return every rank's words if the gather is complete, else None.

        Raises:
            RuntimeError: the gather failed.
        """
        if self._work is None or not self._work.is_completed():
            return None
        work, self._work = self._work, None
        self._last = work  # for `close`
        work.wait()  # complete: returns or raises at once
        heard = self._heard.tolist()
        return [heard[start : start + MESSAGE_WORDS] for start in range(0, len(heard), MESSAGE_WORDS)]

    def close(self) -> None:
        """Free the group, unless a gather is under way: freeing it then would wait until every rank has joined.

        A thread of the group may still hold the last gather.  To free it, that thread needs the GIL, which is held here
        while the group waits for its threads: a deadlock.  So the gather is kept alive for ever.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(CLOSE_POLL_SECONDS)
        group, self._group = self._group, None
        work, self._work = self._work, None
        last, self._last = self._last, None
        keep_for_ever(*(gather for gather in (work, last) if gather is not None))
        if work is not None and not work.is_completed():
            keep_for_ever(group)
