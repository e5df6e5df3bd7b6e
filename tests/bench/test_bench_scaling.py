"""The bench of many nodes: its nodes differ where real ones do, and a real Prometheus takes them for different."""

from __future__ import annotations

import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.bench_scaling import Prometheus, expressions, filled
from bench.scaling_nodes import GPUS, JOB_NODES, Node
from pacecar.metrics.catalog import by_name
from tests.kit.tools import find_tool

GENERATED = Path(__file__).resolve().parents[2] / "dashboards/generated"


def row(metric: str, value: float, **labels: str) -> tuple[str, list[str], float]:
    return metric, [labels.get(name, "x") for name in by_name(metric).labels], value


ROWS = [
    row("pacecar_job_step", 41, training_job="run-7", rank="3"),
    row("pacecar_job_steps_total", 5000, training_job="run-7", rank="3"),
    row("pacecar_gpu_utilization_ratio", 0.5, gpu="0"),
    row("pacecar_gpu_up", 1, gpu="0"),
    row("pacecar_gpu_memory_size_bytes", 1000, gpu="0"),
    row("pacecar_gpu_power_watts", 500_000, gpu="0"),
]


def scraped(node: Node) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{node.server.port}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture
def nodes():
    made = [Node(number, ROWS) for number in (0, JOB_NODES + 1)]
    yield made
    for node in made:
        node.server.close()


def test_nodes_have_ranks_and_jobs_of_their_own(nodes):
    first, second = (set(scraped(node)) for node in nodes)
    assert 'pacecar_job_step{launch="x",rank="3",training_job="job-0"}' in first
    assert f'pacecar_job_step{{launch="x",rank="{GPUS + 3}",training_job="job-1"}}' in second
    assert len(first) == len(second) == len(ROWS)


def test_counters_grow_gauges_move_and_constants_stay(nodes):
    node = nodes[0]
    before = scraped(node)
    for _ in range(5):
        node.tick()
    after = scraped(node)
    moved = {series.partition("{")[0] for series, value in after.items() if value != before[series]}
    assert {"pacecar_job_steps_total", "pacecar_gpu_power_watts", "pacecar_gpu_utilization_ratio"} <= moved
    assert not moved & {"pacecar_gpu_up", "pacecar_gpu_memory_size_bytes"}
    steps = next(series for series in after if series.startswith("pacecar_job_steps_total"))
    assert after[steps] > before[steps]


def test_every_variable_of_every_dashboard_has_a_value():
    for dashboard in GENERATED.glob("*.json"):
        for expression, _ in expressions(dashboard):
            assert "$" not in expression, expression
    assert filled('rate(x{job=~"$job", node="${node:regex}"}[$__rate_interval])') == 'rate(x{job=~".*", node=".*"}[1m])'


@pytest.mark.slow
@pytest.mark.distributed
def test_a_real_prometheus_scrapes_them_and_is_asked(nodes, tmp_path):
    find_tool("prometheus")
    with ExitStack() as stack:
        prometheus = Prometheus(stack, tmp_path, 1, GENERATED)
        prometheus.name_targets([node.server.port for node in nodes])
        limit = time.monotonic() + 40
        while prometheus.value("sum(up)") != 2:
            assert time.monotonic() < limit
            time.sleep(0.5)
        assert prometheus.value("max(scrape_samples_scraped)") == len(ROWS)
        assert prometheus.value("count(pacecar_job_step)") == 2
        duration, series = prometheus.ask("pacecar_gpu_power_watts", over_seconds=10)
        while series != 2:  # the ten seconds end at a full step: a sample may be newer
            assert time.monotonic() < limit
            time.sleep(0.5)
            duration, series = prometheus.ask("pacecar_gpu_power_watts", over_seconds=10)
        assert duration > 0
        assert prometheus.own()["prometheus_tsdb_head_series"] >= 2 * len(ROWS)
