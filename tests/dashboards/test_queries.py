"""Queries only accept existing metrics and labels; what is made of them is in dashboards/generated (test_generated)."""

from __future__ import annotations

import pytest

from pacecar.dashboards.queries import ONE_JOB, QueryError, Scope, metrics_in

select, rate, increase, mean_of = ONE_JOB.select, ONE_JOB.rate, ONE_JOB.increase, ONE_JOB.mean_of


def test_an_unknown_metric_cannot_be_asked_for():
    with pytest.raises(KeyError, match="pacecar_job_speed"):
        select("pacecar_job_speed")


def test_a_label_that_the_metric_lacks_cannot_be_asked_for():
    with pytest.raises(
        QueryError, match="pacecar_job_steps_total has no label 'heading'; it has training_job, launch, rank"
    ):
        select("pacecar_job_steps_total", {"heading": "compute"})


@pytest.mark.parametrize("ask", [rate, increase])
def test_a_gauge_has_no_rate(ask):
    with pytest.raises(QueryError, match="is not a counter"):
        ask("pacecar_job_step_duration_seconds")


def test_a_matcher_may_carry_its_operator():
    text = Scope(nodes={"instance": '="a"'}).select("pacecar_host_cpu_seconds_total", {"mode": "!=idle"})
    assert text == 'pacecar_host_cpu_seconds_total{instance="a", mode!="idle"}'


def test_metrics_are_found_once_and_in_order():
    text = mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total")
    names = [metric.name for metric in metrics_in([text, text])]
    assert names == ["pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total"]
