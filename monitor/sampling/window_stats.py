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


class _SeriesWindow:
    """The buckets of one series, oldest first: lowest, highest, total and number of the values in each.

    They stand in a deque for each of these, because lowest, mean and highest of all are then one call of the
    interpreter's own.
    """

    __slots__ = ("closed_ns", "counts", "highest", "is_open", "lowest", "totals")

    def __init__(self) -> None:
        self.lowest: deque[Number] = deque()
        self.highest: deque[Number] = deque()
        self.totals: deque[Number] = deque()
        self.counts: deque[int] = deque()
        self.closed_ns: deque[int] = deque()
        self.is_open = False
        """Whether the youngest bucket is not closed; it has no time yet."""

    def add(self, value: Number) -> None:
        if not self.is_open:
            self.is_open = True
            self.lowest.append(value)
            self.highest.append(value)
            self.totals.append(value)
            self.counts.append(1)
            return
        self.lowest[-1] = min(self.lowest[-1], value)
        self.highest[-1] = max(self.highest[-1], value)
        self.totals[-1] += value
        self.counts[-1] += 1

    def close(self, now_ns: int, oldest_ns: int) -> bool:
        """End the open bucket, and drop those that ended at `oldest_ns` or before; return whether any is left."""
        if self.is_open:
            self.is_open = False
            self.closed_ns.append(now_ns)
        while self.closed_ns and self.closed_ns[0] <= oldest_ns:
            for of_buckets in (self.lowest, self.highest, self.totals, self.counts, self.closed_ns):
                of_buckets.popleft()
        return bool(self.closed_ns)

    def values(self) -> tuple[Number, Number, Number]:
        """Return the lowest value, the mean and the highest."""
        return min(self.lowest), sum(self.totals) / sum(self.counts), max(self.highest)


class WindowStats:
    """The values of the windowed series of one collector in the last `length_ns`."""

    def __init__(self, length_ns: int) -> None:
        assert length_ns > 0, "a window has a length"
        self._length_ns = length_ns
        self._series: dict[tuple[str, tuple[str, ...]], _SeriesWindow] = {}

    def add(self, samples: Iterable[Sample]) -> list[Sample]:
        """Add the values of windowed metrics among `samples`, and return those; the others are not looked at."""
        windowed = [sample for sample in samples if sample.metric in WINDOW_NAMES]
        for sample in windowed:
            key = (sample.metric, sample.labels)
            if (series := self._series.get(key)) is None:
                series = self._series[key] = _SeriesWindow()
            series.add(sample.value)
        return windowed

    def close(self, now_ns: int) -> None:
        """End the buckets of this tick, and forget what is older than the window."""
        oldest_ns = now_ns - self._length_ns
        for key in [key for key, series in self._series.items() if not series.close(now_ns, oldest_ns)]:
            del self._series[key]

    def over(self, samples: Iterable[Sample]) -> list[Sample]:
        """Return lowest, mean and highest for each windowed series that is among `samples`: gone now is gone."""
        out: list[Sample] = []
        for sample in samples:
            names = WINDOW_NAMES.get(sample.metric)
            series = None if names is None else self._series.get((sample.metric, sample.labels))
            if names is not None and series is not None:
                values = zip(names, series.values(), strict=True)
                out += (Sample(name, sample.labels, value) for name, value in values)
        return out
