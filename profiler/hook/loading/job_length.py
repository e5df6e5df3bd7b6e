"""Decides whether the job is expected to end within a minute, so that an early exact window is not worth its cost.

Sources, in this order: the seconds or steps expected by the configuration, and the length of the loader that the loop
trains from.  The number of epochs is unknown, so a job in its first epoch is expected to end with it, and a job in a
later one to go on.  If nothing is known, the job is expected to be long.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SHORT_JOB_NS", "JobLength"]

SHORT_JOB_NS = 60_000_000_000
"""The ledger of a shorter job is not worth the second that it may cost."""


class JobLength:
    """The expected length of one job; used on the training thread."""

    def __init__(self, expected_seconds: float | None = None, expected_steps: int | None = None) -> None:
        self._expected_ns = None if expected_seconds is None else int(expected_seconds * 1e9)
        self._expected_steps = expected_steps
        self._last: int | None = None  # the iterator of the last batch
        self._first: int | None = None  # the iterator in use at the first call of `is_short`
        self._batches: int | None = None
        self._drawn = 0

    def drew(self, iterator: Any) -> None:  # noqa: ANN401  of any loader
        """Record that the loop has a batch from `iterator`."""
        key = id(iterator)
        if self._first is None and key != self._last:
            self._drawn, self._batches = 0, _length(iterator)
        self._last = key
        if self._first in (None, key):
            self._drawn += 1

    def is_short(self, step: int, step_ns: int) -> bool:
        """Return whether the job is expected to last at most SHORT_JOB_NS, after `step` steps that took `step_ns` each.

        Call it when a step has ended, so that the last batch was one to train on.
        """
        if self._expected_ns is not None:
            return self._expected_ns <= SHORT_JOB_NS
        if self._expected_steps is not None:
            return self._expected_steps * step_ns <= SHORT_JOB_NS
        self._first = self._last if self._first is None else self._first
        if self._batches is None or self._last != self._first or self._drawn > self._batches:
            return False  # without a known length, or in a later epoch
        batches_per_step = max(1.0, self._drawn / max(1, step))
        return self._batches / batches_per_step * step_ns <= SHORT_JOB_NS


def _length(iterator: Any) -> int | None:  # noqa: ANN401  of any loader
    try:
        return len(iterator)
    except TypeError:  # a generator, a stream
        return None
