"""Decides when a rank sends its ranges to the other ranks, and assembles the ranges that all ranks have sent.

Gathers are collectives: each needs a message from every rank.  But ranks do not wake at the same moment, so one may
have cut a range that another has not.  So a message holds all ranges that ended since the last one, perhaps none, and a
range is complete once it came from all ranks.

A gather costs each rank a millisecond of processor time, so rows are batched.  A rank posts when a *batch* is over,
whose last range is the same on all ranks (see `step_partition`), or at once when its steps take longer or shorter than
they used to.  A rank that holds up others makes the steps of all ranks longer, so then all ranks post at once.  A rank
also posts when others owe it ranges, because they can send those only together with a message of its own.

On a noisy machine every range is unusual, and posting at once all the time would exceed the overhead budget.  So a
token bucket limits it: each gather that is not a batch's takes a token, one token comes back in three times
`gather_seconds`, and without a token nothing is posted early.

Pure except for the transport, which is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import msgspec

from ..cusum import Usual
from .gloo_transport import GlooTransport
from .phase_sums_message import ROWS_MAX, HostPressure, RankRange, decode, encode
from .totals import LedgerTotals

__all__ = ["GATHER_SECONDS_MIN", "POLLS_SECONDS", "GatherSchedule"]

GATHER_SECONDS_MIN = 0.1
"""The least time between two gathers unless a batch is over; fast enough for a reader of the log."""

TOKENS_MAX = 32
TOKENS_MIN = 6
TOKENS_SECONDS = 40.0
"""Size of the token bucket: the early gathers possible after a quiet time, between TOKENS_MIN and TOKENS_MAX.

It holds those that are due in TOKENS_SECONDS; reporting a straggler and its end takes ten.
"""

REFILL_RATIO = 0.35
"""The part of a token that comes back in `gather_seconds`, so that early gathers stay within the budget too."""

CALM_RANGES = 8
"""The first ranges do not trigger an early gather: all are unusual, and no rank is named so early."""

ALARM_TOKENS = 0.25
"""The cost, in tokens, of inspecting steps at once because they may be unusual."""

HURRY_RANGES = 4
"""Ranges that are sent at once after the last unusual one; three late ranges name a straggler."""

POLLS_SECONDS = (0.008, 0.03)
"""Waits before checking a gather's result: it arrives in a few milliseconds or when the next range is over."""


class GatherSchedule:
    """One rank's side of the gathers over `transport`, on average `gather_seconds` apart."""

    def __init__(
        self,
        transport: GlooTransport,
        world_size: int,
        now_ns: Callable[[], int],
        *,
        gather_seconds: float = GATHER_SECONDS_MIN,
    ) -> None:
        self._gather_ns = round(gather_seconds * 1e9)
        self._tokens_max = min(TOKENS_MAX, max(TOKENS_MIN, TOKENS_SECONDS / gather_seconds))
        self._tokens = float(self._tokens_max)
        self._added = 0
        self._tokens_ns = now_ns()
        self._transport = transport
        self._now_ns = now_ns
        self._pending: deque[RankRange] = deque()  # at most step_partition.LAG, all that may be cut
        self._received: list[deque[RankRange]] = [deque() for _ in range(world_size)]  # of each rank at most as many
        self.may_hurry = True
        """Whether the overhead budget allows gathers before they are due."""
        self.gathers = 0
        """How many gathers are complete."""
        self._walls = Usual()
        self._hurry = 0
        self._is_batch = False
        self._posted_ns: int | None = None
        self._polls = 0
        self._sent = 0
        self._complete = 0
        self.is_out = False
        """Whether a gather is under way."""
        self.left: list[int] = []
        """The ranks that have sent their last message."""
        self.totals: list[LedgerTotals | None] = [None] * world_size
        """The latest ledger of each rank."""

    @property
    def poll_seconds(self) -> float | None:
        """How long to wait before the next check of a gather under way; None if it needs no extra check."""
        if not self.is_out or self._polls == len(POLLS_SECONDS):
            return None
        self._polls += 1
        return POLLS_SECONDS[self._polls - 1]

    @property
    def hurries(self) -> bool:
        """Whether every range is sent as soon as it is over."""
        return self._hurry > 0 and self.may_hurry and self._count_tokens() >= 1.0

    def alarm(self) -> bool:
        """Return whether to inspect steps that may be unusual now, and charge for it; False while `hurries`."""
        if self.hurries or not self.may_hurry or self._added <= CALM_RANGES or self._count_tokens() < 1.0:
            return False
        self._tokens -= ALARM_TOKENS
        return True

    @property
    def has_pending(self) -> bool:
        """Whether rows wait to be sent."""
        return bool(self._pending)

    @property
    def pause_seconds(self) -> float:
        """How long until a gather may be due."""
        if self._posted_ns is None:
            return 0.0
        return max(0.0, GATHER_SECONDS_MIN - (self._now_ns() - self._posted_ns) / 1e9)

    def add(self, row: RankRange, *, ends_batch: bool = False) -> None:
        """Queue `row` for the next messages; if it `ends_batch`, a message is due."""
        self._pending.append(row)
        self._is_batch = self._is_batch or ends_batch
        if row.medians is None:
            return
        self._added += 1
        is_unusual = self._walls.add(row.medians["wall"]) and self._added > CALM_RANGES
        self._hurry = HURRY_RANGES if is_unusual else max(0, self._hurry - 1)

    def receive(self) -> Iterator[list[RankRange]]:
        """Yield the rows of each range that is complete now, in order of rank.

        Raises:
            RangeMessageError: a rank's message cannot be decoded or is not the one that was due.
            RuntimeError: the gather failed.
        """
        words = self._transport.receive() if self.is_out else None
        if words is None:
            return
        number, self.is_out = self.gathers, False
        self.gathers += 1
        for rank, mine in enumerate(words):
            message = decode(number, mine)
            self._received[rank].extend(message.rows)
            self.totals[rank] = message.totals or self.totals[rank]
            if message.leaves:
                self.left.append(rank)
        while all(self._received):
            self._complete += 1
            yield [rows.popleft() for rows in self._received]

    @property
    def is_due(self) -> bool:
        """Whether a message should be sent now."""
        if self.is_out:
            return False
        if self._is_batch:
            return True
        if self.pause_seconds:
            return False
        return self._sent > self._complete or bool(self._pending and self.hurries)

    def _count_tokens(self) -> float:
        now_ns = self._now_ns()
        self._tokens = min(self._tokens_max, self._tokens + REFILL_RATIO * (now_ns - self._tokens_ns) / self._gather_ns)
        self._tokens_ns = now_ns
        return self._tokens

    def post(
        self,
        around: HostPressure,
        *,
        totals: LedgerTotals | None = None,
        is_throttled: bool | None = None,
        waited: Mapping[str, float] | None = None,
        leaves: bool = False,
    ) -> None:
        """Send the queued rows; `leaves`: this is the rank's last message.  No gather may be under way.

        `around`, `is_throttled` and `waited` describe the time up to now, and so apply to all rows in this message.
        """
        rows = [
            msgspec.structs.replace(self._pending.popleft(), around=around, is_throttled=is_throttled, waited=waited)
            for _ in range(min(ROWS_MAX, len(self._pending)))
        ]
        self._sent += len(rows)
        if not self._is_batch:
            self._tokens = max(0.0, self._count_tokens() - 1.0)
        self._is_batch = self._is_batch and bool(self._pending)
        self._transport.post(encode(self.gathers, rows, leaves=leaves, totals=totals))
        self.is_out, self._posted_ns, self._polls = True, self._now_ns(), 0
