"""Remembers each series as it was last written, so that a page costs what changed and not what it has.

Two thousand series are written at each scrape, and of most neither name nor labels nor value changed.  So the lines of
a series are kept, by its name and labels; and because a tick mostly has the series of the tick before in the same
order, even those are not looked up: what stands in the same place is compared, and only a metric of which a value
changed is put together anew.

Left out: how a line is written (`pages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import AnyStr, Generic, Protocol, TypeVar

from ..fault_containment import ContainedPart, FaultContainment
from ..histogram import Histogram, Served

__all__ = ["Labels", "Line", "MetricWriter", "Value"]

SERIES_MAX = 100_000
LINES_BYTES_MAX = 32 << 20
"""Lines remembered, and their bytes.  Beyond one of them those that were not written this time are forgotten: labels
that come and go must not fill memory."""

LINE_BYTES = 500
"""Bytes of a remembered line beside its text: objects, and its labels once more."""

Labels = tuple[str, ...]

Value = int | float | Histogram


T_co = TypeVar("T_co", str, bytes, covariant=True)


class Line(Protocol[T_co]):
    """One series; `last` is how it was last written."""

    size: int
    """Characters or bytes that stay the same."""

    @property
    def last(self) -> T_co:
        """How it was last written; empty before."""
        ...

    def write(self, value: Value) -> T_co:
        """Write it with `value`, and return how."""
        ...


class _Layout(Generic[AnyStr]):
    """What was written the last time, place by place.

    A tick mostly has the series of the tick before in the same order, so each is compared with what stood in its place,
    which looks up nothing.  Without `samples` it fits nothing: one could not be written, or a series came twice.
    """

    def __init__(
        self,
        samples: Sequence[Served],
        lines: Sequence[Line[AnyStr]],
        rows: dict[str, list[Line[AnyStr]]],
        families: dict[str, AnyStr],
    ) -> None:
        self.samples = samples
        self.lines: Sequence[Line[AnyStr]] = lines
        self.rows: dict[str, list[Line[AnyStr]]] = rows
        self.families: dict[str, AnyStr] = families

    def fits(self, samples: Sequence[Served]) -> bool:
        """Return whether `samples` are of the same series in the same order."""
        return len(samples) == len(self.samples) and all(
            one is old or (one.labels == old.labels and one.metric == old.metric)
            for one, old in zip(samples, self.samples, strict=True)
        )


class MetricWriter(Generic[AnyStr]):
    """Writes samples as lines, and remembers the lines of each series.  One thread at a time."""

    def __init__(
        self,
        line: Callable[[Served], Line[AnyStr]],
        nothing: AnyStr,
        part: ContainedPart = ContainedPart.DAEMON,
        faults: FaultContainment | None = None,
    ) -> None:
        """A sample that cannot be written is left out, and counted in `faults` as of `part`."""
        self._make_line: Callable[[Served], Line[AnyStr]] = line
        self._nothing: AnyStr = nothing
        self._part = part
        self._faults = faults or FaultContainment()
        self._lines: dict[tuple[str, Labels], Line[AnyStr]] = {}
        self._bytes = 0
        self._latest: _Layout[AnyStr] = _Layout((), (), {}, {})

    def write(self, samples: Sequence[Served]) -> dict[str, AnyStr]:
        """Return metric -> its lines; of a series that comes twice the later value."""
        if not self._latest.fits(samples) or not self._write_changed(samples):
            self._write_all(samples)
        return self._latest.families

    def _write_changed(self, samples: Sequence[Served]) -> bool:
        """Write what changed since the time before; return whether that could be done."""
        latest = self._latest
        changed: set[str] = set()
        try:
            for one, old, line in zip(samples, latest.samples, latest.lines, strict=True):
                if one is not old and one.value != old.value:
                    line.write(one.value)
                    changed.add(one.metric)
        except Exception:  # noqa: BLE001  writing all finds it again, and counts it
            return False
        latest.families = latest.families | {
            metric: self._nothing.join([line.last for line in latest.rows[metric]]) for metric in changed
        }
        latest.samples = samples
        return True

    def _write_all(self, samples: Sequence[Served]) -> None:
        lines, rows = self._lines, dict[str, dict[Labels, Line[AnyStr]]]()
        written: list[Line[AnyStr]] = []
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
        self._latest = _Layout(
            samples if len(written) == len(samples) == sum(map(len, rows.values())) else (),
            written,
            {metric: list(of_metric.values()) for metric, of_metric in rows.items()},
            {metric: self._nothing.join([line.last for line in found.values()]) for metric, found in rows.items()},
        )
