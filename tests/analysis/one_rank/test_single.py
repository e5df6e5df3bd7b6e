"""One trace, built row by row: windows, causes, gaps, and what is odd."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.analysis.one_rank.one_trace import analyze_trace, charges_of
from pacecar.analysis.trace.columns import HostKind
from pacecar.ledger.attribution import Work, attribute
from pacecar.records import Ledger
from tests.analysis.built import build
from tests.kit.selection import reduced

COMPUTE, COMM, COPY, OTHER = Work.COMPUTE, Work.COMMUNICATION, Work.COPY, Work.OTHER


def codes(report):
    return [warning.code for warning in report.warnings]


def test_the_window_is_from_the_first_to_the_last_work_and_idle_is_what_no_work_covers():
    trace = build(
        device=[(100, 200, COMPUTE), (150, 300, COMM), (400, 450, COPY), (500, 600, OTHER)],
        host=[(0, 50, HostKind.OPERATOR)],
    )
    report = analyze_trace(trace)
    assert (report.start_ns, report.span_ns) == (100, 500)
    assert report.idle_ns == 150  # 300-400 and 450-500
    assert (report.compute_ns, report.communication_ns, report.copy_ns, report.unknown_ns) == (100, 150, 50, 100)
    assert (report.overlapped_communication_ns, report.exposed_communication_ns) == (50, 100)
    assert report.ledger.wall_ns == 500
    assert report.overlap_ratio == pytest.approx(1 / 3)


def test_idle_time_has_its_cause_from_the_host():
    device = [(0, 10, COMPUTE), (100, 110, COMPUTE), (200, 210, COMPUTE), (300, 310, COMPUTE), (400, 410, COMPUTE)]
    host = [
        (20, 50, HostKind.LOADER),
        (120, 150, HostKind.OPTIMIZER),
        (220, 250, HostKind.CHECKPOINT),
        (230, 240, HostKind.LOADER),
        (395, 405, HostKind.LOADER),
    ]
    report = analyze_trace(build(device, host))
    assert report.ledger == Ledger(
        wall_ns=410,
        compute_ns=50,
        data_wait_ns=30 + 10 + 5,
        optimizer_host_ns=30,
        checkpoint_ns=20,
        host_bound_ns=410 - 50 - 45 - 30 - 20,
    )


def test_without_host_rows_nobody_can_tell_why_the_device_was_idle():
    report = analyze_trace(build([(0, 10, COMPUTE), (100, 110, COMPUTE)]))
    assert (report.idle_ns, report.unknown_ns, report.host_bound_ns) == (90, 90, 0)


def test_nothing_at_all_is_zeros_and_a_warning():
    report = analyze_trace(build())
    assert report.start_ns is None
    assert (report.span_ns, report.idle_ns, report.overlap_ratio) == (0, 0, None)
    assert (report.steps, report.collectives, report.families, report.gaps, report.what_if) == ([], [], [], [], [])
    assert codes(report) == ["no_work"]
    for window in ("steps", "hta"):
        assert analyze_trace(build(), window=window).span_ns == 0


def test_steps_count_work_where_it_runs_and_add_up():
    trace = build(
        device=[(-50, 5, COMPUTE), (8, 12, COMM), (15, 18, COMPUTE), (28, 45, COMPUTE, "k", 25)],
        host=[(0, 30, HostKind.OPERATOR)],
        steps=[(7, 0, 9), (8, 10, 19), (9, 20, 30)],
    )
    report = analyze_trace(trace, window="steps")
    assert [(step.step, step.start_ns, step.ledger.wall_ns) for step in report.steps] == [
        (7, 0, 10),
        (8, 10, 10),
        (9, 20, 25),
    ]
    assert [step.ledger.compute_ns for step in report.steps] == [5, 3, 17]
    assert [step.ledger.communication_ns for step in report.steps] == [2, 2, 0]
    assert (report.start_ns, report.span_ns) == (0, 45)
    assert analyze_trace(trace).span_ns == 95


def test_asked_for_steps_that_are_not_there_the_whole_trace_is_reported():
    trace = build([(0, 10, COMPUTE)], steps=[(3, 0, 10)])
    report = analyze_trace(trace, steps=(5, 9))
    assert (report.window, report.span_ns, codes(report)) == ("trace", 10, ["steps_missing"])
    assert "3:3" in report.warnings[0].message
    assert codes(analyze_trace(build([(0, 10, COMPUTE)]), window="steps")) == ["steps_missing"]


def test_collectives_of_gloo_are_the_communication_of_a_device_only_where_it_has_none_of_its_own():
    host = [(0, 60, HostKind.COLLECTIVE_WORK, "gloo:all_reduce", "gloo"), (0, 5, HostKind.OPERATOR)]
    alone = analyze_trace(build([(10, 20, COMPUTE), (40, 50, COMPUTE)], host))
    assert (alone.span_ns, alone.communication_ns, alone.exposed_communication_ns) == (40, 40, 20)
    assert [(total.operation, total.duration_ns) for total in alone.collectives] == [("all_reduce", 40)]
    beside = analyze_trace(build([(10, 20, COMPUTE), (40, 50, COMM, "ncclDevKernel_AllGather_RING_LL")], host))
    assert (beside.communication_ns, beside.idle_ns) == (10, 20)
    assert [total.operation for total in beside.collectives] == ["all_gather"]
    assert codes(beside) == ["host_collectives"]


def test_a_cpu_job_computes_on_the_threads_that_run_the_loop_and_on_autograds():
    host = [
        (0, 100, HostKind.ANNOTATION, "ProfilerStep#0", "main"),
        (0, 10, HostKind.OPERATOR, "aten::mm", "main"),
        (20, 30, HostKind.OPERATOR, "autograd::engine::evaluate_function: X", "autograd"),
        (22, 24, HostKind.COLLECTIVE_CALL, "c10d::allreduce_", "autograd"),
        (0, 90, HostKind.OPERATOR, "aten::stack", "worker"),
        (25, 60, HostKind.COLLECTIVE_WORK, "gloo:all_reduce", "gloo"),
        (70, 80, HostKind.LOADER, "enumerate(DataLoader)#x.__next__", "main"),
        (71, 79, HostKind.OPERATOR, "aten::cat", "main"),
        (80, 95, HostKind.OPTIMIZER, "Optimizer.step#SGD.step", "main"),
        (85, 90, HostKind.OPERATOR, "aten::add_", "main"),
    ]
    report = analyze_trace(build(host=host, steps=[(0, 0, 100)]))
    assert report.compute_ns == 10 + 8 + 5
    assert (report.communication_ns, report.overlapped_communication_ns) == (35, 5)
    assert report.data_wait_ns == 10
    assert report.optimizer_host_ns == 5
    assert report.span_ns == 90
    assert report.steps[0].ledger.optimizer_host_ns == 10
    assert report.gaps == [] == report.families


def test_collectives_of_a_cpu_job_are_cut_to_the_window():
    host = [(0, 10, HostKind.OPERATOR), (5, 50, HostKind.COLLECTIVE_WORK, "gloo:all_reduce", "gloo")]
    report = analyze_trace(build(host=host, steps=[(0, 0, 20), (1, 20, 40)]), steps=(0, 0))
    assert [(total.operation, total.duration_ns) for total in report.collectives] == [("all_reduce", 15)]
    assert report.communication_ns == 15


def test_a_cpu_job_whose_loop_does_not_show_itself_computes_on_every_thread():
    host = [(0, 10, HostKind.OPERATOR, "aten::a", "1"), (20, 30, HostKind.OPERATOR, "aten::b", "2")]
    report = analyze_trace(build(host=host))
    assert (report.compute_ns, report.host_bound_ns) == (20, 10)


def test_several_devices_in_one_trace_are_said():
    trace = build([(0, 10, COMPUTE, "k", -1, -1, 0), (5, 15, COMPUTE, "k", -1, -1, 1)])
    assert codes(analyze_trace(trace)) == ["several_devices"]


@pytest.mark.parametrize(
    ("launch", "waits", "cause"),
    [(50, [], "launch_late"), (5, [], "launch_latency"), (50, [(8, 12)], "sync"), (50, [(8, 10)], "sync"),
     (50, [(12, 14)], "launch_late"), (5, [(8, 12)], "launch_latency"), (-1, [(8, 12)], "unknown")],
)  # fmt: skip
def test_a_gap_is_told_by_the_launch_that_ended_it(launch, waits, cause):
    host = [(0, 1, HostKind.LAUNCH), *((*wait, HostKind.SYNC) for wait in waits)]
    report = analyze_trace(build([(0, 10, COMPUTE), (60, 70, COMPUTE, "k", launch)], host))
    assert [(gap.cause, gap.count, gap.duration_ns) for gap in report.gaps] == [(cause, 1, 50)]


def test_a_thread_that_launches_nothing_waits_for_nobody():
    """NCCL's watchdog asks about events all the time."""
    host = [(0, 1, HostKind.LAUNCH), (8, 12, HostKind.SYNC, "cudaEventQuery", "watchdog")]
    report = analyze_trace(build([(0, 10, COMPUTE), (60, 70, COMPUTE, "k", 50)], host))
    assert [gap.cause for gap in report.gaps] == ["launch_late"]


def test_window_hta_leaves_out_what_the_last_step_launched_and_what_nobody_launched():
    device = [
        (5, 10, COMPUTE, "k", 2),
        (12, 30, COMM, "ncclKernel_AllReduce", 8),
        (40, 50, COMPUTE, "k", 21),
        (51, 60, COPY),
    ]
    trace = build(device, steps=[(1, 0, 9), (2, 10, 19), (3, 20, 29)])
    report = analyze_trace(trace, window="hta")
    assert (report.span_ns, report.compute_ns, report.communication_ns, report.copy_ns, report.idle_ns) == (
        25,
        5,
        18,
        0,
        2,
    )
    assert sum(family.duration_ns for family in report.families) == 23
    assert [total.count for total in report.collectives] == [1]
    one_step = build(device, steps=[(1, 0, 9)])
    assert analyze_trace(one_step, window="hta").span_ns == 55


def spans(low, high, kinds):
    """Return lists of (start, end, kind)."""
    row = st.tuples(st.integers(low, high), st.integers(0, 60), st.sampled_from(list(kinds)))
    return row.map(lambda r: (r[0], r[0] + r[1], r[2]))


rows = st.lists(spans(0, 300, Work), min_size=1, max_size=20)
host_rows = st.lists(spans(-50, 350, HostKind), max_size=12)
marks = st.lists(
    st.tuples(st.integers(0, 9), st.integers(-50, 350), st.integers(-5, 120)).map(lambda r: (r[0], r[1], r[1] + r[2])),
    max_size=6,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=reduced(150), deadline=None)
@given(rows, host_rows, marks, st.sampled_from(["trace", "steps", "hta"]))
def test_whatever_the_rows_the_ledger_adds_up_and_no_step_overlaps_another(device, host, steps, window):
    trace = build(device, host, steps)
    report = analyze_trace(trace, window=window)
    assert sum(report.ledger.parts().values()) == report.span_ns
    assert 0 <= report.idle_ns <= report.span_ns
    assert report.idle_ns <= report.span_ns - report.compute_ns
    ends = [step.start_ns + step.ledger.wall_ns for step in report.steps]
    assert all(end <= following.start_ns for end, following in zip(ends, report.steps[1:], strict=False))
    if report.window == "trace":
        charges = charges_of(trace)
        assert charges.window is not None
        alone = attribute(charges.work, charges.window, causes=charges.causes, observed=charges.observed)
        assert report.ledger == alone
        assert sum(gap.duration_ns for gap in report.gaps) == report.idle_ns - _edges(trace, report)
    if report.window == "steps":
        assert report.span_ns >= sum(step.ledger.wall_ns for step in report.steps)


def _edges(trace, report):
    """Rows of no duration at an edge make idle time there that is no gap."""
    busy = [row for spans in charges_of(trace).work.values() for row in spans.tolist() if row[1] > row[0]]
    if not busy:
        return report.idle_ns
    start, end = report.start_ns, report.start_ns + report.span_ns
    return min(a for a, _ in busy) - start + end - max(b for _, b in busy)
