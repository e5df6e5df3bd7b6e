"""Computes minimum, mean and maximum of each windowed series over a sliding window of ticks.

A scrape every 15 s sees one moment in fifteen seconds, and misses the burst that delayed a step.  Resetting extremes at
each scrape does not work: a second scraper (or a person with curl) would take them from the first.  So the window
slides with the daemon's own ticks, and reading it changes nothing.

    values     . .. .  .|. . .. .|.. . . .|. . .. .|       between two ticks: one bucket, four numbers
    window              [---------------------------]      the buckets of the last `length_ns`

Values inside a bucket are not kept: a window costs a few numbers a tick, however many glances there are.  The mean is
over the values, which come evenly.  A series without a value in the whole window is dropped.

`MetricPlaces` finds the samples of each metric in a tick.

Left out: which metrics are windowed (the catalog) and how often they are read (the sampler).  One thread uses a window:
the one that reads its collector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import is_not

from pacecar.metrics.catalog import WINDOW_NAMES
from pacecar.records import Sample

__all__ = ["MetricPlaces", "WindowStats"]

Number = int | float


class MetricPlaces:
    """The places of each metric's samples in a tick.  One thread at a time.

    A tick mostly has the series of the previous tick in the same order.  So only samples that are other objects than
    before are compared; touching all two thousand is slow, because after a second they are in no processor cache.
    """

    def __init__(self) -> None:
        self._before: Sequence[Sample] = ()
        self._metrics: list[str] = []
        self._places: Mapping[str, Sequence[int]] = {}

    def find(self, samples: Sequence[Sample]) -> Mapping[str, Sequence[int]]:
        """Return metric -> the places of its samples in `samples`."""
        before, self._before = self._before, samples
        if len(samples) == len(before):
            metrics = self._metrics
            changed = compress(range(len(samples)), map(is_not, samples, before))
            if all(samples[place].metric == metrics[place] for place in changed):
                return self._places
        places: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            places.setdefault(sample.metric, []).append(place)
        self._metrics, self._places = [sample.metric for sample in samples], places
        return places


class _SeriesWindow:
    """The buckets of one series, oldest first."""

    __slots__ = ("_buckets", "_is_open")

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._is_open = False
        """Whether the youngest bucket is still open; it has no time yet."""

    def add(self, value: Number) -> None:
        if not self._is_open:
            self._is_open = True
            self._buckets.append(_Bucket(value))
            return
        bucket = self._buckets[-1]
        bucket.lowest = min(bucket.lowest, value)
        bucket.highest = max(bucket.highest, value)
        bucket.total += value
        bucket.count += 1

    def close(self, now_ns: int, oldest_ns: int) -> bool:
        """Close the open bucket, and drop those that ended at `oldest_ns` or before; return whether any is left."""
        buckets = self._buckets
        if self._is_open:
            self._is_open = False
            buckets[-1].closed_ns = now_ns
        while buckets and buckets[0].closed_ns <= oldest_ns:
            buckets.popleft()
        return bool(buckets)

    def values(self) -> tuple[Number, Number, Number]:
        """Return minimum, mean and maximum."""
        buckets = self._buckets
        mean = sum([bucket.total for bucket in buckets]) / sum([bucket.count for bucket in buckets])
        return min([bucket.lowest for bucket in buckets]), mean, max([bucket.highest for bucket in buckets])


class _Bucket:
    """The values between two ticks."""

    __slots__ = ("closed_ns", "count", "highest", "lowest", "total")

    def __init__(self, value: Number) -> None:
        self.lowest = self.highest = self.total = value
        self.count = 1
        self.closed_ns = 0


class WindowStats:
    """The values of the windowed series of one collector in the last `length_ns`."""

    def __init__(self, length_ns: int) -> None:
        assert length_ns > 0, "a window has a length"
        self._length_ns = length_ns
        self._series: dict[tuple[str, tuple[str, ...]], _SeriesWindow] = {}
        self._places = MetricPlaces()

    def add(self, samples: Iterable[Sample]) -> None:
        """Add the values of windowed metrics among `samples`."""
        for sample in samples:
            if sample.metric in WINDOW_NAMES:
                key = (sample.metric, sample.labels)
                if (series := self._series.get(key)) is None:
                    series = self._series[key] = _SeriesWindow()
                series.add(sample.value)

    def add_tick(self, samples: Sequence[Sample]) -> list[Sample]:
        """Add all samples of a tick; return those of windowed metrics."""
        places = self._places.find(samples)
        windowed = [samples[place] for metric in WINDOW_NAMES if metric in places for place in places[metric]]
        self.add(windowed)
        return windowed

    def close(self, now_ns: int) -> None:
        """Close the buckets of this tick, and drop what is older than the window."""
        oldest_ns = now_ns - self._length_ns
        for key in [key for key, series in self._series.items() if not series.close(now_ns, oldest_ns)]:
            del self._series[key]

    def over(self, samples: Iterable[Sample]) -> list[Sample]:
        """Return minimum, mean and maximum for each windowed series in `samples`: a series gone now is left out."""
        out: list[Sample] = []
        for sample in samples:
            names = WINDOW_NAMES.get(sample.metric)
            series = None if names is None else self._series.get((sample.metric, sample.labels))
            if names is not None and series is not None:
                values = zip(names, series.values(), strict=True)
                out += (Sample(name, sample.labels, value) for name, value in values)
        return out
