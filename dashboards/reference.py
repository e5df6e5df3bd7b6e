"""Writes docs/metrics.md from the catalog: one table of metrics for each subject.

A page of metrics kept by hand is wrong by the second release.  This one is generated, and a test regenerates it.
"""

from __future__ import annotations

import sys

from pacecar.metrics.catalog import CATALOG, Metric, MetricKind, MetricSubject

__all__ = ["reference"]

HEAD = """\
# Metrics

<!-- Generated from pacecar/metrics/catalog.py by `make dashboards`. Do not edit: change the catalog. -->

The daemon serves these at `http://127.0.0.1:9850/metrics`, as Prometheus text, OpenMetrics or Prometheus protobuf.

- Units are base units: seconds, bytes, hertz, watts, and ratios from 0 to 1.
- A series exists only if a number was read. Zero is a measurement; what is missing is absent.
- Counters of a job add up every step since attach. They travel in every record, so a dropped record loses no total.
- Facts that do not change are labels of an `_info` series, whose value is always 1. Join on it:
  `pacecar_job_step_duration_seconds * on (training_job, launch, rank) group_left (host) pacecar_rank_info`.
- A histogram comes in buckets of fixed bounds, and to a Prometheus that asks for it as a native histogram
  ([how](dashboards.md#percentiles)).
- Metrics of a job disappear when the daemon has not heard of it for `job_forget_seconds`.
"""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
    unit = metric.unit.outside or ("events" if metric.kind is MetricKind.COUNTER else "number")
    return f"| `{metric.name}` | {metric.kind} | {unit.replace('_', ' ')} | {labels} | {metric.help} |"


def reference() -> str:
    """Return the page as Markdown: one table a subject, in the order of the catalog."""
    parts = [HEAD]
    for subject in MetricSubject:
        rows = [_row(metric) for metric in CATALOG if metric.subject is subject]
        parts.append(f"\n## {subject}\n\n| Metric | Kind | Unit | Labels | Meaning |\n|---|---|---|---|---|\n")
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
