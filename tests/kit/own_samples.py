"""Read what a part of the daemon says of itself: one of its own samples, in the metric's inside unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pacecar.records import Sample

__all__ = ["value_of", "values_of"]


class Part(Protocol):
    """A part of the daemon."""

    def own_samples(self) -> Iterable[Sample]:
        """Yield what it knows of itself."""
        ...


def value_of(part: Part, metric: str, *labels: str) -> int | float:
    """Return the value of the series `metric` with `labels`; raises KeyError where the part has none."""
    return {(s.metric, s.labels): s.value for s in part.own_samples()}[metric, labels]


def values_of(part: Part, metric: str) -> dict[str, int | float]:
    """Return label -> value, of a metric with one label."""
    return {s.labels[0]: s.value for s in part.own_samples() if s.metric == metric}
