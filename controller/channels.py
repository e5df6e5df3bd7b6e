"""How do numbers get from rank to rank?  The two roads of `protocol.py` on torch's process groups, after a `meet`.

    SideRoad     numbered asynchronous gathers on a gloo group of our own, looked at and never waited for
    MainRoad     votes on the job's own group, launched at one boundary and read at the next

Both call the group's own methods: on the step path, `dist.all_reduce` and its kind cost ten times as much, in checks
and logging (100 us, with the caches of a training loop).

Left out: what the numbers mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pacecar.profiler.meeting import MEET_SECONDS, MeetingError, keep_for_ever, meet

__all__ = ["MEET_SECONDS", "MainRoad", "MeetingError", "SideRoad", "meet"]

SIDE_TIMEOUT = timedelta(minutes=30)
"""One rank may write a checkpoint for minutes while a gather is out; being late freezes, this only cleans up."""

VOTE_WORDS = 5

_MINIMUM: Any = dist.AllreduceOptions() if dist.is_available() else None
if _MINIMUM is not None:
    _MINIMUM.reduceOp = dist.ReduceOp.MIN
    if hasattr(_MINIMUM, "asyncOp"):  # since torch 2.7; before, every call was asynchronous
        _MINIMUM.asyncOp = True


class SideRoad:
    """Gathers on a gloo group of our own.  `open` is a collective of all ranks; nothing else ever waits."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._group: Any = None
        self._work: Any = None
        self._last: Any = None
        self._gathered: torch.Tensor | None = None

    def open(self) -> None:
        """Make the group; every rank of the job must do it."""
        self._group = dist.new_group(backend="gloo", timeout=SIDE_TIMEOUT)

    @property
    def is_busy(self) -> bool:
        """Whether a gather is out."""
        return self._work is not None

    def post(self, words: Sequence[int]) -> None:
        """Send `words` to all ranks; the previous gather must have been taken."""
        assert self._work is None, "one gather at a time"
        mine = torch.tensor(words, dtype=torch.int64)
        self._gathered = torch.empty(self._world_size * len(words), dtype=torch.int64)
        self._work = self._group._allgather_base(self._gathered, mine)

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
        assert self._gathered is not None, "posted"
        rows: list[list[int]] = self._gathered.view(self._world_size, -1).tolist()
        return rows

    def close(self) -> None:
        """Give the group back, which ends its threads.  A gather that is out is abandoned and its group kept.

        Giving back a group waits for its gathers: for half an hour, if another rank never joins one.  It waits for the
        group's threads as well, with the GIL held.  A thread that still holds the last gather must not be the one that
        frees it: that takes the GIL, and both would wait for ever.  So python keeps that gather.
        """
        group, self._group = self._group, None
        work, self._work = self._work, None
        last, self._last = self._last, None
        keep_for_ever(*(gather for gather in (work, last) if gather is not None))
        if work is not None and not work.is_completed():
            keep_for_ever(group)
        elif group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the job destroyed it already
                dist.destroy_process_group(group)


class MainRoad:
    """Votes on the job's own group.

    Where the group has gloo the vote is a tensor on the CPU.  Where it has NCCL alone the vote lives on the device and
    has a stream of its own, so that the training stream is not touched; the copy back is pinned and asynchronous, and
    reading waits for an event that was recorded one training step ago.
    """

    def __init__(self, group: Any = None) -> None:  # noqa: ANN401  dist.ProcessGroup, None for the default group
        self._group = group
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._event: Any = None
        self._vote = torch.zeros(VOTE_WORDS, dtype=torch.int64)
        self._on_device = self._vote
        self._work: Any = None
        self._last: Any = None

    def open(self) -> None:
        """Choose the vote's device and make its buffers; no communication.

        From here on votes go to the group that is the job's now, whatever else the job makes and calls its default.
        """
        group = self._group = self._group or dist.group.WORLD
        devices = {torch.device(d).type for d in getattr(group, "_device_types", ())}
        if "cpu" in devices or dist.get_backend(group) != "nccl":
            return
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._vote = self._vote.pin_memory()
        self._on_device = torch.zeros(VOTE_WORDS, dtype=torch.int64, device=self._device)

    @property
    def is_busy(self) -> bool:
        """Whether a vote is out."""
        return self._work is not None

    def launch(self, vote: Sequence[int]) -> None:
        """Start the all-reduce MIN of `vote`; the previous one must have been read."""
        assert self._work is None, "one vote at a time"
        group = self._group
        if self._stream is None:
            self._vote = torch.tensor(vote, dtype=torch.int64)
            self._work = group.allreduce([self._vote], _MINIMUM)
            return
        for index, word in enumerate(vote):
            self._vote[index] = word
        with torch.cuda.stream(self._stream):
            self._on_device.copy_(self._vote, non_blocking=True)
            self._work = group.allreduce([self._on_device], _MINIMUM)
            self._work.wait()  # orders our own stream after NCCL's; the host goes on
            self._vote.copy_(self._on_device, non_blocking=True)
            self._event.record()

    def read(self) -> list[int]:
        """Return the least of every rank's words; waits for the vote, which was launched one training step ago."""
        work, self._work = self._work, None
        self._last = work  # its worker thread may not have let go of it yet: see `keep_for_ever`
        if self._stream is None:
            work.wait()
        else:
            self._event.synchronize()
        return [int(word) for word in self._vote.tolist()]

    def confirm(self, *, is_done: bool) -> bool:
        """Return whether every rank says `is_done`; blocks, and is used at switches only."""
        self.launch([int(is_done)] * VOTE_WORDS)
        return self.read()[0] == 1

    def is_settled(self) -> bool:
        """Whether no vote is out, or the one that is has completed; does not wait."""
        return self._work is None or bool(self._work.is_completed())

    def close(self) -> None:
        """Abandon a vote that is out; the job's own group lives on, and its worker threads with it."""
        for work in (self._work, self._last):
            if work is not None:
                keep_for_ever(work)
        self._work = self._last = None
