"""When does a rank say something to the others, and what have all of them said?  Rows out, complete ranges in.

Gathers are collectives: each needs a message of every rank.  But ranks do not wake at the same moment, so one may have
cut a range that another has not.  So a message holds whatever ranges are over since the last one, perhaps none, and a
range is complete once it came from all.  A gather costs each rank a millisecond of processor, so rows wait for each
other: a rank posts when a *batch* is over, whose last range is the same for all (see `ranges`), or at once when its
steps take longer or shorter than they used to.  Who holds up others makes
the steps of all ranks longer, so then all ranks hurry.  A rank also posts when others owe it ranges, which they can
send only together with a message of its own.

On a noisy machine every range is unusual, and hurrying for ever is not within the overhead budget.  So each gather
that is no batch's takes a token, one comes back in three times `gather_seconds`, and without one there is no hurry.

Pure but for the road, which is passed in.  Left out: what the rows say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from .gloo_transport import RankTransport
from .noise import Usual
from .phase_sums_message import ROWS_MAX, HostPressure, RankRange, decode, encode
from .totals import LedgerTotals

__all__ = ["GATHER_SECONDS_MIN", "POLLS_SECONDS", "GatherSchedule"]

GATHER_SECONDS_MIN = 0.1
"""Between two gathers, unless a batch waits: a person sees a straggler no sooner."""

TOKENS_MAX = 32
TOKENS_MIN = 6
TOKENS_SECONDS = 40.0
"""Gathers in a hurry after a quiet time, as many as are due in so many seconds: a finding and its end take ten."""

REFILL_RATIO = 0.35
"""Of a token that comes back while one gather is due; hurry is within the budget too."""

CALM_RANGES = 8
"""A job's first ranges are all unusual, and nobody is named so early: no hurry about them."""

ALARM_TOKENS = 0.25
"""To look at steps at once, because they may be unusual, costs so much of a gather."""

HURRY_RANGES = 4
"""Ranges told at once after the last unusual one: three late ranges make a finding."""

POLLS_SECONDS = (0.008, 0.03)
"""After a post the others' rows are there in a few milliseconds; if not, they come when another range is over."""


class GatherSchedule:
    """One rank's side of the gathers over `road`, between `world_size` ranks, on average `gather_seconds` apart."""

    def __init__(
        self,
        road: RankTransport,
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
        self._road = road
        self._now_ns = now_ns
        self._pending: deque[RankRange] = deque()  # at most ranges.LAG, which are all that may be cut
        self._heard: list[deque[RankRange]] = [deque() for _ in range(world_size)]  # of each rank at most as many
        self.may_hurry = True
        """Whether there is budget for more than what is due."""
        self.gathers = 0
        """How many are complete."""
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
        """The ranks whose last message has come."""
        self.totals: list[LedgerTotals | None] = [None] * world_size
        """The latest ledger of each rank."""

    @property
    def poll_seconds(self) -> float | None:
        """How long to wait before the next look for a gather that is out; None: no sooner than for anything else."""
        if not self.is_out or self._polls == len(POLLS_SECONDS):
            return None
        self._polls += 1
        return POLLS_SECONDS[self._polls - 1]

    @property
    def hurries(self) -> bool:
        """Whether every range is told as soon as it is over."""
        return self._hurry > 0 and self.may_hurry and self._count_tokens() >= 1.0

    def alarm(self) -> bool:
        """Return whether steps that may be unusual should be looked at now, and pay for it; not while it hurries."""
        if self.hurries or not self.may_hurry or self._added <= CALM_RANGES or self._count_tokens() < 1.0:
            return False
        self._tokens -= ALARM_TOKENS
        return True

    @property
    def has_pending(self) -> bool:
        """Whether rows wait."""
        return bool(self._pending)

    @property
    def pause_seconds(self) -> float:
        """How long no gather is due."""
        if self._posted_ns is None:
            return 0.0
        return max(0.0, GATHER_SECONDS_MIN - (self._now_ns() - self._posted_ns) / 1e9)

    def add(self, row: RankRange, *, ends_batch: bool = False) -> None:
        """Tell `row` with the next messages, and soon if it `ends_batch`."""
        self._pending.append(row)
        self._is_batch = self._is_batch or ends_batch
        if row.medians is None:
            return
        self._added += 1
        is_unusual = self._walls.add(row.medians["wall"]) and self._added > CALM_RANGES
        self._hurry = HURRY_RANGES if is_unusual else max(0, self._hurry - 1)

    def take(self) -> Iterator[list[RankRange]]:
        """Yield the rows of each range that is complete now, in order of rank.

        Raises:
            WordsError: a rank speaks otherwise.
            RuntimeError: the gather failed.
        """
        words = self._road.take() if self.is_out else None
        if words is None:
            return
        number, self.is_out = self.gathers, False
        self.gathers += 1
        for rank, mine in enumerate(words):
            message = decode(number, mine)
            self._heard[rank].extend(message.rows)
            self.totals[rank] = message.totals or self.totals[rank]
            if message.leaves:
                self.left.append(rank)
        while all(self._heard):
            self._complete += 1
            yield [rows.popleft() for rows in self._heard]

    @property
    def is_due(self) -> bool:
        """Whether there is something to be told now."""
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
        leaves: bool = False,
    ) -> None:
        """Send what is to be told; `leaves`: for the last time.  No gather may be out.

        `around` and `is_throttled` are of the time since the last message, and so of all rows in this one.
        """
        rows = [
            msgspec.structs.replace(self._pending.popleft(), around=around, is_throttled=is_throttled)
            for _ in range(min(ROWS_MAX, len(self._pending)))
        ]
        self._sent += len(rows)
        if not self._is_batch:
            self._tokens = max(0.0, self._count_tokens() - 1.0)
        self._is_batch = self._is_batch and bool(self._pending)
        self._road.post(encode(self.gathers, rows, leaves=leaves, totals=totals))
        self.is_out, self._posted_ns, self._polls = True, self._now_ns(), 0
