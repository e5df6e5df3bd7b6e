"""A real Prometheus takes the distribution of steps in, with native histograms and without, and the panel answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.metrics.catalog import by_name
from pacecar.monitor.export.prometheus import Exporter
from pacecar.monitor.histogram import DurationHistogram, HistogramSample
from pacecar.monitor.http.server import WebServer
from pacecar.records import Sample
from tests.dashboards.questions import RANGE_SECONDS, built_in, filled_in
from tests.dashboards.store import Prometheus
from tests.kit.selection import decisive
from tests.kit.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

GENERATED = Path(__file__).resolve().parents[2] / "dashboards" / "generated" / "job.json"
METRIC, JOB = "pacecar_job_step_duration_distribution_seconds", ("train", "3f2a9c01d4e5b678")
OTHERS = [Sample("pacecar_host_cpus_online", (), 3), Sample("pacecar_host_forks_total", (), 4)]
DURATIONS = [0.3] * 90 + [0.7] * 8 + [4.0] * 2
"""Seconds: p50 is 0.3, p95 is 0.7 and p99 is 4."""

PATIENCE_SECONDS = 60.0


class Job:
    """Ends a hundred steps at each scrape."""

    def __init__(self) -> None:
        self._durations = DurationHistogram()
        self._lock = threading.Lock()

    def __call__(self) -> list[HistogramSample]:
        with self._lock:
            for seconds in DURATIONS:
                self._durations.observe(round(seconds * NS_PER_SECOND))
            view = self._durations.view()
        assert view is not None
        return [HistogramSample(METRIC, JOB, view)]


@pytest.fixture
def target() -> Iterator[str]:
    exporter, server = Exporter(Job()), WebServer("127.0.0.1", 0)
    exporter.publish(OTHERS)
    server.bind()
    server.start(exporter)
    yield f"127.0.0.1:{server.port}"
    server.close()


def percentiles() -> dict[str, str]:
    """Name -> the expression of a line of the panel, as Grafana asks it for this job."""
    panels = json.loads(GENERATED.read_text(encoding="utf-8"))["panels"]
    (panel,) = (one for one in panels if one["title"] == "Step time: median and slowest")
    chosen = built_in(1, RANGE_SECONDS) | {"cluster": ".*", "job": JOB[0], "launch": JOB[1]}
    return {line["legendFormat"]: filled_in(line["expr"], chosen) for line in panel["targets"]}


@pytest.mark.parametrize("is_native", decisive([True, False], True), ids=["native", "classic"])
def test_percentiles_are_those_of_the_steps(target: str, tmp_path: Path, is_native: bool) -> None:
    features = ("native-histograms",) if is_native else ()
    with Prometheus(tmp_path, {target: {}}, features=features) as store:
        until(lambda: store.instant(percentiles()["p99"]), "two scrapes", PATIENCE_SECONDS)
        found = {name: float(store.instant(text)[0]["value"][1]) for name, text in percentiles().items()}
        if is_native:
            assert found == {
                "p50": pytest.approx(0.3, rel=0.045),
                "p95": pytest.approx(0.7, rel=0.045),
                "p99": pytest.approx(4.0, rel=0.045),
            }
            assert store.instant(f"{METRIC}_bucket") == []
        else:  # somewhere in the bucket
            assert 0.2 < found["p50"] <= 0.5 < found["p95"] <= 1.0
            assert 2.0 < found["p99"] <= 5.0
            assert store.instant(METRIC) == []
            assert len(store.instant(f"{METRIC}_bucket")) == 14
        for sample in OTHERS:
            (row,) = store.instant(sample.metric)
            assert float(row["value"][1]) == sample.value
        said = store.metadata()
        for sample in OTHERS:
            entry = by_name(sample.metric)
            family = sample.metric if is_native else sample.metric.removesuffix("_total")
            assert (said[family]["type"], said[family]["help"]) == (entry.kind, entry.help)
        assert said[METRIC]["type"] == "histogram"
