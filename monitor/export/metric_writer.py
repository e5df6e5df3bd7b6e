"""Remembers each series as it was last written, so that a page costs what changed and not what it holds.

A scrape serves two thousand series, and most of them have the same name, labels and value as before.  So the lines of a
series are kept, by its name and labels.  Most ticks have the series of the previous tick in the same order; then each
series is compared with the one in its place, without a lookup, and only metrics with a changed value are joined again.

Left out: how a line is written (`pages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..fault_containment import ContainedPart, FaultContainment
from ..histogram import Histogram, Served

__all__ = ["Labels", "MetricLine", "MetricWriter", "Value"]

SERIES_MAX = 100_000
LINES_BYTES_MAX = 32 << 20
"""Lines remembered, and their bytes.  Beyond either bound those not written this time are forgotten: labels that come
and go must not fill memory."""

LINE_BYTES = 500
"""Bytes of a remembered line besides its text: objects, and its labels once more."""

Labels = tuple[str, ...]

Value = int | float | Histogram


class MetricLine:
    """One series: `encode` writes it with a value, `last` is the latest result, `size` the bytes that never change."""

    __slots__ = ("encode", "last", "size", "value")

    def __init__(self, size: int, encode: Callable[[Value], bytes]) -> None:
        self.size = size
        self.encode = encode
        self.value: Value | None = None
        self.last = b""

    def write(self, value: Value) -> None:
        """Update `last` if `value` is a new one."""
        if value is not self.value and value != self.value:
            self.last = self.encode(value)
            self.value = value  # after encoding: a value that cannot be encoded must not seem to be


class _Layout(NamedTuple):
    """What was written last, place by place; without `samples` if one could not be written or a series came twice."""

    samples: Sequence[Served] = ()
    lines: Sequence[MetricLine] = ()
    rows: Mapping[str, Sequence[MetricLine]] = {}
    families: Mapping[str, bytes] = {}

    def fits(self, samples: Sequence[Served]) -> bool:
        """Return whether `samples` are of the same series in the same order."""
        return len(samples) == len(self.samples) and all(
            one is old or (one.labels == old.labels and one.metric == old.metric)
            for one, old in zip(samples, self.samples, strict=True)
        )


class MetricWriter:
    """Writes samples as lines, and remembers the lines of each series.  One thread at a time."""

    def __init__(
        self,
        make_line: Callable[[Served], MetricLine],
        part: ContainedPart = ContainedPart.DAEMON,
        faults: FaultContainment | None = None,
    ) -> None:
        """A sample that cannot be written is left out, and `faults` counts it for `part`."""
        self._make_line = make_line
        self._part = part
        self._faults = faults or FaultContainment()
        self._lines: dict[tuple[str, Labels], MetricLine] = {}
        self._bytes = 0
        self._latest = _Layout()

    def write(self, samples: Sequence[Served]) -> Mapping[str, bytes]:
        """Return metric -> its lines; for a series that comes twice, the later value."""
        if not self._latest.fits(samples) or not self._write_changed(samples):
            self._write_all(samples)
        return self._latest.families

    def _write_changed(self, samples: Sequence[Served]) -> bool:
        """Write what changed since the previous time; return whether that succeeded."""
        latest = self._latest
        changed: set[str] = set()
        try:
            for one, old, line in zip(samples, latest.samples, latest.lines, strict=True):
                if one is not old and one.value != old.value:
                    line.write(one.value)
                    changed.add(one.metric)
        except Exception:  # noqa: BLE001  `_write_all` meets it again and counts it
            return False
        families = {**latest.families, **{metric: _joined(latest.rows[metric]) for metric in changed}}
        self._latest = latest._replace(samples=samples, families=families)
        return True

    def _write_all(self, samples: Sequence[Served]) -> None:
        lines, rows = self._lines, dict[str, dict[Labels, MetricLine]]()
        written: list[MetricLine] = []
        for one in samples:
            try:
                key = (one.metric, one.labels)
                line = lines.get(key)
                if line is None:
                    line = lines[key] = self._make_line(one)
                    self._bytes += LINE_BYTES + 2 * line.size
                line.write(one.value)
                rows.setdefault(one.metric, {})[one.labels] = line
                written.append(line)
            except Exception as error:  # noqa: BLE001  one that cannot be written must not cost the page all others
                self._faults.caught(self._part, f"a sample of {one.metric}", error)
        if len(lines) > SERIES_MAX or self._bytes > LINES_BYTES_MAX:
            kept = {(metric, labels) for metric, of_metric in rows.items() for labels in of_metric}
            self._lines = {key: line for key, line in lines.items() if key in kept}
            self._bytes = sum(LINE_BYTES + 2 * line.size for line in self._lines.values())
        is_plain = len(written) == len(samples) == sum(map(len, rows.values()))
        by_metric = {metric: list(of_metric.values()) for metric, of_metric in rows.items()}
        families = {metric: _joined(found) for metric, found in by_metric.items()}
        self._latest = _Layout(samples if is_plain else (), written, by_metric, families)


def _joined(lines: Sequence[MetricLine]) -> bytes:
    return b"".join([line.last for line in lines])
