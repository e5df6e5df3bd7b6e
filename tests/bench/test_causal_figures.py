"""What bench_causal counts as right is right, and each figure comes from the jobs that it is of."""

from __future__ import annotations

from dataclasses import replace

from bench.causal_figures import Case, ClockError, Named, Planted, falsely_named, lines, outcomes

STAGE = Planted("slow_compute", (4, 5), ("compute",), 0.10)
UNEVEN = Planted("imbalance", (), ("imbalance",), 0.20)


def case(*planted: Planted, named: tuple[Named, ...] = (), is_loud: bool = False) -> Case:
    clocks = (ClockError(100.0, 80.0), ClockError(500.0, 80.0), ClockError(0.0, None))
    return Case(1, 7, "pp 4", 8, is_loud, planted, named, clocks, -0.002)


def word(*named: Named, fault: Planted = STAGE) -> str:
    [outcome] = outcomes(case(fault, named=named))
    return outcome.word


def test_a_fault_is_right_if_ranks_and_cause_are() -> None:
    assert word(Named("stage", (4, 5), "compute", 0.1, 0.01)) == "right"
    assert word(Named("rank", (5,), "compute", 0.1, 0.01)) == "right"
    assert word(Named("rank", (5,), "host_bound", 0.1, 0.01)) == "wrong cause"
    assert word(Named("host", (4, 5, 6, 7), "compute", 0.1, 0.01)) == "missed"
    assert word() == "missed"


def test_what_cannot_be_told_is_not_missed_and_of_healthy_jobs_counted() -> None:
    untold = replace(case(STAGE), is_told=False)
    assert [one.word for one in outcomes(untold)] == ["untold"]
    assert "healthy, quiet: a rank named in 0 of 1 jobs, not told in 1" in lines([replace(case(), is_told=False)])


def test_of_uneven_work_only_the_cause_counts() -> None:
    assert word(Named("imbalance", (3,), "imbalance", 0.2, 0.01), fault=UNEVEN) == "right"
    assert word(Named("rank", (3,), "compute", 0.2, 0.01), fault=UNEVEN) == "missed"


def test_a_rank_named_without_a_fault_is_a_false_finding() -> None:
    wrong = Named("rank", (1,), "compute", 0.05, 0.01)
    assert falsely_named(case(STAGE, named=(wrong, Named("rank", (4,), "compute", 0.1, 0.01)))) == [wrong]


def test_the_lines_say_the_figures() -> None:
    found = Named("stage", (4, 5), "compute", 0.13, 0.01)
    accused = Named("rank", (2,), "data_wait", 0.03, 0.01)
    text = "\n".join(lines([case(STAGE, named=(found,)), case(named=(accused,), is_loud=True), case()]))
    assert "planted, quiet: rank and cause right in 1 of 1 faults (100.0%); others named too in 0 of 1 jobs" in text
    assert "healthy, quiet: a rank named in 0 of 1 jobs" in text
    assert "healthy, loud: a rank named in 1 of 1 jobs" in text
    assert "median 3.00, p95 3.00, most 3.00; over the truth by more than the stated error: 1" in text
    assert "clocks: 95 % intervals hold 3 of 6 (50.0%)" in text
    assert "cannot be told: 3" in text
    assert "fixed-lag replay of 3 jobs, off by percent: median 0.20" in text


def test_jobs_without_faults_have_no_table_of_faults() -> None:
    assert not any("planted" in line for line in lines([case()]))
