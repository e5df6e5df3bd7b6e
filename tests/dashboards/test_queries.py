"""Queries only accept existing metrics and labels."""

from __future__ import annotations

import pytest

from pacecar.dashboards.queries import FLEET, ON_NODES, ONE_JOB, QueryError, Scope, combine, divide, metrics_in, or_zero

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


def test_job_series_follow_the_job_and_the_ranks_chosen():
    assert (
        select("pacecar_job_step")
        == 'pacecar_job_step{cluster=~"$cluster", training_job="$job", launch="$launch", rank=~"$rank"}'
    )
    assert (
        select("pacecar_job_step", all_ranks=True)
        == 'pacecar_job_step{cluster=~"$cluster", training_job="$job", launch="$launch"}'
    )


def test_host_series_follow_the_nodes_and_gpus_chosen():
    host, gpu = "pacecar_host_cpu_utilization_ratio", "pacecar_gpu_up"
    for scope in (ONE_JOB, ON_NODES):
        assert scope.select(host) == host + '{cluster=~"$cluster", instance=~"$node"}'
        assert scope.select(gpu) == gpu + '{cluster=~"$cluster", instance=~"$node", gpu=~"$gpu"}'


def test_each_scope_looks_at_its_own_jobs():
    name = "pacecar_job_pace_seconds"
    assert FLEET.select(name) == name + '{cluster=~"$cluster", training_job=~"$job"}'
    assert ON_NODES.select(name) == name + '{cluster=~"$cluster", instance=~"$node"}'
    assert Scope().select(name) == name, "rules look at everything"


def test_a_matcher_may_carry_its_operator():
    text = Scope(nodes={"instance": '="a"'}).select("pacecar_host_cpu_seconds_total", {"mode": "!=idle"})
    assert text == 'pacecar_host_cpu_seconds_total{instance="a", mode!="idle"}'


def test_a_label_that_is_asked_for_goes_before_the_variable():
    assert "$rank" not in select("pacecar_job_step", {"rank": "3"})


def test_none_of_many_is_zero_and_none_of_none_is_nothing():
    assert or_zero("a", "b") == "a or 0 * count(b)"


def test_a_share_of_nothing_is_absent():
    assert divide("a", "b") == "a / (b > 0)"


def test_aggregation_with_and_without_a_parameter():
    assert combine("sum", "x", "rank", "heading") == "sum by (rank, heading) (x)"
    assert combine("quantile(0.5)", "x") == "quantile(0.5, x)"


def test_metrics_are_found_once_and_in_order():
    text = mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total")
    names = [metric.name for metric in metrics_in([text, text])]
    assert names == ["pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total"]
