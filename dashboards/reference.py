"""Writes docs/metrics.md from the catalog: one table of metrics per subject."""

from __future__ import annotations

from pacecar.metrics.catalog import CATALOG, WINDOW_NAMES, Metric, MetricSubject

__all__ = ["reference"]

HEAD = """\
# Metrics

<!-- Generated from pacecar/metrics/catalog.py by `make dashboards`. Do not edit: change the catalog. -->

The daemon serves these at `http://127.0.0.1:9850/metrics`, as Prometheus text, OpenMetrics or Prometheus protobuf.

- Names have the base unit: seconds, bytes, hertz, watts, joules, celsius, ratio (0 to 1); others are counts or codes.
- A series exists only if a number was read. Zero is a measurement; a missing number is absent.
- A job's counters include every step since attach. They travel in every record, so a dropped record loses no total.
- Constant facts are labels of an `_info` series, whose value is always 1. Join on it:
  `pacecar_job_step_duration_seconds * on (training_job, launch, rank) group_left (host) pacecar_rank_info`.
- A histogram has fixed buckets, or is a native histogram if Prometheus asks for one ([how](dashboards.md#percentiles)).
- A job's metrics disappear when it has sent nothing for `job_forget_seconds`.
"""


def _rows(metric: Metric) -> list[str]:
    """Return the metric's row, and one for its extremes over the window if it is windowed."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    rows = [f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"]
    if metric.windowed:
        names = ", ".join(f"`{over.name}`" for over in metric.over_window())
        rows.append(f"| {names} | {metric.kind} | {labels} | Its lowest, mean and highest value of the last window. |")
    return rows


def reference() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    in_windows = {name for names in WINDOW_NAMES.values() for name in names}
    for subject in MetricSubject:
        metrics = [metric for metric in CATALOG if metric.subject is subject and metric.name not in in_windows]
        parts.append(f"\n## {subject}\n\n| Metric | Kind | Labels | Meaning |\n|---|---|---|---|\n")
        parts.append("\n".join(row for metric in metrics for row in _rows(metric)) + "\n")
    return "".join(parts)
