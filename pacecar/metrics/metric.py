"""Defines a metric: its kind, unit and subject, and the rules for its name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

__all__ = ["HISTOGRAM_PARTS", "Metric", "MetricKind", "MetricSubject", "MetricUnit"]


HISTOGRAM_PARTS = ("_bucket", "_count", "_sum")
"""Suffixes of the series of a histogram with fixed buckets."""


class MetricKind(StrEnum):
    """The type of a metric, in Prometheus' terms."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricUnit(Enum):
    """Inside unit -> (outside name, factor, what the inside value counts)."""

    NANOSECONDS = ("seconds", 1e-9, "nanoseconds")
    BYTES = ("bytes", 1.0, "bytes")
    BYTES_PER_SECOND = ("bytes_per_second", 1.0, "bytes per second")
    MILLIWATTS = ("watts", 1e-3, "milliwatts")
    MILLIJOULES = ("joules", 1e-3, "millijoules")
    CELSIUS = ("celsius", 1.0, "degrees Celsius")
    MILLICELSIUS = ("celsius", 1e-3, "thousandths of a degree Celsius")
    HERTZ = ("hertz", 1.0, "hertz")
    KILOHERTZ = ("hertz", 1e3, "kilohertz")
    MEGAHERTZ = ("hertz", 1e6, "megahertz")
    RATIO = ("ratio", 1.0, "0..1")
    COUNT = ("", 1.0, "a count")

    @property
    def outside(self) -> str:
        """The base unit in the metric's name; empty for a count."""
        return self.value[0]

    @property
    def scale(self) -> float:
        """Outside value = inside value * scale."""
        return self.value[1]

    def convert(self, value: int | float) -> int | float:
        """Return an inside value in the outside unit; with a factor of 1, integers stay integers."""
        if self.scale == 1.0:
            return value
        # Dividing by the whole power of ten is correctly rounded; times 1e-9 makes 0.30000000000000004 of 0.3 s.
        return value / round(1 / self.scale) if self.scale < 1.0 else value * self.scale


class MetricSubject(StrEnum):
    """The subject of a metric, a section of docs/metrics.md."""

    HOST = "Host"
    RDMA = "RDMA"
    CGROUP = "Control groups"
    GPU = "GPU"
    JOB = "Job"
    TUNER = "Tuner"
    DAEMON = "The daemon itself"


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the catalog; `labels` are in the order of samples' label values."""

    name: str
    kind: MetricKind
    unit: MetricUnit
    subject: MetricSubject
    labels: tuple[str, ...]
    help: str
    windowed: bool = False

    def __post_init__(self) -> None:
        stem = self.name.removesuffix("_total")
        assert self.name.startswith("pacecar_"), self.name
        assert (self.kind is MetricKind.COUNTER) == self.name.endswith("_total"), self.name
        assert stem.endswith(self.unit.outside), f"{self.name} does not end in its unit {self.unit.outside}"
        assert self.help.endswith("."), f"{self.name}: help is a sentence"
        assert not self.windowed or self.kind is MetricKind.GAUGE, f"{self.name}: a gauge alone has extremes"

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series; for a histogram, its own (native) and those of its buckets, count and sum."""
        if self.kind is MetricKind.HISTOGRAM:
            return (self.name, *(self.name + part for part in HISTOGRAM_PARTS))
        return (self.name,)

    def over_window(self) -> tuple[Metric, ...]:
        """Return the metrics for the lowest, mean and highest value of the window, in this order."""
        unit = f"_{self.unit.outside}" if self.unit.outside else ""
        stem, text = self.name.removesuffix(unit), self.help.removesuffix(".")
        return tuple(
            Metric(f"{stem}_window_{stat}{unit}", self.kind, self.unit, self.subject, self.labels, f"{text}: {words}.")
            for stat, words in _EXTREMES.items()
        )


_EXTREMES = {
    "min": "the lowest value of the last window",
    "mean": "the mean of the last window",
    "max": "the highest value of the last window",
}
