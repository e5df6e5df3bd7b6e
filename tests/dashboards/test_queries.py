"""A query can only be written about what exists."""

from __future__ import annotations

import pytest

from pacecar.dashboards.queries import QueryError, combine, divide, increase, mean_of, metrics_in, rate, select


def test_an_unknown_metric_cannot_be_asked_for():
    with pytest.raises(KeyError, match="pacecar_job_speed"):
        select("pacecar_job_speed")


def test_a_label_that_the_metric_lacks_cannot_be_asked_for():
    with pytest.raises(QueryError, match="pacecar_job_steps_total has no label 'heading'; it has training_job, rank"):
        select("pacecar_job_steps_total", {"heading": "compute"})


@pytest.mark.parametrize("ask", [rate, increase])
def test_a_gauge_has_no_rate(ask):
    with pytest.raises(QueryError, match="is a gauge"):
        ask("pacecar_job_step_duration_seconds")


def test_job_series_follow_the_job_and_the_ranks_chosen():
    assert select("pacecar_job_step") == 'pacecar_job_step{training_job="$job", rank=~"$rank"}'
    assert select("pacecar_job_step", all_ranks=True) == 'pacecar_job_step{training_job="$job"}'


def test_host_series_follow_the_nodes_of_the_job():
    assert select("pacecar_host_cpu_utilization_ratio") == 'pacecar_host_cpu_utilization_ratio{instance=~"$node"}'


def test_a_matcher_may_carry_its_operator():
    text = select("pacecar_host_cpu_seconds_total", {"mode": "!=idle"})
    assert text == 'pacecar_host_cpu_seconds_total{instance=~"$node", mode!="idle"}'


def test_a_share_of_nothing_is_absent():
    assert divide("a", "b") == "a / (b > 0)"


def test_aggregation_with_and_without_a_parameter():
    assert combine("sum", "x", "rank", "heading") == "sum by (rank, heading) (x)"
    assert combine("quantile(0.5)", "x") == "quantile(0.5, x)"


def test_metrics_are_found_once_and_in_order():
    text = mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total")
    names = [metric.name for metric in metrics_in([text, text])]
    assert names == ["pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total"]
