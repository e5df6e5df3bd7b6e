"""May the hook afford the next window?

"Profiling is cheap" is a belief; the budget is a measurement.  Everything that pacecar costs the job is added up: its
own code on the step path, a window's start, stop and reading, and how much slower the profiled step itself was than the
recent steps that were not profiled (never counted as a gain: a step that was fast by luck pays nothing back).  A window
opens only while all that, with the predicted price of the next window, stays within the ratio that the user gave.

Ranks should profile the same step, as two disturbed steps slow a synchronous job twice.  Nobody asks the others for
that: windows open only on a grid of step numbers, which is the same everywhere.

A ratio of 1 is no limit.  Pure: numbers in, a yes or no out.
"""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Budget"]

RECENT_STEPS = 32
"""Steps whose median is "as usual": long enough to be steady, short enough to follow the job."""

FIRST_WINDOW_NS = 5_000_000
"""Predicted price before any was taken: start 0.5 ms, 1000 events at 4 us."""

GRID_PARTS = 10
"""A window that could not be afforded is tried again after a tenth of the interval."""


class Budget:
    """Adds up wall time and pacecar's cost, and says when a window may open."""

    def __init__(self, ratio: float, *, warmup_steps: int, interval_steps: int) -> None:
        self._ratio = ratio
        self._warmup_steps = warmup_steps
        self._interval_steps = interval_steps
        self._grid_steps = max(1, interval_steps // GRID_PARTS)
        self._wall_ns = 0
        self._cost_ns = 0
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)
        self._window_ns: deque[int] = deque(maxlen=4)
        self._requested = False
        self._last_window: int | None = None
        self.windows = 0

    @property
    def cost_ns(self) -> int:
        """What pacecar cost the job so far, slowed steps included."""
        return self._cost_ns

    @property
    def ratio(self) -> float | None:
        """Cost over wall time; None before the first step."""
        return self._cost_ns / self._wall_ns if self._wall_ns else None

    def charge(self, cost_ns: int) -> None:
        """Add a cost that was measured outside any step (the attach itself)."""
        self._cost_ns += cost_ns

    def step(self, wall_ns: int, overhead_ns: int, *, profiled: bool) -> int:
        """Take a finished step and pacecar's own time in it; return that with a profiled step's slow-down added."""
        self._wall_ns += wall_ns
        if profiled:
            own = wall_ns - overhead_ns
            usual = int(median(self._recent)) if self._recent else own
            overhead_ns = min(wall_ns, overhead_ns + max(0, own - usual))
        else:
            self._recent.append(max(0, wall_ns - overhead_ns))
        self._cost_ns += overhead_ns
        return overhead_ns

    def window_taken(self, step: int, price_ns: int) -> None:
        """Remember what the window of `step` cost in all, to predict the next."""
        self._window_ns.append(price_ns)
        self._last_window = step
        self._requested = False
        self.windows += 1

    def request(self) -> None:
        """Want a window soon, whatever the interval says; the ratio still holds."""
        self._requested = True

    def wants_window(self, step: int) -> bool:
        """Return whether `step`, the next one, should be profiled."""
        if step < self._warmup_steps or (step - self._warmup_steps) % self._grid_steps:
            return False
        is_due = self._requested or self._last_window is None or step - self._last_window >= self._interval_steps
        predicted = max(self._window_ns, default=FIRST_WINDOW_NS)
        return is_due and (self._ratio >= 1.0 or self._cost_ns + predicted <= self._ratio * self._wall_ns)
