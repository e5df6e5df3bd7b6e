"""How large is a figure, how much does it spread, and is a difference more than noise?

Neighbouring windows of a training run are alike: another job on the link stays for seconds.  The ordinary bootstrap
draws windows one by one as if they were independent, and its intervals are then too narrow by a factor.  So blocks of
neighbours are drawn, as by Kuensch (1989, "The jackknife and the bootstrap for general stationary observations",
Annals of Statistics 17), laid round in a circle so that no window counts less for standing at an end (Politis and
Romano 1992, "A circular block-resampling procedure for stationary data").  Blocks of about the cube root of the
number of windows (Hall, Horowitz and Jing 1995, "On blocking rules for the bootstrap with dependent data", Biometrika
82).

That is the noise inside a run.  It says nothing of what differs from run to run, and a run that drifts by 5 % between
its halves proves no 3 %: hence `drift_ratio`, which a difference must exceed too.

Pure; no numpy, so that a report can be made anywhere.
"""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Callable, Sequence

import msgspec

__all__ = ["Interval", "LogHistogram", "Moments", "Spread", "coarsened", "drift_ratio", "percentile", "ratio_interval",
           "spread_of"]  # fmt: skip

RESAMPLES = 2000
"""Efron and Tibshirani (1993), "An Introduction to the Bootstrap", chapter 13: about 1000 or more for percentiles."""

BLOCK_WINDOWS_MAX = 512
"""Windows that are drawn from: more are joined to longer ones first, which loses nothing of slow noise."""

INTERVAL_WINDOWS_MIN = 8
"""Of fewer windows nobody can say how much they vary."""

LEVEL = 0.95


class Spread(msgspec.Struct, frozen=True):
    """`count` values: mean, standard deviation, and percentiles; the deviation is None for a single value."""

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


class Interval(msgspec.Struct, frozen=True):
    """A ratio minus one with its bounds at LEVEL; both None where there are too few windows."""

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
        """Take one value."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)
        self.low, self.high = min(self.low, value), max(self.high, value)

    def join(self, other: Moments) -> None:
        """Take all values of `other` (Chan, Golub and LeVeque 1983, The American Statistician 37)."""
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
    """Percentiles of any number of durations, each within half of WIDTH, in bounded memory."""

    WIDTH = 0.005

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self.count = 0
        self.high = 0

    def add(self, value: int) -> None:
        """Take one duration in nanoseconds."""
        place = int(math.log(value) / self.WIDTH) if value > 0 else -1
        self._bins[place] = self._bins.get(place, 0) + 1
        self.count += 1
        self.high = max(self.high, value)

    def join(self, other: LogHistogram) -> None:
        """Take all durations of `other`."""
        for place, count in other._bins.items():
            self._bins[place] = self._bins.get(place, 0) + count
        self.count += other.count
        self.high = max(self.high, other.high)

    def percentile(self, share: float) -> float | None:
        """Return the duration that `share` of them do not exceed; None when there are none."""
        wanted = share * self.count
        seen = 0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen >= wanted:
                return 0.0 if place < 0 else min(math.exp((place + 0.5) * self.WIDTH), float(self.high))
        return None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the percentile of sorted values, with linear interpolation between neighbours (numpy's default)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    between = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    # Clamped: rounding in the interpolation must not carry it past the two values that it lies between.
    return min(max(between, ordered[below]), ordered[above])


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return how `values` spread; None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p5, p10, middle, p90, p95 = (percentile(ordered, share) for share in (0.05, 0.1, 0.5, 0.9, 0.95))
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Spread(len(values), statistics.fmean(values), sd, p5, p10, middle, p90, p95)


def coarsened(rates: Sequence[float], most: int = BLOCK_WINDOWS_MAX) -> list[float]:
    """Return at most `most` values, neighbours joined to their mean."""
    values = list(rates)
    while len(values) > most:
        values = [(a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=False)]
    return values


def drift_ratio(rates: Sequence[float]) -> float | None:
    """Return by how much the second half's median differs from the first's; None for fewer than four values."""
    if len(rates) < 4:
        return None
    middle = len(rates) // 2
    first, second = statistics.median(rates[:middle]), statistics.median(rates[middle:])
    return None if first == 0 else second / first - 1


def ratio_interval(before: Sequence[float], after: Sequence[float], *, seed: int = 1) -> Interval | None:
    """Return the median of `after` over that of `before`, minus one, with its interval; None where one has no values.

    Percentile intervals of a circular block bootstrap, each side drawn by itself.  The seed is fixed: the same records
    give the same report.
    """
    if not before or not after or statistics.median(before) == 0:
        return None
    change = statistics.median(after) / statistics.median(before) - 1
    if min(len(before), len(after)) < INTERVAL_WINDOWS_MIN:
        return Interval(change, None, None)
    generator = random.Random(seed)
    draw_before, draw_after = (_drawer(coarsened(side), generator) for side in (before, after))
    ratios = sorted(draw_after() / low - 1 for _ in range(RESAMPLES) if (low := draw_before()) > 0)
    edge = (1 - LEVEL) / 2
    # The point belongs into its own interval, whatever joining windows did to the medians.
    low, high = percentile(ratios, edge), percentile(ratios, 1 - edge)
    return Interval(change, min(low, change), max(high, change))


def _drawer(values: Sequence[float], generator: random.Random) -> Callable[[], float]:
    """Return a function that gives the median of a new circular block resample."""
    count = len(values)
    length = max(1, math.ceil(count ** (1 / 3)))
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
