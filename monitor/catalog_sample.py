"""Makes a sample of a metric of the catalog, for collectors and for what parts of the daemon know of themselves."""

from __future__ import annotations

from pacecar.metrics.catalog import by_name
from pacecar.records import Sample

__all__ = ["sample"]


def sample(metric: str, value: int | float, *labels: str) -> Sample:
    """Return a sample of a metric of the catalog; a name or a label count that is not the catalog's is a bug."""
    expected = by_name(metric).labels
    assert len(labels) == len(expected), f"{metric} has labels {expected}, got {labels}"
    return Sample(metric, labels, value)
