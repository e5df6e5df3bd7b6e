"""Shares one epoch's index lists among changing sets of data loader workers, and keeps the order of delivery.

A DataLoader cannot get another number of workers: its iterator owns the sampler's iterator.  A second DataLoader over
the rest of the epoch would need the sampler's position, and a sampler runs ahead of the training loop by what is in
flight. So the sampler is iterated here, once per epoch as torch would, and each set of workers draws from its own tap
on it:

    sampler ---> IndexFeed ---> IndexTap (4 workers)   shut when the other takes over; what it requested is delivered
                           '--> IndexTap (8 workers)

Every list that is out is remembered in order, with its tap.  That is the order of delivery, whatever the workers do,
and what must be requested again if a set of workers fails.

Nothing here refers to a DataLoader or its iterator: a reference cycle would keep worker processes alive until the
garbage collector ran.  How workers start and stop is in `worker_set`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from ..batch.work_share import EpochShare
from .randomness_check import SamplerWatch

__all__ = ["IndexFeed", "IndexTap"]


class IndexFeed:
    """The index lists of one epoch.

    `source` is the user's batch sampler (or sampler, if batches are not made).  `asks` is how often torch would call
    `iter(source)` for this epoch, which a sampler may count: twice when it starts worker processes, else once.  `ahead`
    keeps the sampler that many lists ahead of delivery, as the user's own setting would, for samplers whose position
    goes into checkpoints; None: as far as the workers ask.  `watch` is called around the draws after the first.
    `share` cuts what is drawn if ranks share work unevenly.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        asks: int = 1,
        ahead: int | None = None,
        watch: SamplerWatch | None = None,
        share: EpochShare | None = None,
    ) -> None:
        self._share = share
        self._source = source
        self._asks_left = asks
        self._ahead = ahead
        self._watch = watch
        self._iterator: Iterator[Any] = iter(())
        self._waiting: deque[Any] = deque()  # drawn from the sampler or taken back, and not given out
        self._out: deque[tuple[int, Any]] = deque()  # bounded by the taps: workers x prefetch_factor lists each
        self._drawn = 0
        self._delivered = 0
        self.batch_length: int | None = None
        """How many samples the last delivered batch has by its list; None if it was not made from a list."""

    @property
    def is_ahead(self) -> bool:
        """Whether the sampler is kept at the position that it would have with the user's own setting."""
        return self._ahead is not None

    def begin(self) -> None:
        """Start a new iteration of the sampler, if torch would at this point."""
        if self._asks_left > 0:
            self._asks_left -= 1
            self._iterator = iter(self._source)

    def complete(self) -> None:
        """Catch up with what torch would have done by now: a set of workers was started."""
        while self._asks_left > 0:
            self.begin()
        self._keep_ahead()

    def shuffle(self) -> None:
        """Draw the first list unless that was done: a sampler may shuffle then, and workers would have made it."""
        if self._drawn == 0:
            with contextlib.suppress(StopIteration):
                self._waiting.append(self._draw())

    def give(self, tap: int) -> Any:  # noqa: ANN401  whatever the sampler yields
        """Return the next list, for `tap`.

        Raises:
            StopIteration: there is none.
        """
        index = self._waiting.popleft() if self._waiting else self._draw()
        self._out.append((tap, index))
        return index

    def holder(self) -> int | None:
        """Return the tap through which the next batch to deliver was requested; None if nothing is out."""
        return self._out[0][0] if self._out else None

    def out(self, tap: int) -> int:
        """Return how many lists of `tap` are out."""
        return sum(1 for holder, _ in self._out if holder == tap)

    def delivered(self) -> None:
        """Record that the batch of the oldest list out has reached the training loop."""
        _, index = self._out.popleft()
        self.batch_length = len(index) if type(index) is list else None
        self._delivered += 1
        if self._share is not None:
            self._share.delivered()
        self._keep_ahead()

    def take_back(self, keep: int | None = None) -> None:
        """Give out again what is out, except what went through tap `keep`; none of it will be delivered.

        What is kept must be older than the rest, as it is while another set is being started.
        """
        taken = [index for tap, index in self._out if tap != keep]
        self._out = deque((tap, index) for tap, index in self._out if tap == keep)
        self._waiting.extendleft(reversed(taken))

    def _draw(self) -> Any:  # noqa: ANN401
        watch = self._watch if self._drawn > 0 else None  # the first draw may shuffle
        if watch is not None:
            watch.begin()
        index = next(self._iterator)
        if watch is not None:
            watch.end()
        self._drawn += 1
        return index if self._share is None else self._share.cut(index)

    def _keep_ahead(self) -> None:
        while self._ahead is not None and self._drawn < self._delivered + self._ahead:
            try:
                self._waiting.append(self._draw())
            except StopIteration:
                return


class IndexTap:
    """The sampler of one set of workers.  A shut tap gives no more lists; what went through it is still out."""

    def __init__(self, number: int, feed: IndexFeed, source: Sized, drawn: Callable[[], None]) -> None:
        self.number = number
        self.feed = feed
        self.is_open = True
        self._source = source
        self._drawn = drawn

    def __iter__(self) -> IndexTap:
        self.feed.begin()
        return self

    def __next__(self) -> Any:  # noqa: ANN401  whatever the sampler yields
        if not self.is_open:
            raise StopIteration
        index = self.feed.give(self.number)
        self._drawn()
        return index

    def __len__(self) -> int:
        return len(self._source)
