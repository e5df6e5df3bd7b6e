"""Formats one snapshot of the collectors in base units, as plain values or as lines of text.

A snapshot holds internal units (nanoseconds, milliwatts), so every value must be scaled by the catalog before it is
printed, here as in the exporter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pacecar.clock import NS_PER_SECOND
from pacecar.formatting.quantities import plural
from pacecar.metrics.catalog import by_name
from pacecar.records import Absent, Outcome, Sample, Snapshot

__all__ = ["document", "lines"]


def document(snapshot: Snapshot) -> dict[str, Any]:
    """Return `snapshot` as plain values: each collector's outcome, duration and samples."""
    return {
        "wall_seconds": snapshot.wall_ns / NS_PER_SECOND,
        "collectors": {
            name: {
                "outcome": outcome.__struct_config__.tag,
                "reason": outcome.reason or None,
                "read_failures": _read_failures(outcome),
                "duration_seconds": snapshot.durations_ns[name] / NS_PER_SECOND,
                "samples": [
                    {"metric": sample.metric, "labels": _labels(sample), "value": _outside(sample)}
                    for sample in _samples(outcome)
                ],
            }
            for name, outcome in snapshot.outcomes.items()
        },
    }


def lines(snapshot: Snapshot) -> Iterator[str]:
    """Yield `snapshot` as lines of text: the outcome of a collector, then its samples."""
    for name, outcome in snapshot.outcomes.items():
        unread = _read_failures(outcome)
        yield (
            f"{name}: {outcome.__struct_config__.tag}"
            + (f", {plural(unread, 'read failure')}" if unread else "")
            + (f": {outcome.reason}" if outcome.reason else "")
        )
        for sample in _samples(outcome):
            pairs = ",".join(f'{label}="{value}"' for label, value in _labels(sample).items())
            yield (
                f"  {sample.metric}{{{pairs}}} {_outside(sample)}" if pairs else f"  {sample.metric} {_outside(sample)}"
            )


def _read_failures(outcome: Outcome) -> int:
    return 0 if isinstance(outcome, Absent) else outcome.read_failures


def _samples(outcome: Outcome) -> tuple[Sample, ...]:
    return () if isinstance(outcome, Absent) else outcome.samples


def _labels(sample: Sample) -> dict[str, str]:
    return dict(zip(by_name(sample.metric).labels, sample.labels, strict=True))


def _outside(sample: Sample) -> int | float:
    return by_name(sample.metric).unit.convert(sample.value)
