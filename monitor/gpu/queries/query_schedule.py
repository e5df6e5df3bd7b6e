"""Chooses the queries of a tick: those of every tick, and then the longest overdue, within a number of driver calls.

A fixed cadence (every tenth tick, all of it) makes nine cheap ticks and an expensive one, which is late.  Filling each
tick up to the same bound makes all ticks alike, and what does not fit is only asked a little later.

It also keeps the state of each query: its last answer, which stands until it is asked again, and whether the driver
ever answered it.  A query that was never answered and is called unsupported is dropped at once; one that was answered
before may be refused for a moment (MIG is being set up), and is dropped when the refusals do not end.  One that only
ever failed is dropped as well in the end, or a driver with one broken number would look broken for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from pacecar.records import Sample

from .queries import NvmlQuery

__all__ = ["FAILURES_MAX", "REFUSALS_MAX", "QuerySchedule", "ScheduledQuery"]

REFUSALS_MAX = 3
"""Refusals in a row after which a query that was answered before is dropped."""

FAILURES_MAX = 10
"""Failures after which a query that was never answered is dropped, whatever the driver calls them."""


class ScheduledQuery:
    """A query with its last answer."""

    def __init__(self, question: NvmlQuery) -> None:
        self.question = question
        self.samples: tuple[Sample, ...] = ()
        self.due_ns = 0
        """When the answer is stale (monotonic); at first it is due since the clock's zero."""
        self.is_unasked = True
        """Whether it was never asked."""
        self._was_answered = False
        self._refusals = self._failures = 0

    def answered(self, samples: Iterable[Sample], now_ns: int) -> None:
        """Keep the answer."""
        self.samples = tuple(samples)
        self._was_answered, self._refusals, self.is_unasked = True, 0, False
        self.due_ns = now_ns + self.question.stale_ns

    def failed(self, now_ns: int) -> bool:
        """Forget the answer, because what was not read now is missing; return whether to ask no more."""
        self.samples, self.is_unasked = (), False
        self.due_ns = now_ns + self.question.stale_ns
        self._failures += 1
        return not self._was_answered and self._failures >= FAILURES_MAX

    def refused(self, now_ns: int) -> bool:
        """Note that the driver calls it unsupported; return whether to ask no more."""
        self.failed(now_ns)
        self._refusals += 1
        return not self._was_answered or self._refusals >= REFUSALS_MAX


class QuerySchedule:
    """The queries of one GPU."""

    def __init__(self, questions: Iterable[NvmlQuery] = ()) -> None:
        self._asked: dict[str, ScheduledQuery] = {}
        self.add(questions)

    def add(self, questions: Iterable[NvmlQuery]) -> None:
        """Add `questions`; those that are known by name start over."""
        self._asked.update({question.name: ScheduledQuery(question) for question in questions})
        self._sort()

    def drop(self, name: str) -> None:
        """Drop the query of that name, and forget its answer."""
        self._asked.pop(name, None)
        self._sort()

    def _sort(self) -> None:
        self._fast = [asked for asked in self._asked.values() if asked.question.stale_ns == 0]
        self._slow = [asked for asked in self._asked.values() if asked.question.stale_ns]
        self._fast_calls = sum(asked.question.calls for asked in self._fast)
        self._may_be_unasked = True

    def fast_calls(self) -> int:
        """Return the driver calls of the queries of every tick."""
        return self._fast_calls

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
        chosen = list(self._fast)
        left = None if calls is None else calls - self._fast_calls
        slow = [asked for asked in self._slow if asked.due_ns <= now_ns]
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
