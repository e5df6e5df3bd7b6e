"""Writes PromQL through the metric catalog, which rules out wrong metric names and labels.

A query with a renamed metric shows an empty panel, which looks like a healthy cluster.  So these functions look each
metric up, refuse labels that it does not have and rates of gauges, and add the dashboard's variables by the metric's
own labels.

Pure, without grafanalib.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pacecar.metrics.catalog import CATALOG, Metric, MetricKind, by_name

__all__ = [
    "CLUSTER",
    "FLEET",
    "FLEET_NODES",
    "GPU",
    "INTERVAL",
    "JOB",
    "LAUNCH",
    "NODE",
    "ONE_JOB",
    "ON_NODES",
    "OWNER",
    "RANK",
    "QueryError",
    "Scope",
    "combine",
    "divide",
    "gpus_held",
    "metrics_in",
    "or_zero",
]

JOB, LAUNCH, RANK = by_name("pacecar_rank_info").labels[:3]
"""The labels of a training job, its launch and a rank, as spelt in the catalog.  Two jobs may have one name, so
aggregate and join by name and launch."""

GPU = by_name("pacecar_gpu_info").labels[0]

OWNER = (JOB, LAUNCH, "pod_namespace", "pod_name", "slurm_job")
"""Labels of `pacecar_process_info` for the owner of a process; those that do not apply are empty."""

NODE = "instance"
"""The label that Prometheus adds to everything scraped from one daemon."""

CLUSTER = "cluster"
"""A label that users with several clusters add in Prometheus; without it, `.*` still matches."""

INTERVAL = "$__rate_interval"
"""Grafana's own window: at least four scrapes, so that a rate has enough samples."""

_OF_THE_TARGET = frozenset({CLUSTER, NODE})
_OPERATORS = ("!=", "=~", "!~")
_NAME = re.compile(r"\bpacecar_[a-z0-9_]+")
_METRICS = {series: metric for metric in CATALOG for series in metric.series}


class QueryError(ValueError):
    """An invalid query: wrong label, rate of a gauge."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The variables of a dashboard that its queries select by, as matchers of label -> `="$job"`.

    `jobs` are for metrics with a job label, `nodes` for all others.  A matcher is omitted if the metric lacks its
    label, except labels of the target, which every series has.
    """

    jobs: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)
    interval: str = INTERVAL

    def select(self, name: str, where: Mapping[str, str] | None = None, *, all_ranks: bool = False) -> str:
        """Return a selector for the metric `name` in this scope.

        `where` maps labels to values; a value may begin with `!=`, `=~` or `!~`.  `all_ranks` ignores the rank
        variable, for figures of the whole job.

        Raises:
            KeyError: the metric is not in the catalog.
            QueryError: the metric has no such label.
        """
        matchers = ", ".join(self._matchers(by_name(name), where or {}, all_ranks))
        return f"{name}{{{matchers}}}" if matchers else name

    def rate(self, name: str, where: Mapping[str, str] | None = None, *, all_ranks: bool = False) -> str:
        """Return the per-second rate of the counter `name`; raises as `select`, and QueryError for a gauge."""
        return f"rate({self._counter(name, where, all_ranks)}[{self.interval}])"

    def increase(
        self, name: str, where: Mapping[str, str] | None = None, *, window: str | None = None, all_ranks: bool = False
    ) -> str:
        """Return the growth of the counter `name` in `window`; raises as `rate`."""
        return f"increase({self._counter(name, where, all_ranks)}[{window or self.interval}])"

    def mean_of(self, total: str, count: str, *, all_ranks: bool = False) -> str:
        """Return the mean of a total per count over the window, from two counters.

        Unlike a gauge, which shows only the last step before a scrape, it covers all steps.
        """
        return divide(self.rate(total, all_ranks=all_ranks), self.rate(count, all_ranks=all_ranks))

    def percentile(self, share: float, name: str, *labels: str) -> str:
        """Return the percentile `share` (0..1) of the histogram `name`, by `labels`.

        A Prometheus stores either native histograms or fixed buckets, so one of the two queries is empty.

        Raises:
            KeyError, QueryError: as `select`; QueryError if it is not a histogram.
        """
        if by_name(name).kind is not MetricKind.HISTOGRAM:
            raise QueryError(f"{name} is not a histogram: it has no percentiles")
        selector = self.select(name, all_ranks=True)
        fixed = selector.replace(name, f"{name}_bucket", 1)
        native, classic = (
            f"histogram_quantile({share:g}, {combine('sum', f'rate({counts}[{self.interval}])', *by)})"
            for counts, by in ((selector, labels), (fixed, (*labels, "le")))
        )
        return f"{native} or {classic}"

    def fast_times(self, name: str) -> str:
        """Return the 10th percentile of the gauge `name` in the range shown, the same value at each point.

        Without `@ end()` each point of a graph would query its own range.  Supported by Prometheus 2.33 and later,
        VictoriaMetrics and Mimir.
        """
        return f"quantile_over_time(0.1, {self.select(name)}[$__range] @ end())"

    def _counter(self, name: str, where: Mapping[str, str] | None, all_ranks: bool) -> str:
        if by_name(name).kind is not MetricKind.COUNTER:
            raise QueryError(f"{name} is not a counter: it has no rate")
        return self.select(name, where, all_ranks=all_ranks)

    def _matchers(self, metric: Metric, where: Mapping[str, str], all_ranks: bool) -> Iterator[str]:
        for label in where:
            if label not in metric.labels and label not in _OF_THE_TARGET:
                raise QueryError(f"{metric.name} has no label {label!r}; it has {', '.join(metric.labels) or 'none'}")
        for label, matcher in (self.jobs if JOB in metric.labels else self.nodes).items():
            if label in where or (label == RANK and all_ranks):
                continue
            if label in _OF_THE_TARGET or label in metric.labels:
                yield label + matcher
        for label, value in where.items():
            operator = value[:2] if value.startswith(_OPERATORS) else "="
            yield f'{label}{operator}"{value.removeprefix(operator) if operator != "=" else value}"'


_IN_CLUSTER = {CLUSTER: '=~"$cluster"'}
_NODES = {**_IN_CLUSTER, NODE: '=~"$node"', GPU: '=~"$gpu"'}

ONE_JOB = Scope({**_IN_CLUSTER, JOB: '="$job"', LAUNCH: '="$launch"', RANK: '=~"$rank"'}, _NODES)
"""One launch of a job, and its nodes."""

ON_NODES = Scope({**_IN_CLUSTER, NODE: '=~"$node"', GPU: '=~"$gpu"'}, _NODES)
"""Nodes, and jobs on them."""

_FLEET_NODES = {**_IN_CLUSTER, NODE: '=~"$node"'}

FLEET = Scope({**_IN_CLUSTER, JOB: '=~"$job"'}, _FLEET_NODES)
"""All jobs, and all nodes."""

FLEET_NODES = Scope(_FLEET_NODES, _FLEET_NODES)
"""All nodes, and everything that runs on them, in the selected job or not."""


def combine(operation: str, expression: str, *labels: str) -> str:
    """Return `expression` aggregated by `labels`; `operation` is sum, max, min, count, avg or "quantile(0.5)"."""
    function, _, argument = operation.partition("(")
    inner = f"{argument.removesuffix(')')}, {expression}" if argument else expression
    by = f" by ({', '.join(labels)}) " if labels else ""
    return f"{function}{by}({inner})"


def divide(part: str, whole: str, *, matching: str = "") -> str:
    """Return part / whole, absent if the whole is zero."""
    return f"{part} / {matching + ' ' if matching else ''}({whole} > 0)"


def gpus_held(scope: Scope, *owner: str) -> str:
    """Return 1 for each GPU and each owner of a process on it; `owner` has labels of `pacecar_process_info`."""
    owned = [label for label in owner if label != CLUSTER]
    memory, info = scope.select("pacecar_gpu_process_memory_bytes"), scope.select("pacecar_process_info")
    owners = combine("group", info, CLUSTER, NODE, "pid", *owned)
    held = f"{memory} * on ({CLUSTER}, {NODE}, pid) group_left ({', '.join(owned)}) {owners}"
    return combine("group", held, CLUSTER, NODE, GPU, *owned)


def or_zero(expression: str, of: str) -> str:
    """Return `expression`, or 0 if it is empty and `of` is not, because "none of many" is a measurement."""
    return f"{expression} or 0 * count({of})"


def metrics_in(expressions: Iterable[str]) -> list[Metric]:
    """Return the catalog entries named in `expressions`, each once, in order of appearance.

    Raises:
        KeyError: a `pacecar_` name is not in the catalog.
    """
    names = dict.fromkeys(name for text in expressions for name in _NAME.findall(text))
    return list(dict.fromkeys(_METRICS.get(name) or by_name(name) for name in names))
