"""Computes statistics of a run for the report: what the kept changes save together, and the error of the estimate.

Changes are kept because they measured well, so the product of their measured gains is too optimistic; the product of
their lower bounds is not.  So the lower bound counts as proven, and the measured value is shown beside it.

The constants choose the steps to compare before and after tuning; they leave out warm-up, trials and switches that are
still settling.

Left out: dividing the steps, which the report does while reading.
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
"""By then allocators, caches and DDP's bucket rebuild are warm; the tuner's own warm-up is as long."""

SETTLE_STEPS = 2
"""Steps after a switch that are still affected by it."""

WINDOW_STEPS = 8
"""Steps per window when computing the spread: few enough for many windows, enough to smooth single steps."""

AFTER_STEPS_MIN = 6 * WINDOW_STEPS
"""With fewer steps since the last switch, chance dominates; then all steps at the kept settings count."""


class Tried(Protocol):
    """A change that went through an interleaved trial: the share of step time that it saved (0..1), with bounds."""

    @property
    def measured_gain_ratio(self) -> float | None:
        """As measured; None without a measurement."""
        ...

    @property
    def gain_low(self) -> float | None:
        """The lower bound; None if there were too few measurements."""
        ...

    @property
    def gain_high(self) -> float | None:
        """The upper bound; None if there were too few measurements."""
        ...


class Proven(NamedTuple):
    """Share of step time (0..1) that changes save together; None if one lacks the figure or there are no changes."""

    ratio: float | None
    low: float | None
    high: float | None


def proven(kept: Iterable[Tried]) -> Proven:
    """Return what the changes in force save together, each as measured by its own interleaved trial.

    Each bound is wrong at most at the tuner's false-accept rate, so the bounds of k changes together at k times that.
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
    """The error of the estimate against `windows` exact windows of all ranks, as shares of the step (0..1).

    `own_setting` counts windows whose knobs had been calibrated before; its median is None if there were none.
    """

    windows: int
    median_ratio: float
    worst_ratio: float
    own_setting: int
    own_setting_median_ratio: float | None
    bias_limit_ratio: float | None


def estimate_error(errors: Sequence[CheckedError]) -> EstimateError | None:
    """Return the summary of a run's checks; None if there were none."""
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
    # Rounding in the interpolation must not carry it past its neighbours.
    return min(max(between, ordered[below]), ordered[above])
