"""Estimates how many rows a recording has while it goes on, which torch's profiler does not say.

The rows of a step were counted shortly before (`cross_rank_window`).  Steps that need more processor time than those
just before the recording may have more rows, at most one per RECORDED_NS: so much time an operator takes at the least,
while it is recorded.  The estimate is high where operators have become slower rather than more.

Pure except for the processor's clock, which is passed in.
"""

from __future__ import annotations

from collections.abc import Callable

from pacecar.profiler.windows.window_price import DENSEST_NS

__all__ = ["SLOWED_ROW_NS", "RowWatch"]

SLOWED_ROW_NS = 2_000
"""How much slower the operator of a row is while it is recorded."""

RECORDED_NS = DENSEST_NS + SLOWED_ROW_NS


class RowWatch:
    """The steps before a recording and in it; `clock_ns` is the processor time of the threads that write rows."""

    def __init__(self, step_rows: int, clock_ns: Callable[[], int]) -> None:
        self._step_rows = step_rows
        self._clock_ns = clock_ns
        self._before = 0
        self._begun_ns: int | None = None
        self._step_ns: int | None = None

    def passed(self) -> None:
        """A boundary passed, and no step is recorded yet."""
        now_ns = self._clock_ns()
        if self._begun_ns is None:
            self._begun_ns = now_ns
            return
        self._before += 1
        self._step_ns = (now_ns - self._begun_ns) // self._before

    @property
    def is_ready(self) -> bool:
        """Whether a step was seen before the recording."""
        return self._step_ns is not None

    def begin(self) -> None:
        """Watch the recording that begins now."""
        self._begun_ns = self._clock_ns()

    def rows(self, steps: int) -> int:
        """Return how many rows `steps` steps of the recording have at most; the last may be unfinished."""
        assert self._begun_ns is not None, "begun"
        assert self._step_ns is not None, "ready"
        usual_ns = steps * (self._step_ns + SLOWED_ROW_NS * self._step_rows)
        return steps * self._step_rows + max(0, self._clock_ns() - self._begun_ns - usual_ns) // RECORDED_NS
