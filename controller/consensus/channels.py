"""Carries the votes of `protocol` between ranks, in frames on a gloo group of pacecar's own.

A frame is what all ranks send at the same point of the training; it is read at once or a step later.  Every frame
gathers the same number of words, so frames of different kinds never mismatch.  The first word is the kind.  If it
differs between ranks, they are not at the same point: all of them read that in the same frame, and all leave.  A rank
that leaves posts a farewell frame in advance; the others read it when they send theirs, and wait for no one.
docs/decisions/0011-votes-on-a-group-of-our-own.md has the reasons.

Frames call the group's own methods: on the step path `dist.all_reduce` and the like cost ten times as much for checks
and logging (100 us with the caches of a training loop).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from pacecar.profiler.transport.rendezvous import life
from pacecar.profiler.transport.side_group import gather, make_group, release

__all__ = ["BODY_WORDS", "Frame", "LateError", "LeftError", "VoteChannel", "VoteSubject"]

BODY_WORDS = 30
"""64-bit words in a frame after its head; longer messages take several frames."""

_HEAD_WORDS = 2

POLL_SECONDS = 0.00005
POLL_SECONDS_MAX = 0.0005
"""Pauses between two polls for a frame: short at first, because it has usually arrived already."""

KEPT_FRAMES = 16
"""A thread of the group may still hold one of its latest frames; see `release`."""


class VoteSubject(IntEnum):
    """What a frame is about; ranks that send different subjects are not at the same point."""

    VOTE = 1
    SWITCH = 2
    """Every rank is about to carry out what was voted for."""
    DONE = 3
    """Whether it was carried out."""
    GRADIENTS = 4
    MEMORY = 5
    NOISE = 6
    LEAVE = 7
    """This rank sends no further frame."""
    CLOSE = 8
    """This rank sends no further frame; if all ranks close here, they go back to the proven values together."""
    SHARE = 9


_FAREWELLS = (VoteSubject.LEAVE, VoteSubject.CLOSE)


_POINTS = {
    VoteSubject.VOTE: "votes",
    VoteSubject.SWITCH: "is about to switch",
    VoteSubject.DONE: "has switched",
    VoteSubject.GRADIENTS: "compares gradients",
    VoteSubject.MEMORY: "asks whether a micro-batch fits",
    VoteSubject.NOISE: "measures the gradients' noise",
    VoteSubject.SHARE: "computes shares of the work",
}


class LeftError(Exception):
    """A rank takes no further part or is at another point.  The message names it, and every rank reads the same."""


class LateError(TimeoutError):
    """Not all ranks sent this frame within the time limit; it is still out and can be read later."""


class Frame:
    """A frame that was sent; `work` is the gather's dist.Work."""

    __slots__ = ("gathered", "is_checked", "number", "sent_at", "subject", "work")

    def __init__(self, number: int, subject: VoteSubject, gathered: torch.Tensor, work: Any) -> None:  # noqa: ANN401
        self.number = number
        self.subject = subject
        self.gathered = gathered
        self.work = work
        self.is_checked = False
        self.sent_at = time.monotonic()


class VoteChannel:
    """Frames of one size on a gloo group of pacecar's own, in the same order on all ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._group: Any = None
        self._store: Any = None
        self._sent = 0
        self._left_in: int | None = None  # the first frame that held a farewell
        self._latest: deque[Frame] = deque(maxlen=KEPT_FRAMES)

    def open(self, store: Any, name: str, address: str) -> None:  # noqa: ANN401  dist.Store
        """Make the group; every rank of the job must do so.  `store` decides where a rank gave up waiting."""
        self._group = make_group(store, f"{name}/main", self._rank, self._world_size, address=address)
        self._store = store
        self._name = name

    def post(self, subject: VoteSubject, words: Sequence[int]) -> Frame:
        """Send a frame of at most BODY_WORDS `words` without waiting.

        Raises:
            RuntimeError: the group is gone.
        """
        assert len(words) <= BODY_WORDS, "longer things take several frames"
        if self._group is None:
            raise RuntimeError("this rank has left")
        padding = [0] * (BODY_WORDS - len(words))
        mine = torch.tensor([int(subject), self._sent, *words, *padding], dtype=torch.int64)
        gathered = torch.empty(self._world_size * (_HEAD_WORDS + BODY_WORDS), dtype=torch.int64)
        frame = Frame(self._sent, subject, gathered, gather(self._group, gathered, mine))
        self._sent += 1
        self._latest.append(frame)
        return frame

    def receive(self, frame: Frame, seconds: float) -> list[list[int]]:
        """Return the words of every rank, in order of rank; wait at most `seconds` for them (0: do not wait).

        Raises:
            LateError: they have not all arrived.
            LeftError: a rank sent something else at this place.
            RuntimeError: the gather failed: a rank died.
        """
        deadline = time.monotonic() + seconds
        pause = POLL_SECONDS
        while not frame.work.is_completed():
            if self._left_in is not None and frame.number > self._left_in:
                raise LeftError("a rank takes no further part")  # that rank never joins this frame
            self._check_earlier(frame)
            if time.monotonic() >= deadline:
                raise LateError(f"not all ranks came to the same point within {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS_MAX)
        return self._rows(frame)

    def _check_earlier(self, frame: Frame) -> None:
        """Raise for an earlier frame that was not read yet: a rank that left in it never joins `frame`."""
        for earlier in self._latest:
            if earlier.number < frame.number and not earlier.is_checked and earlier.work.is_completed():
                self._rows(earlier)

    def _rows(self, frame: Frame) -> list[list[int]]:
        frame.is_checked = True
        frame.work.wait()  # complete: returns or raises at once
        rows: list[list[int]] = frame.gathered.view(self._world_size, -1).tolist()
        gone = [rank for rank, row in enumerate(rows) if row[0] in _FAREWELLS]
        if gone and any(row[0] != VoteSubject.CLOSE for row in rows):
            self._left_in = frame.number if self._left_in is None else min(self._left_in, frame.number)
            raise LeftError(f"rank {gone[0]} takes no further part")
        if len({(row[0], row[1]) for row in rows}) > 1:
            points = ", ".join(f"rank {rank} {_point(row[0])}" for rank, row in enumerate(rows[:4]))
            raise LeftError(f"the ranks are at different points of the training: {points}")
        return [row[_HEAD_WORDS:] for row in rows]

    def verdict(self, frame: Frame, *, is_complete: bool) -> bool:
        """Return whether all ranks act on `frame`: the same answer on all of them.

        A rank that waited too long and one that saw all others arrive may both be right, so the store keeps the first
        of the two answers.

        Raises:
            RuntimeError: the store is gone.
        """
        key = f"pacecar/{life(self._world_size)}/{self._name}/switch{frame.number}"
        verdict: bytes = self._store.compare_set(key, "", "go" if is_complete else "no")
        return verdict == b"go"

    def age_seconds(self, frame: Frame) -> float:
        """Return how long ago this rank sent `frame`."""
        return time.monotonic() - frame.sent_at

    def is_settled(self) -> bool:
        """Return whether all ranks have joined every frame of this rank; does not wait."""
        return all(frame.work.is_completed() for frame in self._latest)

    def leave(self) -> None:
        """Announce that this rank sends no further frame; does not wait."""
        if self._group is not None and not any(frame.subject in _FAREWELLS for frame in self._latest):
            self.post(VoteSubject.LEAVE, [])

    def close(self) -> None:
        """Free the group; it is kept while a frame is out that others have to join (`release`)."""
        group, self._group = self._group, None
        self._store = None
        release(group, [frame.work for frame in self._latest])


def _point(word: int) -> str:
    return _POINTS.get(word, "is elsewhere")  # type: ignore[call-overload,no-any-return]
