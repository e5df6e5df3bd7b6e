"""Computes what the kept changes save together, with bounds, for a report and for the demo, which ends with one.

The kept changes were picked because they measured well, so the product of what they measured is too good; the product
of their lower bounds is not.  So the lower bound is what counts as proven, and the measured value stands beside it.

The constants say which steps of a run are compared, before with after.  To compare the first half of a run with the
second would count warm-up, trials and switches that still settle; these bounds leave them out.

`EstimateError` sums up how far the step estimate was off over a whole run.  Every training process loads
`pacecar.records.measurements.estimate_check`, which therefore needs no statistics.

Left out: dividing the steps, which the report does while it reads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from pacecar.records.measurements.estimate_check import CheckedError

__all__ = [
    "AFTER_STEPS_MIN",
    "SETTLE_STEPS",
    "WARMUP_STEPS",
    "WINDOW_STEPS",
    "EstimateError",
    "Proven",
    "Tried",
    "estimate_error",
    "percentile",
    "proven",
]


WARMUP_STEPS = 10
"""Allocators, caches and DDP's bucket rebuild are warm by then; the tuner's own warm-up is as long."""

SETTLE_STEPS = 2
"""Steps after a switch that still pay for it."""

WINDOW_STEPS = 8
"""Steps in one window of the spread: short enough to have many, long enough to smooth single steps."""

AFTER_STEPS_MIN = 6 * WINDOW_STEPS
"""Fewer since the last switch say more of the machine's last seconds than of the settings; then all steps at the kept
settings count."""


class Tried(Protocol):
    """A change that went through an interleaved trial: what it saved of step time (0..1), and the bounds of that."""

    @property
    def measured_gain_ratio(self) -> float | None:
        """As measured; None where nothing was."""
        ...

    @property
    def gain_low(self) -> float | None:
        """The lower bound; None where there was too little to bound it."""
        ...

    @property
    def gain_high(self) -> float | None:
        """The upper bound; None where there was too little to bound it."""
        ...


class Proven(NamedTuple):
    """Share of step time (0..1) that changes save together; None where one of them has no such figure, or none is."""

    ratio: float | None
    low: float | None
    high: float | None


def proven(kept: Iterable[Tried]) -> Proven:
    """Return what the changes in force save together, each as its own interleaved trial measured it.

    Each bound is wrong at most at the tuner's rate of false accepts, so those of k changes together at k times that.
    """
    known = list(kept)
    gains = (
        [one.measured_gain_ratio for one in known],
        [one.gain_low for one in known],
        [one.gain_high for one in known],
    )
    return Proven(*map(_together, gains))


def _together(gains: Sequence[float | None]) -> float | None:
    known = [gain for gain in gains if gain is not None]
    return 1 - math.prod(1 - gain for gain in known) if known and len(known) == len(gains) else None


class EstimateError(msgspec.Struct, frozen=True, kw_only=True):
    """How far off the estimate was against `windows` exact windows of all ranks: shares of the step (0..1).

    `own_setting` are those windows whose knobs had been calibrated before; its median is None where there was none.
    """

    windows: int
    median_ratio: float
    worst_ratio: float
    own_setting: int
    own_setting_median_ratio: float | None
    bias_limit_ratio: float | None


def estimate_error(errors: Sequence[CheckedError]) -> EstimateError | None:
    """Sum up the checks of a run; None where there was none."""
    if not errors:
        return None
    ratios = [ratio for ratio, _, _ in errors]
    own = [ratio for ratio, is_own, _ in errors if is_own]
    limits = [limit for _, _, limit in errors if limit is not None]
    return EstimateError(
        windows=len(ratios),
        median_ratio=statistics.median(ratios),
        worst_ratio=max(ratios),
        own_setting=len(own),
        own_setting_median_ratio=statistics.median(own) if own else None,
        bias_limit_ratio=statistics.median(limits) if limits else None,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the percentile of sorted values, with linear interpolation between neighbours (numpy's default)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    between = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    # Clamped: rounding in the interpolation must not carry it past the two values that it lies between.
    return min(max(between, ordered[below]), ordered[above])
