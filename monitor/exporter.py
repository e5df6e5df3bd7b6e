"""How does Prometheus see the samples?  The only file that knows prometheus_client.

A registry of gauges that ticks set would keep every series for ever: a job that ended would stay at its last value.  So
nothing is kept here; each scrape asks for the samples of now, and what is gone is gone.

Here, and nowhere else, inside integers become outside base units.  Nothing is measured here and no driver is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pacecar.catalog import CATALOG, Kind
from pacecar.catalog import Metric as Entry
from pacecar.records import Sample

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

__all__ = ["metrics_app"]


class _Exporter(Collector):
    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each metric of which there is a sample, in the catalog's order."""
        rows: dict[str, dict[tuple[str, ...], float]] = {}
        for sample in self._samples():  # one value a series: a source that lists one twice must not break the scrape
            rows.setdefault(sample.metric, {})[sample.labels] = sample.value
        for entry in CATALOG:
            if entry.name in rows:
                family = _family(entry)
                for labels, value in rows[entry.name].items():
                    family.add_metric(labels, outside(entry, value))
                yield family

    def describe(self) -> Iterator[Metric]:
        """Yield what could be served, so that registering does not collect."""
        return map(_family, CATALOG)


def _family(entry: Entry) -> CounterMetricFamily | GaugeMetricFamily:
    family = CounterMetricFamily if entry.kind is Kind.COUNTER else GaugeMetricFamily
    return family(entry.name, entry.help, labels=entry.labels, unit=entry.unit.outside)


def outside(entry: Entry, value: int | float) -> float:
    """Return `value` in the base unit of the metric's name."""
    scale = entry.unit.scale
    # Dividing by the whole power of ten is correctly rounded; times 1e-9 makes 0.30000000000000004 of 0.3 s.
    return float(value / round(1 / scale)) if scale < 1 else float(value * scale)


def metrics_app(samples: Callable[[], Iterable[Sample]]) -> WSGIApplication:
    """Return the WSGI application that serves `samples()` as Prometheus or OpenMetrics text, as the scraper accepts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exporter(samples))
    app: WSGIApplication = make_wsgi_app(registry)
    return app
