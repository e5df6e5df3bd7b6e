"""How does a panel ask for a series?  Through the catalog, so that a wrong name cannot be written.

A PromQL string with a typed-in metric name keeps working until somebody renames the metric, and then shows an empty
panel, which looks like a healthy cluster.  So no panel types a name: these functions look the metric up, refuse labels
that it does not have, refuse a rate of a gauge, and add the dashboard's variables by the metric's own labels.

Everything here is pure text and needs no grafanalib.  Left out: a full PromQL builder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pacecar.catalog import Kind, Metric, by_name

__all__ = [
    "INTERVAL",
    "JOB",
    "NODE",
    "RANK",
    "QueryError",
    "combine",
    "divide",
    "increase",
    "mean_of",
    "metrics_in",
    "rate",
    "select",
]

JOB, RANK = by_name("pacecar_rank_info").labels[:2]
"""The labels that say which training job and which rank; the catalog decides how they are spelt."""

NODE = "instance"
"""The label that Prometheus itself puts on everything that it scraped from one daemon."""

INTERVAL = "$__rate_interval"
"""Grafana's own window: at least four scrapes, so that a rate never falls between two of them."""

_OPERATORS = ("!=", "=~", "!~")
_NAME = re.compile(r"\bpacecar_[a-z0-9_]+")


class QueryError(ValueError):
    """A query that could not return what it says: wrong label, rate of a gauge."""


def _matchers(metric: Metric, where: Mapping[str, str], all_ranks: bool) -> str:
    for label in where:
        if label not in metric.labels:
            raise QueryError(f"{metric.name} has no label {label!r}; it has {', '.join(metric.labels) or 'none'}")
    parts = []
    if JOB in metric.labels:
        parts.append(f'{JOB}="$job"')
        if RANK in metric.labels and not all_ranks:
            parts.append(f'{RANK}=~"$rank"')
    else:
        parts.append(f'{NODE}=~"$node"')
    for label, value in where.items():
        operator = value[:2] if value.startswith(_OPERATORS) else "="
        parts.append(f'{label}{operator}"{value.removeprefix(operator) if operator != "=" else value}"')
    return ", ".join(parts)


def select(name: str, where: Mapping[str, str] | None = None, *, all_ranks: bool = False) -> str:
    """Return a selector for the metric `name` in the dashboard's job and ranks, or on the job's nodes.

    `where` maps labels to values; a value may begin with `!=`, `=~` or `!~`.  `all_ranks` leaves the rank variable out,
    for what is true of the job as a whole.

    Raises:
        KeyError: the metric is not in the catalog.
        QueryError: the metric has no such label.
    """
    return f"{name}{{{_matchers(by_name(name), where or {}, all_ranks)}}}"


def rate(name: str, where: Mapping[str, str] | None = None, *, all_ranks: bool = False) -> str:
    """Return the per-second rate of the counter `name`; raises as `select`, and QueryError for a gauge."""
    return f"rate({_counter(name, where, all_ranks)}[{INTERVAL}])"


def increase(
    name: str, where: Mapping[str, str] | None = None, *, window: str = INTERVAL, all_ranks: bool = False
) -> str:
    """Return how much the counter `name` grew in `window`; raises as `rate`."""
    return f"increase({_counter(name, where, all_ranks)}[{window}])"


def _counter(name: str, where: Mapping[str, str] | None, all_ranks: bool) -> str:
    if by_name(name).kind is not Kind.COUNTER:
        raise QueryError(f"{name} is a gauge: it has no rate")
    return select(name, where, all_ranks=all_ranks)


def combine(operation: str, expression: str, *labels: str) -> str:
    """Return `expression` aggregated by `labels`; `operation` is sum, max, min, count, avg or "quantile(0.5)"."""
    function, _, argument = operation.partition("(")
    inner = f"{argument.removesuffix(')')}, {expression}" if argument else expression
    by = f" by ({', '.join(labels)}) " if labels else ""
    return f"{function}{by}({inner})"


def divide(part: str, whole: str, *, matching: str = "") -> str:
    """Return part / whole, absent where the whole is zero: a share of nothing is not zero."""
    return f"{part} / {matching + ' ' if matching else ''}({whole} > 0)"


def mean_of(total: str, count: str, *, all_ranks: bool = False) -> str:
    """Return the mean of a total per count over the window, from two counters.

    A gauge of the last value shows the one step that happened to end before a scrape; this has seen them all.
    """
    return divide(rate(total, all_ranks=all_ranks), rate(count, all_ranks=all_ranks))


def metrics_in(expressions: Iterable[str]) -> list[Metric]:
    """Return the catalog entries named in `expressions`, each once, in order of appearance.

    Raises:
        KeyError: something is named like a metric of ours and is not in the catalog.
    """
    names = dict.fromkeys(name for text in expressions for name in _NAME.findall(text))
    return [by_name(name) for name in names]
