"""The public document says what was read, in the units of its names, and stays within its bounds."""

import msgspec
import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.gpu_health import GpuReadings, judge
from pacecar.metrics.catalog import by_name
from pacecar.monitor.catalog_sample import sample
from pacecar.monitor.gpu.known_gpus import KnownGpu
from pacecar.monitor.http.status_document import (
    JOBS_MAX,
    NO_VERDICTS,
    RANKS_MAX,
    RANKS_MIN,
    GpuVerdicts,
    StatusDocumentBuilder,
)
from pacecar.monitor.jobs.cgroup_identity import Residence
from pacecar.monitor.jobs.job_table import JobTable
from pacecar.records import Failed, Goodbye, Ledger, Ok, Sample, Snapshot, Throttling, status_document
from tests.monitor.testimony import everything

OWN = (
    sample("pacecar_build_info", 1, "1.2", "3.11.0"),
    sample("pacecar_daemon_start_time_seconds", 5 * NS_PER_SECOND + 300_000_000),
    sample("pacecar_daemon_cpu_utilization_ratio", 0.01),
    sample("pacecar_daemon_cpu_budget_ratio", 0.05),
    sample("pacecar_daemon_viewers", 3),
)
RECORDER = (
    sample("pacecar_recorder_span_seconds", 300 * NS_PER_SECOND),
    sample("pacecar_recorder_memory_bytes", 6_000_000),
    sample("pacecar_recorder_entries_total", 9),
    sample("pacecar_recorder_triggers_total", 2, "xid"),
    sample("pacecar_recorder_files_total", 1),
    sample("pacecar_recorder_write_failures_total", 0),
    sample("pacecar_recorder_lost_total", 0),
)


def make_builder(*arguments):
    return StatusDocumentBuilder(*arguments, node="node-a", period_seconds=1.5)


def snapshot(*samples, tick=0, at_seconds=100.0, **outcomes):
    at_ns = int(at_seconds * NS_PER_SECOND)
    outcomes = {"all": Ok(tuple(samples)), **outcomes}
    return Snapshot(tick, at_ns, at_ns, 0, outcomes, dict.fromkeys(outcomes, 7_000_000))


def build(builder=None, shot=None, jobs=(), now_seconds=100.5, throttled=None, own=OWN, gpus=NO_VERDICTS):
    return (builder or make_builder()).build(
        shot,
        jobs,
        own,
        wall_ns=50 * NS_PER_SECOND,
        now_ns=int(now_seconds * NS_PER_SECOND),
        throttled=throttled or {},
        gpus=gpus,
    )


@pytest.fixture
def jobs(clock):
    return JobTable(clock, jobs_max=1000, ranks_max=10_000, forget_ns=10**18)


@pytest.fixture
def speak(jobs, make_hello, make_step):
    def say(job="run-7", ranks=1, **changes):
        for rank in range(ranks):
            hello = make_hello(job=job, rank=rank, world_size=max(2, ranks))
            for record in (hello, make_step(job=job, rank=rank, **changes)):
                jobs.record(record, hello=hello, uid=1, owner=rank)
        return hello

    return say


def test_where_a_rank_runs_is_what_identity_says_and_null_where_it_says_nothing(jobs, speak):
    speak(ranks=2)
    places = {0: Residence("t-0", "ml", "uid", "box", "42"), 1: Residence()}
    document = build(make_builder(lambda hello: places[hello.rank]), jobs=jobs.view())
    first, second = document.jobs[0].ranks
    assert (first.pod_name, first.pod_namespace, first.slurm_job) == ("t-0", "ml", "42")
    assert (second.pod_name, second.pod_namespace, second.slurm_job) == (None, None, None)


def test_the_recorder_is_in_the_document_unless_it_is_off():
    said = build(own=OWN + RECORDER).daemon.recorder
    assert (said.span_seconds, said.memory_bytes, said.triggers_total) == (300.0, 6_000_000, {"xid": 2})
    assert (said.files_total, said.files_bytes, said.write_failures_total, said.lost_total) == (1, None, 0, 0)
    assert build(own=(*OWN, *RECORDER, sample("pacecar_recorder_files_bytes", 77))).daemon.recorder.files_bytes == 77
    assert build().daemon.recorder is None


def test_the_daemon_is_what_its_samples_say_and_null_where_none_does():
    shot = snapshot(Sample("pacecar_daemon_resident_memory_bytes", (), 45_000_000))
    assert build(shot=shot).daemon == status_document.DaemonStatus(
        pacecar_version="1.2", start_time_seconds=5.3, period_seconds=1.5, cpu_utilization_ratio=0.01,
        cpu_budget_ratio=0.05, resident_memory_bytes=45_000_000, viewers=3,
        collectors=(status_document.CollectorStatus(name="all", outcome="ok", reason=None, duration_seconds=0.007),),
    )  # fmt: skip
    assert build(own=()).daemon == status_document.DaemonStatus(period_seconds=1.5)


@pytest.mark.parametrize(
    ("kind", "prefix", "apart"),
    [
        (status_document.RecorderStatus, "pacecar_recorder_", set()),
        (
            status_document.DaemonStatus,
            "pacecar_daemon_",
            {"pacecar_version", "period_seconds", "collectors", "recorder"},
        ),
        (status_document.Host, "pacecar_host_", set()),
        (
            status_document.GpuStatus,
            "pacecar_gpu_",
            {
                "gpu",
                "name",
                "uuid",
                "pci_bus_id",
                "down_reason",
                "sm_clock_hertz",
                "throttled_by",
                "health_reasons",
                "instances",
            },
        ),
        (
            status_document.MigInstance,
            "pacecar_gpu_instance_",
            {"gpu_instance", "compute_instance", "name", "uuid"},
        ),
    ],
)
def test_each_figure_is_a_metric_of_the_catalog(kind, prefix, apart):
    for field in msgspec.structs.fields(kind):
        if field.name not in apart:
            assert by_name(prefix + field.name).name.endswith(by_name(prefix + field.name).unit.outside)


def test_figures_come_out_in_base_units_and_zero_is_not_null():
    document = build(
        shot=snapshot(
            Sample("pacecar_gpu_info", ("0", "GPU-a", "H200", "d", "p", "a", "c", "v", "m"), 1),
            Sample("pacecar_gpu_power_watts", ("0",), 650_123),
            Sample("pacecar_gpu_utilization_ratio", ("0",), 0.0),
            Sample("pacecar_gpu_clock_hertz", ("0", "sm"), 1980),
            Sample("pacecar_gpu_clock_hertz", ("0", "memory"), 2600),
            Sample("pacecar_gpu_xid_errors_total", ("0", "63"), 1),
            Sample("pacecar_gpu_xid_errors_total", ("0", "79"), 2),
            Sample("pacecar_gpu_up", ("10",), 0),
            Sample("pacecar_gpu_down", ("10", "lost"), 1),
            Sample("pacecar_gpu_up", ("2",), 1),
            Sample("pacecar_host_cpu_utilization_ratio", (), 0.5),
            bad=Failed("eth9: odd"),
        ),
        throttled={"GPU-a": Throttling(device_uuid="GPU-a", reasons=("sw_power_cap",))},
    )
    first, second, third = document.gpus
    assert (first.power_watts, first.utilization_ratio, first.sm_clock_hertz) == (650.123, 0.0, 1.98e9)
    assert (first.name, first.xid_errors_total, first.throttled_by) == ("H200", 3, ("sw_power_cap",))
    assert (second.gpu, second.power_watts, second.throttled_by) == ("2", None, None)
    assert (third.gpu, third.up, third.down_reason) == ("10", 0, "lost")
    assert (document.host.cpu_utilization_ratio, document.host.swap_used_bytes) == (0.5, None)
    assert [(c.name, c.outcome, c.reason) for c in document.daemon.collectors] == [
        ("all", "ok", None), ("bad", "failed", "eth9: odd"),
    ]  # fmt: skip
    assert (document.snapshot_age_seconds, document.time_seconds, document.daemon.viewers) == (0.5, 50.0, 3)


def test_a_gpu_has_its_verdict_reasons_instances_and_last_known_identity():
    health = judge([
        GpuReadings(is_up=False, down_reason="lost"), GpuReadings(is_up=True, pcie_width=4, pcie_width_max=16),
    ])  # fmt: skip
    known = KnownGpu("GPU-b", "H100", "0000:5d:00.0", "1", 3 * NS_PER_SECOND)
    document = build(
        shot=snapshot(
            Sample("pacecar_gpu_up", ("0",), 1),
            Sample("pacecar_gpu_info", ("0", "GPU-a", "H200", "d", "0000:1a:00.0", "a", "c", "v", "on"), 1),
            Sample("pacecar_gpu_mig_enabled", ("0",), 1),
            Sample("pacecar_gpu_instance_info", ("0", "10", "0", "MIG-b", "1g.18gb"), 1),
            Sample("pacecar_gpu_instance_info", ("0", "2", "0", "MIG-a", "3g.71gb"), 1),
            Sample("pacecar_gpu_instance_memory_size_bytes", ("0", "2", "0"), 71),
            Sample("pacecar_gpu_instance_processes", ("0", "2", "0"), 0),
            Sample("pacecar_gpu_up", ("1",), 0),
            Sample("pacecar_gpu_down", ("1", "lost"), 1),
        ),
        gpus=GpuVerdicts({"1": health[0], "0": health[1]}, (known,), lambda gpu: known if gpu == "1" else None),
    )
    first, second = document.gpus
    assert (first.health, [reason.reason for reason in first.health_reasons]) == ("degraded", ["pcie_width"])
    assert first.health_reasons[0].words == "PCIe link: 4 of 16 lanes"
    assert first.health_reasons[0].remedy
    assert first.identity == "H200, 0000:1a:00.0, GPU-a"
    assert first.mig_enabled == 1
    assert [(one.gpu_instance, one.name, one.memory_size_bytes, one.processes) for one in first.instances] == [
        ("2", "3g.71gb", 71, 0), ("10", "1g.18gb", None, None),
    ]  # fmt: skip
    assert (second.health, second.identity, second.instances) == ("failed", "H100, 0000:5d:00.0, GPU-b", ())
    assert [(one.uuid, one.pci_bus_id, one.seen_time_seconds) for one in document.gpus_missing] == [
        ("GPU-b", "0000:5d:00.0", 3.0)
    ]
    again = msgspec.json.decode(msgspec.json.encode(document), type=status_document.StatusDocument)
    assert again == document


def test_a_gpu_that_was_not_judged_has_no_verdict():
    (gpu,) = build(shot=snapshot(Sample("pacecar_gpu_up", ("0",), 1))).gpus
    assert (gpu.health, gpu.health_reasons, gpu.mig_enabled) == (None, (), None)


def test_before_the_first_tick_nothing_is_invented():
    document = build()
    assert (document.tick, document.snapshot_age_seconds, document.gpus, document.host) == (
        None,
        None,
        (),
        status_document.Host(),
    )


def test_a_links_rate_needs_two_ticks_and_a_counter_that_fell_has_none():
    builder = make_builder()

    def link(tick, received, sent):
        labels = ("eth0",)
        samples = (
            Sample("pacecar_host_network_receive_bytes_total", labels, received),
            Sample("pacecar_host_network_transmit_bytes_total", labels, sent),
            Sample("pacecar_host_network_receive_errors_total", labels, 2),
            Sample("pacecar_host_network_transmit_drops_total", labels, 3),
        )
        return build(builder, snapshot(*samples, tick=tick, at_seconds=100 + 2.0 * tick)).links[0]

    assert (link(0, 1000, 50).receive_bytes_per_second, link(1, 5000, 50).receive_bytes_per_second) == (None, 2000.0)
    third = link(2, 5000, 10)
    assert (third.receive_bytes_per_second, third.transmit_bytes_per_second, third.errors_total) == (0.0, None, 5)


def test_an_rdma_port_is_a_link():
    samples = (
        Sample("pacecar_rdma_port_active", ("mlx5_0", "1"), 1),
        Sample("pacecar_rdma_port_link_bytes_per_second", ("mlx5_0", "1"), 50_000_000_000),
        Sample("pacecar_rdma_errors_total", ("mlx5_0", "1", "symbol_error"), 4),
    )
    (link,) = build(shot=snapshot(*samples)).links
    assert (link.kind, link.name, link.up, link.link_bytes_per_second) == ("rdma", "mlx5_0/1", 1, 50_000_000_000)
    assert link.errors_total == 4


def test_a_job_is_told_with_its_ledger_moves_stragglers_and_ladder(jobs, speak):
    hello = speak(ranks=2)
    for record in everything(1):
        jobs.record(record, hello=hello, uid=1, owner=1)
    (job,) = build(jobs=jobs.view()).jobs
    assert [rank.step for rank in job.ranks] == [41, 41]
    assert job.ledger_seconds["compute"] == 8e-9
    assert job.ledger_window_seconds is None
    assert (job.pace_seconds, job.median_pace_seconds) == (0.03, 0.029)
    (move,) = job.moves
    assert (move.outcome, move.expected_gain_ratio, move.measured_gain_ratio) == ("kept", 0.125, 0.25)
    assert [(late.rank, late.excess_seconds) for late in job.stragglers] == [(1, 0.008)]
    assert [(hang.rank, hang.suspected) for hang in job.hangs] == [(1, True)]
    assert job.what_if.rungs[0].step_seconds == 0.024
    assert (job.tuner.state, job.finished) == ("watching", False)
    assert job.knobs == {"bucket_bytes": 1}
    jobs.record(Goodbye(job="run-7", rank=1, reason="", wall_ns=1), hello=hello, uid=1, owner=1)
    assert [rank.finished for rank in build(jobs=jobs.view()).jobs[0].ranks] == [False, True]


def test_the_ledger_of_the_last_seconds_is_what_was_added_to_the_totals(jobs, speak):
    builder = make_builder()

    def at(seconds, compute, samples, steps):
        ledger = Ledger(wall_ns=compute * 2, compute_ns=compute, unknown_ns=compute)
        last = Ledger(wall_ns=200_000_000, unknown_ns=200_000_000)
        speak(totals=ledger, total_samples=samples, total_tokens=None, total_steps=steps, ledger=last,
              wall_ns=last.wall_ns)  # fmt: skip
        return build(builder, jobs=jobs.view(), now_seconds=seconds).jobs[0]

    at(100, 1_000_000_000, 100, 10)
    job = at(110, 5_000_000_000, 600, 60)
    assert (job.ledger_seconds["compute"], job.ledger_window_seconds) == (4.0, 10.0)
    # Ten samples a step at the pace that is shown: of the last step, of 0.2 s, while ranks are not compared.
    assert job.pace_seconds == 0.2
    assert (job.samples_per_second, job.tokens_per_second) == (50.0, None)
    for second in range(120, 300, 10):
        job = at(second, second * 1_000_000_000, 100 * second, 5 * second)
    assert 25 <= job.ledger_window_seconds <= 50
    assert job.samples_per_second == 100.0
    again = at(301, 3_000_000, 1, 1)  # it restarted: its totals fell
    assert (again.ledger_window_seconds, again.samples_per_second) == (None, None)


def test_jobs_and_ranks_beyond_the_bounds_are_left_out_and_counted(jobs, speak):
    for number in range(JOBS_MAX + 6):
        speak(job=f"job-{number:03}", ranks=RANKS_MIN + 3)
    document = build(jobs=jobs.view())
    assert (len(document.jobs), document.jobs_left_out) == (JOBS_MAX, 6)
    assert {(len(job.ranks), job.ranks_left_out) for job in document.jobs} == {(RANKS_MIN, 3)}
    assert sum(len(job.ranks) for job in document.jobs) <= RANKS_MAX


def test_of_many_ranks_the_late_and_the_slow_ones_are_shown(jobs, speak, make_hello, make_step):
    hello = speak(ranks=RANKS_MAX + 40)
    for rank in (290, 291):
        jobs.record(make_step(rank=rank, wall_ns=500, ledger=Ledger(wall_ns=500, compute_ns=500)),
                  hello=make_hello(rank=rank), uid=1, owner=rank)  # fmt: skip
    late = next(record for record in everything(1) if type(record).__name__ == "Straggler")
    jobs.record(msgspec.structs.replace(late, late_rank=295), hello=hello, uid=1, owner=RANKS_MAX + 39)
    (job,) = build(jobs=jobs.view()).jobs
    shown = [rank.rank for rank in job.ranks]
    assert {290, 291, 295} <= set(shown)
    assert shown == sorted(shown)
    assert (len(shown), job.ranks_left_out) == (RANKS_MAX, 40)


def test_the_document_comes_back_from_json_as_it_was(jobs, speak):
    speak(ranks=2)
    document = build(shot=snapshot(Sample("pacecar_host_cpus_online", (), 2)), jobs=jobs.view())
    assert msgspec.json.decode(msgspec.json.encode(document), type=status_document.StatusDocument) == document
