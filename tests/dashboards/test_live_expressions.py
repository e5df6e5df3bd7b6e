"""No panel is empty: a real Prometheus answers every query of every dashboard.

On the planted node every question must find something, with no exception.  On this machine, with a real job, every one
but for those about what a machine like this may lack (`MAY_BE_MISSING`) or nobody wants to see (`GOOD_NEWS`): a minute
of a demo at full speed, which `make test-all` has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pacecar.dashboards.queries import metrics_in
from tests.dashboards.questions import RANGE_SECONDS, Question, panels_of, questions, resolve
from tests.dashboards.scene import Here, Planted
from tests.dashboards.store import Prometheus, RefusedError
from tests.kit.waiting import until
from tests.monitor.nvml_standin.standin import compiler

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

GENERATED = Path(__file__).resolve().parents[2] / "dashboards" / "generated"
DASHBOARDS = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(GENERATED.glob("*.json"))}
RULES = sorted(GENERATED.glob("*.rules.yml"))

PATIENCE_SECONDS = 120.0
"""Until the last panel has data; the second exact window takes longest."""

NO_TRIAL = "a tuner that is sure of itself begins no trial in the first minute"
VIRTUAL = "a virtual machine or a container need not have it"
FINE = "nobody is in trouble here"
MAY_BE_MISSING = {
    "pacecar_gpu_": "there need be no GPU",
    "pacecar_rdma_": "there need be no RDMA card",
    "pacecar_job_energy_": "only GPUs count energy",
    "pacecar_job_memory_": "torch's caching allocator is of GPUs",
    "pacecar_job_mfu_ratio": "the peak of a processor is not known",
    "pacecar_job_device_peak_flops_per_second": "the peak of a processor is not known",
    "pacecar_job_collective_bytes": "gloo does not say sizes",
    "pacecar_job_collective_bus_bandwidth_bytes_per_second": "gloo does not say sizes",
    "pacecar_job_checkpoint": "the demo saves no checkpoint",
    "pacecar_job_unsaved_steps": "the demo saves no checkpoint",
    "pacecar_tuner_decisions_total": NO_TRIAL,
    "pacecar_tuner_verdicts_total": NO_TRIAL,
    "pacecar_tuner_expected_gain_ratio": NO_TRIAL,
    "pacecar_tuner_measured_gain_ratio": NO_TRIAL,
    "pacecar_tuner_forecast_error_ratio": NO_TRIAL,
    "pacecar_tuner_orders_total": "nobody gives the tuner an order",
    "pacecar_knob_switch_duration_seconds": NO_TRIAL,
    "pacecar_host_pressure_": VIRTUAL,
    "pacecar_host_disk_": VIRTUAL,
    "pacecar_host_swap_": VIRTUAL,
    "pacecar_host_numa_": VIRTUAL,
    "pacecar_host_sensor_": VIRTUAL,
    "pacecar_host_memory_corrupted_bytes": "a kernel need not watch for faulty memory",
    "pacecar_host_tracked_connections": "a node need not track connections",
    "pacecar_host_hung_tasks_total": "kernels before Linux 6.13 do not count them",
    "pacecar_host_clock_": "a sandbox may keep the clock's state to itself",
    "pacecar_host_cpu_frequency_": VIRTUAL,
    "pacecar_host_network_link_bytes_per_second": "a virtual link has no rated speed",
    "pacecar_host_network_receive_utilization_": "a virtual link has no rated speed",
    "pacecar_host_network_transmit_utilization_": "a virtual link has no rated speed",
    "pacecar_cgroup_": "a group need have no limit",
    "pacecar_job_straggler": FINE,
    "pacecar_job_hang": FINE,
}
"""How metrics begin that this machine need not serve, and why.  On the planted node there are all of them."""

AT_THE_END = ("pacecar_job_hang", "pacecar_gpu_nvlink_link_receive_packets", "pacecar_gpu_nvlink_link_transmit_packets")
"""Metrics that the planted node has only once its job hangs: ranks that step hang no longer, and no GPU has the byte
counters of NVLink 4 and the packet counters of NVLink 5."""

GOOD_NEWS: dict[str, str] = {
    "pacecar / Job: Not calibrated yet": "the demo takes its first exact window before most scrapes",
    "pacecar / Tuning: Knobs in bytes": "the demo tunes the micro-batch alone",
}
"""Panels that may be empty while all is well though their metrics are served, and why."""


class Stage(NamedTuple):
    """The daemons and their Prometheus."""

    store: Prometheus
    planted: Planted


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    if compiler() is None:
        pytest.skip("there is no C compiler to build the stand-in GPUs with")
    folder = tmp_path_factory.mktemp("stage")
    for name in ("planted", "store"):
        (folder / name).mkdir()
    with (
        Planted(folder / "planted") as planted,
        Prometheus(folder / "store", {planted.address: {}}, RULES) as store,
    ):
        yield Stage(store, planted)


def unanswered(store: Prometheus, asked: Sequence[Question], patience_seconds: float) -> list[Question]:
    """Ask until each question had an answer or time is up; return those that had none."""
    limit = time.monotonic() + patience_seconds
    open_ones = list(asked)
    while True:
        open_ones = [question for question in open_ones if not _answers(store, question)]
        if not open_ones or time.monotonic() > limit:
            return open_ones
        time.sleep(1.0)


def _answers(store: Prometheus, question: Question) -> bool:
    if question.is_instant:
        return bool(store.instant(question.expression))
    return bool(store.over(question.expression, RANGE_SECONDS))


def asked_of(store: Prometheus, job: str, node: str) -> list[Question]:
    """Return what Grafana asks somebody who chose `job` and `node`, once all variables have something to offer."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return [
                question
                for dashboard in DASHBOARDS.values()
                for question in questions(dashboard, chosen(store, dashboard, {"job": job, "node": node}))
            ]
        except LookupError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.5)


def chosen(store: Prometheus, dashboard: Mapping[str, Any], wishes: Mapping[str, str]) -> dict[str, str]:
    return resolve(dashboard, store.label_values, wishes)


def is_excused(question: Question) -> bool:
    names = [metric.name for metric in metrics_in([question.expression])]
    return question.name in GOOD_NEWS or any(name.startswith(prefix) for name in names for prefix in MAY_BE_MISSING)


@pytest.mark.full
def test_every_question_has_an_answer_on_this_machine_or_says_what_is_missing(tmp_path: Path) -> None:
    for name in ("here", "store"):
        (tmp_path / name).mkdir()
    with Here(tmp_path / "here") as here, Prometheus(tmp_path / "store", {here.address: {}}, RULES) as store:
        asked = [q for q in asked_of(store, here.job, here.address) if not is_excused(q)]
        assert len(asked) > 50
        silent = unanswered(store, asked, PATIENCE_SECONDS)
    assert not silent, "no data:\n" + "\n".join(map(str, silent))


def test_every_question_has_an_answer_where_gpus_are_and_all_goes_wrong(stage: Stage) -> None:
    before = "count_over_time(pacecar_gpu_ecc_errors_total[1m]) > 2 and on () count(pacecar_job_energy_per_step_joules)"
    until(lambda: stage.store.instant(before), "no scrape shows the time before", PATIENCE_SECONDS)
    stage.planted.plant()  # a counter that is first seen after it grew has not grown
    asked = asked_of(stage.store, stage.planted.job, stage.planted.address)
    at_the_end = [question for question in asked if any(name in question.expression for name in AT_THE_END)]
    silent = unanswered(stage.store, [q for q in asked if q not in at_the_end], PATIENCE_SECONDS)
    stage.planted.stall()
    silent += unanswered(stage.store, at_the_end, PATIENCE_SECONDS / 2)
    assert not silent, "no data:\n" + "\n".join(map(str, silent))


def test_every_rule_is_evaluated(stage: Stage) -> None:
    """After the planted troubles, so that templates of annotations have been filled in too."""
    sick = [rule for rule in stage.store.rules() if rule["health"] == "err"]
    assert not sick, sick
    assert bool(RULES) == bool(stage.store.rules())


def test_a_question_without_data_would_be_noticed(stage: Stage) -> None:
    def invented(expression: str) -> Question:
        return Question("a dashboard", "a panel", "A", expression, is_instant=False)

    right = invented(f'pacecar_job_step{{training_job="{stage.planted.job}"}}')
    wrong = invented(f'pacecar_job_step{{job="{stage.planted.job}"}}')  # Prometheus' own label of that name
    assert unanswered(stage.store, [right, wrong], 0.0) == [wrong]
    with pytest.raises(RefusedError, match="parse error"):
        _answers(stage.store, invented("rate(pacecar_job_steps_total)"))
    variable = {"name": "rank", "type": "query", "query": "label_values(pacecar_job_speed, rank)"}
    with pytest.raises(LookupError, match="nothing to choose from"):
        chosen(stage.store, {"templating": {"list": [variable]}}, {})


def test_what_is_excused_exists() -> None:
    """Every exception still names a panel that needs it."""
    names = {
        f"{dashboard['title']}: {title}"
        for dashboard in DASHBOARDS.values()
        for title in (
            *(panel["title"] for panel in panels_of(dashboard)),
            *(f"annotation {mark['name']}" for mark in dashboard["annotations"]["list"]),
        )
    }
    assert set(GOOD_NEWS) <= names
    drawn = {
        metric.name
        for dashboard in DASHBOARDS.values()
        for panel in panels_of(dashboard)
        for metric in metrics_in(target["expr"] for target in panel.get("targets", ()))
    }
    assert all(any(name.startswith(prefix) for name in drawn) for prefix in MAY_BE_MISSING)
