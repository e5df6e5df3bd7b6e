"""Chooses the queries of a tick: those of every tick, then the longest overdue, within a number of driver calls.

A fixed cadence (everything at every tenth tick) makes one expensive tick, which is late.  Filling each tick up to the
same bound makes all ticks alike, and what does not fit is asked a little later.

It also keeps the last answer of each query, which is served until the query runs again.  A refused query is asked less
and less often (`refusals`), and queues with the slow ones, whatever its rate.
"""

from __future__ import annotations

from collections.abc import Iterable

from pacecar.records import Sample

from .queries import MINUTES_5, NvmlQuery
from .refusals import Attempts, RefusedNumbers

__all__ = ["QuerySchedule", "ScheduledQuery"]


class ScheduledQuery:
    """A query with its last answer."""

    def __init__(self, query: NvmlQuery) -> None:
        self.query = query
        self.samples: tuple[Sample, ...] = ()
        self.due_ns = 0
        """When the answer is stale (monotonic); at first 0, so it is due at once."""
        self.is_unasked = True
        """Whether it was never asked."""
        self.is_backed_off = False
        """Whether it is refused, and therefore asked less often."""
        self._attempts = Attempts()

    @property
    def was_answered(self) -> bool:
        """Whether the driver ever answered it."""
        return self._attempts.was_answered

    def answered(self, samples: Iterable[Sample], now_ns: int) -> None:
        """Keep the answer; a sample equal to the previous one stays the same object, which saves work elsewhere."""
        answer = tuple(samples)
        if len(answer) == len(self.samples):
            answer = tuple([old if old == new else new for old, new in zip(self.samples, answer, strict=True)])
        self.samples, self.is_unasked, self.is_backed_off = answer, False, False
        self._attempts.answered()
        self.due_ns = now_ns + self.query.stale_ns

    def failed(self, now_ns: int) -> None:
        """Drop the answer, because what was not read now is missing."""
        self._forget(now_ns, self._attempts.failed())

    def refused(self, now_ns: int) -> None:
        """Drop the answer, because the driver does not support the query."""
        self._forget(now_ns, self._attempts.refused())

    def _forget(self, now_ns: int, wait_ns: int) -> None:
        self.samples, self.is_unasked, self.is_backed_off = (), False, self._attempts.is_backed_off
        self.due_ns = now_ns + max(min(self.query.stale_ns, MINUTES_5), wait_ns)


class QuerySchedule:
    """The queries of one GPU."""

    def __init__(self, queries: Iterable[NvmlQuery] = ()) -> None:
        self._asked: dict[str, ScheduledQuery] = {}
        self.add(queries)

    def add(self, queries: Iterable[NvmlQuery]) -> None:
        """Add `queries`; those with a known name start over."""
        self._asked.update({query.name: ScheduledQuery(query) for query in queries})
        self._sort()

    def _sort(self) -> None:
        self._fast = [asked for asked in self._asked.values() if asked.query.stale_ns == 0]
        self._slow = [asked for asked in self._asked.values() if asked.query.stale_ns]
        self._may_be_unasked = True

    def fast_calls(self) -> int:
        """Return the driver calls of the queries of every tick."""
        return sum(asked.query.calls for asked in self._fast if not asked.is_backed_off)

    def detail_calls(self) -> int:
        """Return the driver calls of the queries of every tick that a tick without details leaves out."""
        return sum(asked.query.calls for asked in self._fast if asked.query.is_detail and asked.samples)

    def refused(self) -> RefusedNumbers:
        """Return how many queries are refused."""
        backed_off = [asked.was_answered for asked in self._asked.values() if asked.is_backed_off]
        return RefusedNumbers(backed_off.count(False), backed_off.count(True))

    def has_unasked(self) -> bool:
        """Return whether any query was never asked."""
        self._may_be_unasked = self._may_be_unasked and any(asked.is_unasked for asked in self._asked.values())
        return self._may_be_unasked

    def value_of(self, name: str) -> float | None:
        """Return the last number that the query of that name returned; None if there is none."""
        asked = self._asked.get(name)
        return asked.samples[0].value if asked is not None and asked.samples else None

    def clear(self) -> None:
        """Forget all queries and answers."""
        self._asked.clear()
        self._sort()

    def due(self, now_ns: int, calls: int | None, *, with_details: bool = True) -> list[ScheduledQuery]:
        """Return what to ask now with at most `calls` driver calls (None: without a limit).

        Without details this leaves out the queries of every tick whose last answer may be served again.
        """
        chosen = [asked for asked in self._fast if not asked.is_backed_off]
        if not with_details:
            chosen = [asked for asked in chosen if not (asked.query.is_detail and asked.samples)]
        left = None if calls is None else calls - sum(asked.query.calls for asked in chosen)
        slow = [asked for asked in self._slow if asked.due_ns <= now_ns]
        slow += [asked for asked in self._fast if asked.is_backed_off and asked.due_ns <= now_ns]
        for asked in sorted(slow, key=lambda asked: asked.due_ns):  # equals stay in the order of the table
            if left is None or asked.query.calls <= left:
                chosen.append(asked)
                left = None if left is None else left - asked.query.calls
            else:
                break  # the longest overdue goes first, even if a cheaper one would fit
        return chosen

    def samples(self) -> list[Sample]:
        """Return the answers to serve."""
        return [sample for asked in self._asked.values() for sample in asked.samples]
