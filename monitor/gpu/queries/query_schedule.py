"""Chooses the queries of a tick: those of every tick, and then the longest overdue, within a number of driver calls.

A fixed cadence (every tenth tick, all of it) makes nine cheap ticks and an expensive one, which is late.  Filling each
tick up to the same bound makes all ticks alike, and what does not fit is only asked a little later.

It also keeps the last answer of each query, which stands until it is asked again.  One that is refused is asked ever
less often (`refusals`), and then takes its turn among the slow ones, whatever its rate.
"""

from __future__ import annotations

from collections.abc import Iterable

from pacecar.records import Sample

from .queries import MINUTES_5, NvmlQuery
from .refusals import Attempts, RefusedNumbers

__all__ = ["QuerySchedule", "ScheduledQuery"]


class ScheduledQuery:
    """A query with its last answer."""

    def __init__(self, question: NvmlQuery) -> None:
        self.question = question
        self.samples: tuple[Sample, ...] = ()
        self.due_ns = 0
        """When the answer is stale (monotonic); at first it is due since the clock's zero."""
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
        """Keep the answer."""
        self.samples, self.is_unasked, self.is_backed_off = tuple(samples), False, False
        self._attempts.answered()
        self.due_ns = now_ns + self.question.stale_ns

    def failed(self, now_ns: int) -> None:
        """Forget the answer, because what was not read now is missing."""
        self._forget(now_ns, self._attempts.failed())

    def refused(self, now_ns: int) -> None:
        """Forget the answer, because the driver calls the query unsupported."""
        self._forget(now_ns, self._attempts.refused())

    def _forget(self, now_ns: int, wait_ns: int) -> None:
        self.samples, self.is_unasked, self.is_backed_off = (), False, self._attempts.is_backed_off
        self.due_ns = now_ns + max(min(self.question.stale_ns, MINUTES_5), wait_ns)


class QuerySchedule:
    """The queries of one GPU."""

    def __init__(self, questions: Iterable[NvmlQuery] = ()) -> None:
        self._asked: dict[str, ScheduledQuery] = {}
        self.add(questions)

    def add(self, questions: Iterable[NvmlQuery]) -> None:
        """Add `questions`; those that are known by name start over."""
        self._asked.update({question.name: ScheduledQuery(question) for question in questions})
        self._sort()

    def _sort(self) -> None:
        self._fast = [asked for asked in self._asked.values() if asked.question.stale_ns == 0]
        self._slow = [asked for asked in self._asked.values() if asked.question.stale_ns]
        self._may_be_unasked = True

    def fast_calls(self) -> int:
        """Return the driver calls of the queries that are made at every tick."""
        return sum(asked.question.calls for asked in self._fast if not asked.is_backed_off)

    def refused(self) -> RefusedNumbers:
        """Return how many queries are refused."""
        backed_off = [asked.was_answered for asked in self._asked.values() if asked.is_backed_off]
        return RefusedNumbers(backed_off.count(False), backed_off.count(True))

    def has_unasked(self) -> bool:
        """Return whether a query was never made."""
        self._may_be_unasked = self._may_be_unasked and any(asked.is_unasked for asked in self._asked.values())
        return self._may_be_unasked

    def value_of(self, name: str) -> float | None:
        """Return the number that the query of that name was last answered with; None when there is none."""
        asked = self._asked.get(name)
        return asked.samples[0].value if asked is not None and asked.samples else None

    def clear(self) -> None:
        """Forget all queries and answers."""
        self._asked.clear()
        self._sort()

    def due(self, now_ns: int, calls: int | None) -> list[ScheduledQuery]:
        """Return what to ask now with at most `calls` driver calls (None: as many as it takes)."""
        chosen = [asked for asked in self._fast if not asked.is_backed_off]
        left = None if calls is None else calls - sum(asked.question.calls for asked in chosen)
        slow = [asked for asked in self._slow if asked.due_ns <= now_ns]
        slow += [asked for asked in self._fast if asked.is_backed_off and asked.due_ns <= now_ns]
        for asked in sorted(slow, key=lambda asked: asked.due_ns):  # among equals in the order of the table
            if left is None or asked.question.calls <= left:
                chosen.append(asked)
                left = None if left is None else left - asked.question.calls
            else:
                break  # the longest overdue goes first, also when something cheaper behind it would fit
        return chosen

    def samples(self) -> list[Sample]:
        """Return the answers that stand."""
        return [sample for asked in self._asked.values() for sample in asked.samples]
