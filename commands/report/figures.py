"""Computes spread, drift and change of rates, with intervals by a circular block bootstrap over windows of steps.

Neighbouring windows are correlated: another job on the link stays for seconds.  The ordinary bootstrap draws windows
as if they were independent, and its intervals are several times too narrow.

    blocks of neighbours    Kuensch 1989, "The jackknife and the bootstrap for general stationary observations",
                            Annals of Statistics 17
    in a circle             Politis and Romano 1992, "A circular block-resampling procedure for stationary data": no
                            window counts less because it is at an end
    block length            Politis and White 2004, "Automatic block-length selection for the dependent bootstrap",
                            Econometric Reviews 23 (corrected by Patton, Politis and White 2009), for an AR(1)
    its autocorrelation     from ranks, which outliers do not move; corrected for the bias of short series (Kendall
                            1954, Biometrika 41) and raised a little there: blocks that are too short give false
                            positives, blocks that are too long only miss differences
    few blocks              the interval is widened by Student's over the normal quantile, with one degree of freedom
                            less than blocks; there is none for fewer than BLOCKS_MIN

That is the noise inside a run, not between runs, and a run that drifts by 5 % between its halves cannot show 3 %.
Hence `drift_ratio`, which a difference must exceed too.

Pure, and without numpy, so that a report can be made anywhere.
"""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from pacecar.run_statistics import percentile

__all__ = ["STABLE_RATIO", "Interval", "LogHistogram", "Moments", "Spread", "block_length", "coarsened", "drift_ratio",
           "ratio_interval", "spread_of", "student_over_normal"]  # fmt: skip

RESAMPLES = 2000
"""Efron and Tibshirani (1993), "An Introduction to the Bootstrap", chapter 13: about 1000 or more for percentiles."""

BLOCK_WINDOWS_MAX = 512
"""Windows to draw blocks from; if there are more, neighbours are merged first, which preserves slow noise."""

INTERVAL_WINDOWS_MIN = 8
"""Fewer windows do not show their variation."""

STABLE_RATIO = 0.02
"""A pace is stable if the standard deviation of its windows is at most this share of their mean: the ±2 % that clusters
are asked to hold."""

BLOCKS_MIN = 2
"""One block shows no variation; with two, the interval is more than six times as wide."""

STUDENT_QUANTILES = (12.706, 4.303)
"""Two-sided at LEVEL, for one and two degrees of freedom."""

LOG_RATIO_MAX = 100.0
"""Bound of an interval's end, a logarithm, so that the end stays a finite number."""

ALIKE_MAX = 0.97
"""Bound of the autocorrelation: above it, a run of any length would be one block."""

LIKENESS_DOUBT = 2
"""This over the count is added to the autocorrelation, on top of its bias.  Of 300 equal pairs, with 16 and 200 windows
and an autocorrelation of 0.7, 21 seemed to differ without it and 13 with it (7 and 4 %)."""

LEVEL = 0.95

NORMAL_QUANTILE = 1.959964
"""Two-sided, at LEVEL."""


class Spread(msgspec.Struct, frozen=True):
    """Mean, standard deviation and percentiles of `count` values; `sd` is None for a single value."""

    count: int
    mean: float
    sd: float | None
    p5: float
    p10: float
    median: float
    p90: float
    p95: float

    @property
    def cv(self) -> float | None:
        """Coefficient of variation: standard deviation over mean."""
        return None if self.sd is None or self.mean == 0 else self.sd / self.mean

    @property
    def is_stable(self) -> bool | None:
        """Whether `cv` is at most STABLE_RATIO; None if there are too few values."""
        return None if self.cv is None or self.count < INTERVAL_WINDOWS_MIN else self.cv <= STABLE_RATIO


class Interval(msgspec.Struct, frozen=True):
    """A ratio minus one, with its bounds at LEVEL; both are None if there are too few windows."""

    change_ratio: float
    low: float | None
    high: float | None


class Moments:
    """Mean and spread of any number of values, by Welford's method (1962, Technometrics 4)."""

    __slots__ = ("_squares", "count", "high", "low", "mean")

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)
        self.low, self.high = min(self.low, value), max(self.high, value)

    def join(self, other: Moments) -> None:
        """Add all values of `other` (Chan, Golub and LeVeque 1983, The American Statistician 37)."""
        if other.count == 0:
            return
        count = self.count + other.count
        delta = other.mean - self.mean
        self._squares += other._squares + delta * delta * self.count * other.count / count
        self.mean += delta * other.count / count
        self.count = count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    @property
    def sd(self) -> float | None:
        """Standard deviation of the values; None for fewer than two."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else None


class LogHistogram:
    """Percentiles of any number of durations in bounded memory, accurate to half of WIDTH."""

    WIDTH = 0.005

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self.count = 0
        self.high = 0

    def add(self, value: int) -> None:
        """Add one duration in nanoseconds."""
        place = int(math.log(value) / self.WIDTH) if value > 0 else -1
        self._bins[place] = self._bins.get(place, 0) + 1
        self.count += 1
        self.high = max(self.high, value)

    def join(self, other: LogHistogram) -> None:
        """Add all durations of `other`."""
        for place, count in other._bins.items():
            self._bins[place] = self._bins.get(place, 0) + count
        self.count += other.count
        self.high = max(self.high, other.high)

    def percentile(self, share: float) -> float | None:
        """Return the duration that a share of the values do not exceed; None if there are none."""
        wanted = share * self.count
        seen = 0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen >= wanted:
                return 0.0 if place < 0 else min(math.exp((place + 0.5) * self.WIDTH), float(self.high))
        return None


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return the spread of `values`; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p5, p10, middle, p90, p95 = (percentile(ordered, share) for share in (0.05, 0.1, 0.5, 0.9, 0.95))
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Spread(len(values), statistics.fmean(values), sd, p5, p10, middle, p90, p95)


def coarsened(rates: Sequence[float], most: int = BLOCK_WINDOWS_MAX) -> list[float]:
    """Average neighbours until at most `most` values are left."""
    values = list(rates)
    while len(values) > most:
        values = [(a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=False)]
    return values


def drift_ratio(rates: Sequence[float]) -> float | None:
    """Return the median of the second half over that of the first, minus one; None for fewer than four values."""
    if len(rates) < 4:
        return None
    middle = len(rates) // 2
    first, second = statistics.median(rates[:middle]), statistics.median(rates[middle:])
    return None if first == 0 else second / first - 1


def ratio_interval(before: Sequence[float], after: Sequence[float], *, seed: int = 1) -> Interval | None:
    """Return the median of `after` over that of `before`, minus one, with its interval; None if one is empty.

    Each side is resampled on its own.  The seed is fixed, so the same records give the same report.
    """
    if not before or not after or statistics.median(before) == 0:
        return None
    change = statistics.median(after) / statistics.median(before) - 1
    sides = [coarsened(side) for side in (before, after)]
    lengths = [block_length(side) for side in sides]
    blocks = min(len(side) // length for side, length in zip(sides, lengths, strict=True))
    if min(map(len, sides)) < INTERVAL_WINDOWS_MIN or blocks < BLOCKS_MIN:
        return Interval(change, None, None)
    generator = random.Random(seed)
    draw_before, draw_after = (_drawer(side, length, generator) for side, length in zip(sides, lengths, strict=True))
    pairs = ((draw_before(), draw_after()) for _ in range(RESAMPLES))
    # In logarithms, twice as fast and half as fast are equally far from no change, and no loss exceeds 100 %.
    ratios = sorted(math.log(high / low) for low, high in pairs if low > 0 and high > 0)
    middle = math.log1p(change) if change > -1 else -math.inf
    if not ratios or math.isinf(middle):
        return Interval(change, None, None)
    edge = (1 - LEVEL) / 2
    widened = student_over_normal(blocks - 1)
    # The interval must contain the estimate, even if merging windows moved the medians.
    ends = (middle + widened * (percentile(ratios, share) - middle) for share in (edge, 1 - edge))
    low, high = (math.expm1(min(end, LOG_RATIO_MAX)) for end in ends)
    return Interval(change, min(low, change), max(high, change))


def block_length(values: Sequence[float]) -> int:
    """Return how many neighbours make blocks nearly independent."""
    count = len(values)
    if count < 3 or min(values) == max(values):
        return 1
    alike = _rank_autocorrelation(values)
    alike = min(ALIKE_MAX, max(0.0, alike + (1 + 3 * alike + LIKENESS_DOUBT) / count))
    wanted: float = (6 * alike**2 / (1 - alike**2) ** 2) ** (1 / 3) * count ** (1 / 3)
    return min(count, max(1, math.ceil(wanted)))


def _rank_autocorrelation(values: Sequence[float]) -> float:
    """Return the rank autocorrelation of neighbours (-1..1)."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for place, index in enumerate(order):
        ranks[index] = place - (len(values) - 1) / 2
    return math.fsum(a * b for a, b in pairwise(ranks)) / math.fsum(rank * rank for rank in ranks)


def student_over_normal(degrees: int) -> float:
    """Return Student's 97.5 % quantile over the normal one (Abramowitz and Stegun, 26.7.5).

    That series fails for one and two degrees of freedom, which come from tables.
    """
    z, n = NORMAL_QUANTILE, degrees
    if n <= len(STUDENT_QUANTILES):
        return STUDENT_QUANTILES[n - 1] / z
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return float((z + first / n + second / n**2 + third / n**3) / z)


def _drawer(values: Sequence[float], length: int, generator: random.Random) -> Callable[[], float]:
    """Return a function that draws a circular block resample and returns its median."""
    count = len(values)
    blocks = math.ceil(count / length)
    round_twice = array("d", [*values, *values[: length - 1]])

    def draw() -> float:
        drawn: list[float] = []
        for _ in range(blocks):
            start = int(generator.random() * count)
            drawn.extend(round_twice[start : start + length])
        del drawn[count:]
        drawn.sort()
        return percentile(drawn, 0.5)

    return draw
