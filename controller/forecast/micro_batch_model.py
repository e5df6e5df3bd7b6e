"""Forecasts what another micro-batch size would save, by Gaussian process regression on the sizes that were timed.

At a constant global batch, with c(m) micro-batches of m samples, a step relative to the present one (m0) takes

    pace(m) / pace(m0) = work + drift(log2(m / m0)) + fixed c(m) / c(m0)

`work` is done for every sample and `fixed` for every micro-batch (launches, weights read).  `drift` is what samples
cost more where they no longer fit into a cache, or less where they fill a device: a random walk from the present size
in both directions, so that what is known of smaller sizes says little of larger ones.  All are Gaussian, and the error
of a forecast grows with the distance.  An exact window shows which share of the step is host-bound, a lower bound of
`fixed`; without one there is no forecast until a second size was timed.

Source: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, section 2.2, one reading at a time.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .forecast import Forecast
from .setting_history import TypicalPace

__all__ = ["expect_micro_batch"]

FIXED_SAMPLES = 0.5
"""Samples that take as long as what each micro-batch costs beyond its host-bound time, so that this is a third of the
step at micro-batches of one sample and a ninth at four."""

FIXED_ERROR = 0.1
"""Standard error of that share, in addition to the share itself."""

DRIFT_ERROR = 0.1
"""Standard error of what the first doubling or halving adds for every sample."""

WORK_ERROR = 0.3
"""Standard error of the work of all samples, as a share of the step."""

GAIN_MAX = 0.9


def expect_micro_batch(
    paces: Mapping[int, TypicalPace], here: int, to: int, batch: int, host_bound_ratio: float | None
) -> Forecast | None:
    """Return the gain of `to` over `here` samples; None if nothing changes, or nothing is known.

    `paces` has the typical pace by size, `batch` is the samples of a rank and step, and `host_bound_ratio` the share of
    the step in which the device waits for the host, None if unknown.
    """
    count, new_count = math.ceil(batch / here), math.ceil(batch / to)
    if here not in paces or count == new_count or (len(paces) == 1 and host_bound_ratio is None):
        return None
    sizes = sorted({*paces, to})
    octaves = [math.log2(size / here) for size in sizes]
    counts = [math.ceil(batch / size) / count for size in sizes]
    fixed = FIXED_SAMPLES / (FIXED_SAMPLES + here)
    fixed_error = fixed + FIXED_ERROR
    fixed = min(1.0, fixed + (host_bound_ratio or 0.0))
    mean = [1.0 - fixed + fixed * one for one in counts]
    covariance = [
        [
            WORK_ERROR**2
            + fixed_error**2 * counts[i] * counts[j]
            + (DRIFT_ERROR**2 * min(abs(octaves[i]), abs(octaves[j])) if octaves[i] * octaves[j] > 0 else 0.0)
            for j in range(len(sizes))
        ]
        for i in range(len(sizes))
    ]
    for size, pace in paces.items():
        ratio, seen = pace.ns / paces[here].ns, sizes.index(size)
        along = [row[seen] for row in covariance]
        variance = along[seen] + (ratio * pace.error_ratio) ** 2
        off = ratio - mean[seen]
        mean = [one + a * off / variance for one, a in zip(mean, along, strict=True)]
        covariance = [
            [one - a * b / variance for one, b in zip(row, along, strict=True)]
            for row, a in zip(covariance, along, strict=True)
        ]
    i, j = sizes.index(here), sizes.index(to)
    spread = math.sqrt(max(0.0, covariance[i][i] + covariance[j][j] - 2 * covariance[i][j]))
    basis = f"{count} -> {new_count} micro-batches; sizes timed: {len(paces)}"
    return Forecast(min(GAIN_MAX, mean[i] - mean[j]), spread, basis)
