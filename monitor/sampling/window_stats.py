"""Computes the lowest, mean and highest value of each windowed series over a sliding window of ticks.

A scrape every 15 s sees one moment in fifteen seconds: the burst that delayed a step is not in it.  To reset the
extremes at each scrape is no answer either, because a second scraper (or a person with curl) would steal them from
the first.  So the window slides with the daemon's own ticks and nobody's reading changes it.

    values     . .. .  .|. . .. .|.. . . .|. . .. .|       between two ticks: one bucket, four numbers
    window              [---------------------------]      the buckets of the last `length_ns`

Values inside a bucket are not kept: a window costs a few numbers a tick, however often it is looked at in between.
The mean is over the values, which come evenly.  A series of which no value came in the whole window is forgotten.

Left out on purpose: which metrics are windowed (the catalog says) and how often they are read (the sampler).
One thread uses a window: the one that reads its collector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pacecar.metrics.catalog import WINDOW_NAMES
from pacecar.records import Sample

__all__ = ["WindowStats"]

Number = int | float


class _Bucket:
    """The values of one series between two ticks, as far as they are needed."""

    __slots__ = ("closed_ns", "count", "highest", "lowest", "total")

    def __init__(self, value: Number) -> None:
        self.lowest = self.highest = self.total = value
        self.count = 1
        self.closed_ns: int | None = None

    def add(self, value: Number) -> None:
        self.lowest = min(self.lowest, value)
        self.highest = max(self.highest, value)
        self.total += value
        self.count += 1


class WindowStats:
    """The values of the windowed series of one collector in the last `length_ns`."""

    def __init__(self, length_ns: int) -> None:
        assert length_ns > 0, "a window has a length"
        self._length_ns = length_ns
        self._series: dict[tuple[str, tuple[str, ...]], deque[_Bucket]] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        """Add the values of windowed metrics among `samples`; the others are not looked at."""
        for sample in samples:
            if sample.metric not in WINDOW_NAMES:
                continue
            buckets = self._series.setdefault((sample.metric, sample.labels), deque())
            if buckets and buckets[-1].closed_ns is None:
                buckets[-1].add(sample.value)
            else:
                buckets.append(_Bucket(sample.value))

    def close(self, now_ns: int) -> None:
        """End the buckets of this tick, and forget what is older than the window."""
        oldest_ns = now_ns - self._length_ns
        for key, buckets in list(self._series.items()):
            if buckets[-1].closed_ns is None:
                buckets[-1].closed_ns = now_ns
            while buckets and buckets[0].closed_ns is not None and buckets[0].closed_ns <= oldest_ns:
                buckets.popleft()
            if not buckets:
                del self._series[key]

    def over(self, samples: Iterable[Sample]) -> list[Sample]:
        """Return lowest, mean and highest for each windowed series that is among `samples`: gone now is gone."""
        out: list[Sample] = []
        for sample in samples:
            names = WINDOW_NAMES.get(sample.metric)
            if names is None:
                continue
            buckets = self._series.get((sample.metric, sample.labels))
            if buckets is None:
                continue
            mean = sum(bucket.total for bucket in buckets) / sum(bucket.count for bucket in buckets)
            values = (min(b.lowest for b in buckets), mean, max(b.highest for b in buckets))
            out += (Sample(name, sample.labels, value) for name, value in zip(names, values, strict=True))
        return out
