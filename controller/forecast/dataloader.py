"""Forecasts the gain of other data loader workers or prefetching: at most the time that the step waits for data.

Twice the workers do not halve the wait.  A step that waits is as long as the workers need for a batch, so twice the
workers halve the *step*, until something else is the longest part:

    without workers   step = rest + load           with w of them   step = max(rest, load / w)

Left out: workers share cores and disks, so the load of a batch grows with their number if they compute.  No ledger
shows that beforehand, hence a wide spread, and the trial decides.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DATA_WAIT_RATIO_MIN", "loader_gain", "refill_steps"]

DATA_WAIT_RATIO_MIN = 0.03
"""Below this share of the step the wait for data leaves nothing to gain, as with exposed communication."""

PREFETCH_SHARE = 0.25
"""Share of the wait that prefetching saves: it does not speed loading up, it only evens it out."""

PREFETCH_DEFAULT = 2
"""torch's own default, for jobs where prefetching is not a knob."""

REFILL_STEPS_MAX = 16
"""Most settling steps, two windows: longer would cost more than the better measurement is worth."""


def refill_steps(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return the number of steps after a switch whose batches were loaded ahead.

    Old and new workers load at once then, so those steps are faster than under either setting and must not be judged.
    """
    flights = [v.get("loader_workers", 0) * v.get("loader_prefetch", PREFETCH_DEFAULT) for v in (before, after)]
    same = all(before.get(knob) == after.get(knob) for knob in ("loader_workers", "loader_prefetch"))
    return 0 if same else min(REFILL_STEPS_MAX, sum(flights))


def loader_gain(knob: str, here: int, to: int, wait_ratio: float) -> float:
    """Return the fraction of the step saved by turning a loader knob from `here` to `to`; negative if lost.

    `wait_ratio` is the share of the step that waits for data.
    """
    if knob == "loader_prefetch":
        return PREFETCH_SHARE * wait_ratio if to > here else -wait_ratio
    rest = 1.0 - wait_ratio
    if to == 0:
        return -float(here) * rest  # all of the loading comes into the step
    load = wait_ratio if here == 0 else float(here)
    return 1.0 - max(rest, load / to)
