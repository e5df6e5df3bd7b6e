"""How do the messages of `words` get from rank to rank without the job noticing?  A gloo group of our own, on a thread.

torch.distributed.new_group will not do: it is a collective that all ranks must call in the same order as the job's
own groups, so it belongs on the training thread and blocks it until the last rank attaches.  This group is built from
its class, beside torch's registry: no name is drawn, `destroy_process_group()` does not know it, and a thread may wait
for the others as long as it likes.  The ranks meet in the store first, on a connection of their own where the store
can be cloned, because a wait in the job's own connection would keep the job out of it.

Gathers are numbered, one is out at a time, and nobody waits for one.  All calls come from one thread.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pacecar.profiler.crew.words import MESSAGE_WORDS
from pacecar.profiler.meeting import MEET_SECONDS, keep_for_ever, life, meet
from pacecar.torch_internals import lacking, need

__all__ = ["CLOSE_SECONDS", "GlooRoad", "Road"]

CLOSE_SECONDS = 0.3
"""At the job's end all ranks post the same gathers, so what is out completes in this or never."""

CLOSE_POLL_SECONDS = 0.005

TIMEOUT = timedelta(hours=6)
"""A rank may be stopped for hours while a gather is out.  A gather that times out aborts gloo's connections."""


class Road(Protocol):
    """Carries one message of each rank to all ranks."""

    @property
    def is_busy(self) -> bool:
        """Whether a gather is out."""
        ...

    def open(self, claim: str, name: str, rest: Callable[[float], object]) -> None:
        """Meet the others, who must come with the same `claim` and `name`; may wait.

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
        """Let go; what is out is abandoned."""
        ...


class GlooRoad:
    """A Road over gloo, between all ranks of the job's default group."""

    def __init__(self, rank: int, world_size: int, *, meet_seconds: float = MEET_SECONDS) -> None:
        self._rank = rank
        self._world_size = world_size
        self._meet_seconds = meet_seconds
        self._group: Any = None
        self._work: Any = None
        self._last: Any = None
        # Made once: a gather that is not complete is never followed by another.  python's arrays below the tensors,
        # because what goes through a tensor's own methods costs ten times as much.
        self._words = array("q", bytes(8 * MESSAGE_WORDS))
        self._heard = array("q", bytes(8 * MESSAGE_WORDS * world_size))
        self._mine = torch.frombuffer(self._words, dtype=torch.int64)
        self._all = torch.frombuffer(self._heard, dtype=torch.int64)

    @property
    def is_busy(self) -> bool:
        """Whether a gather is out."""
        return self._work is not None

    def open(self, claim: str, name: str, rest: Callable[[float], object]) -> None:
        """Meet the others and make the group."""
        reason = lacking("ranks")
        if reason is not None:
            raise RuntimeError(reason)
        store: Any = need("torch.distributed.distributed_c10d._get_default_store")()
        if hasattr(store, "clone"):  # torch before 2.7 has none: short questions on the job's connection must do
            store = store.clone()
        meet(store, self._rank, self._world_size, claim, name=name, seconds=self._meet_seconds, rest=rest)
        store = dist.distributed_c10d.PrefixStore(f"pacecar/{life(self._world_size)}/{name}/gloo", store)
        self._group = dist.ProcessGroupGloo(store, self._rank, self._world_size, TIMEOUT)

    def post(self, words: Sequence[int]) -> None:
        """Send `words`, MESSAGE_WORDS of them."""
        assert self._work is None, "one gather at a time"
        assert len(words) == MESSAGE_WORDS, "messages are all of one size"
        self._words[:] = array("q", words)
        self._work = self._group._allgather_base(self._all, self._mine)

    def take(self) -> list[list[int]] | None:
        """Return every rank's words if they are there.

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
        """Give the group back, unless a gather is out: that would wait until every rank has joined it.

        A thread of the group may still hold the last gather.  To free it that thread needs the GIL, which is held here
        while the group waits for its threads: both would wait for ever.  So python keeps that gather.
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
