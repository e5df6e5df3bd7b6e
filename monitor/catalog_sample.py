"""Makes samples of metrics in the catalog, for collectors and for the daemon's own parts."""

from __future__ import annotations

from pacecar.metrics.catalog import by_name
from pacecar.records import Sample

__all__ = ["sample"]


def sample(metric: str, value: int | float, *labels: str) -> Sample:
    """Return a sample of a metric in the catalog; another name or number of labels is a bug."""
    expected = by_name(metric).labels
    assert len(labels) == len(expected), f"{metric} has labels {expected}, got {labels}"
    return Sample(metric, labels, value)
