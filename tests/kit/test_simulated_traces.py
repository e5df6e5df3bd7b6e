"""What simulated jobs show: every dependency is kept, and a file as torch writes it is read as the same columns."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from pacecar.analysis.trace.columns import NONE, WORKS, HostKind, SyncKind, SyncRows
from pacecar.analysis.trace.reader import read_trace
from tests.kit.simulated_jobs import LOUD, Clocks, Fault, FaultKind, Job, Layout, Model, Noise, simulate
from tests.kit.simulated_jobs.dependencies import dependencies_of, meetings_of
from tests.kit.simulated_jobs.durations import durations
from tests.kit.simulated_jobs.engine import EVENT_NS, GAP_NS, SYNC_NS
from tests.kit.simulated_jobs.kineto import write_job, write_trace
from tests.kit.simulated_jobs.traces import CORRELATIONS
from tests.kit.simulated_jobs.waits import NCCL_STREAM, START_WAIT

PIPELINE = Model(layers=2, microbatches=4)
JOBS = {
    "ddp": Job(Layout(data=4, ranks_per_host=2), noise=LOUD),
    "fsdp": Job(Layout(data=4, is_sharded=True)),
    "tensor x ddp": Job(Layout(tensor=2, data=2), contention_ratio=0.2),
    "tensor x ddp, in order": Job(Layout(tensor=2, data=2), Model(is_tensor_sync=True), has_nccl_events=False),
    "1f1b x ddp": Job(Layout(pipeline=2, data=2, ranks_per_host=2), PIPELINE),
    "1f1b in batches": Job(Layout(pipeline=3, ranks_per_host=2), replace(PIPELINE, is_batched=True)),
    "interleaved": Job(Layout(pipeline=2), replace(PIPELINE, chunks=2, schedule="interleaved")),
    "cpu": Job(Layout(data=2), Model(buckets_of=2), is_cpu=True),
}
JOBS = {name: replace(job, steps=2, has_sync_rows=not job.is_cpu) for name, job in JOBS.items()}


@cache
def run_of(name):
    return simulate(JOBS[name])


@pytest.mark.parametrize("name", JOBS)
def test_work_begins_when_the_last_thing_that_it_waits_for_is_over_and_not_a_nanosecond_later(name):
    run = run_of(name)
    for rank, times in enumerate(run.times):
        program = run.program(rank)
        needs = dependencies_of(run.job, program)
        drawn = [durations(run.job, program, rank, step) for step in range(run.job.all_steps)]
        before = np.concatenate([one.host[0] + one.host[1] + one.latency for one in drawn])
        ready = times.host_start + before
        for pairs, lag in ((needs.streams, GAP_NS), (needs.events, EVENT_NS)):
            source, target = (pairs // CORRELATIONS).T
            np.maximum.at(ready, target, times.device_end[source] + lag)
        ran = np.tile(program.is_launch, run.job.all_steps)
        assert np.array_equal(times.device_start[ran], ready[ran])
        if len(needs.syncs):
            source, target = (needs.syncs // CORRELATIONS).T
            assert (times.host_end[target] >= times.device_end[source] + SYNC_NS).all()


@pytest.mark.parametrize("name", JOBS)
def test_all_enter_a_collective_before_any_leaves_and_all_leave_it(name):
    run = run_of(name)
    meetings = meetings_of(run)
    assert meetings
    sizes = {2, run.job.layout.data, run.job.layout.tensor} - {1}
    for meeting in meetings:
        assert len(meeting) in sizes
        starts = [run.times[rank].device_start[number // CORRELATIONS] for rank, number in meeting]
        ends = [run.times[rank].device_end[number // CORRELATIONS] for rank, number in meeting]
        assert max(starts) < min(ends)


def test_the_waits_of_the_trace_are_the_true_ones():
    """`wait_on_stream` and the record of the event lead to the work that was waited for."""
    run = run_of("1f1b x ddp")
    for rank in range(run.job.layout.ranks):
        trace, needs = run.trace(rank), dependencies_of(run.job, run.program(rank))
        true = {tuple(pair) for pair in needs.events.tolist()}
        device, syncs = trace.device, trace.syncs
        launches = np.sort(device.correlation)
        found = set()
        own = (syncs.stream == NCCL_STREAM) | (syncs.on_stream == NCCL_STREAM)
        assert own.sum() == 2 * (device.work == WORKS.index(_communication())).sum()
        for row in np.flatnonzero((syncs.kind == SyncKind.STREAM_WAIT) & ~own):
            number, call = device.correlation, syncs.correlation[row]
            recorded = number[(device.stream == syncs.on_stream[row]) & (number <= syncs.on_record[row])]
            waiting = number[(device.stream == syncs.stream[row]) & (number >= call - START_WAIT)]
            if len(recorded) and len(waiting):
                found.add((int(recorded.max()), int(waiting.min())))
        seen = {pair for pair in true if pair[0] >= launches[0] and pair[1] >= launches[0]}
        assert found == seen


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_what_torch_would_have_written_is_read_as_the_same_columns(name, tmp_path):
    run = run_of(name)
    for path, trace in zip(write_job(tmp_path, run.traces(), run.job.layout), run.traces(), strict=True):
        assert_same(read_trace(path), trace)


def test_groups_of_many_ranks_come_back_although_torch_cuts_their_lists(tmp_path):
    run = simulate(Job(Layout(data=40), Model(layers=1), steps=1))
    read = read_trace(write_trace(tmp_path / "r.json", run.trace(39), run.job.layout))
    assert_same(read, run.trace(39))
    assert {one.ranks for one in read.collectives} == {tuple(range(40))}


def assert_same(read, trace):
    for field in ("rank", "world_size", "backend", "host", "gpus", "steps", "start_ns", "end_ns", "wall_offset_ns"):
        assert getattr(read, field) == getattr(trace, field), field
    assert read.warnings == ()
    assert table(read, read.device) == table(trace, trace.device)
    assert table(read, read.host_rows) == table(trace, trace.host_rows)
    for column in SyncRows.__dataclass_fields__:
        assert np.array_equal(getattr(read.syncs, column), getattr(trace.syncs, column)), column
    for rows in ("device", "host_rows", "syncs"):
        mine, its = getattr(read, rows), getattr(trace, rows)
        for column in type(mine).__dataclass_fields__:
            assert getattr(mine, column).dtype == getattr(its, column).dtype, (rows, column)


def table(trace, rows):
    """Return the rows as sorted tuples, with numbers of names, threads and the like as what they stand for."""
    words = {"name": trace.names, "thread": trace.threads, "grid": trace.grids, "collective": trace.collectives}
    listed = []
    for column in type(rows).__dataclass_fields__:
        values = getattr(rows, column).tolist()
        listed.append([str(words[column][v]) if v != NONE else "" for v in values] if column in words else values)
    return sorted(zip(*listed, strict=True))


def test_rows_are_sorted_nest_and_have_their_launch():
    for run in map(run_of, JOBS):
        trace = run.trace(1)
        device, host = trace.device, trace.host_rows
        assert (np.diff(device.start_ns) >= 0).all()
        assert (np.diff(host.start_ns) >= 0).all()
        assert (device.end_ns >= device.start_ns).all()
        launches = dict(zip(host.correlation.tolist(), host.start_ns.tolist(), strict=True))
        for number, at in zip(device.correlation.tolist(), device.launch_ns.tolist(), strict=True):
            assert at == launches[number]
        for thread in range(len(trace.threads)):
            open_ = []
            mine = host.thread == thread
            order = np.lexsort((-host.end_ns[mine], host.start_ns[mine]))
            for start, end in zip(host.start_ns[mine][order].tolist(), host.end_ns[mine][order].tolist(), strict=True):
                while open_ and open_[-1] <= start:
                    open_.pop()
                assert not open_ or end <= open_[-1]
                open_.append(end)


def test_messages_name_their_peer_and_are_counted_by_the_rank_and_not_by_the_pair():
    run = run_of("1f1b x ddp")
    trace = run.trace(0)
    met = [trace.collectives[number] for number in trace.device.collective if number != NONE]
    sent = [one for one in met if one.operation == "send"]
    assert {one.destination_rank for one in sent} == {2}
    assert [one.sequence for one in sent] == list(range(5, 13))  # four in the step before the trace
    assert {one.source_rank for one in met if one.operation == "recv"} == {2}
    reduced = [one.sequence for one in met if one.operation == "all_reduce"]
    assert reduced == list(range(3, 7))


def test_the_kernel_of_a_batch_says_nothing_and_the_calls_before_it_say_whom_it_meets():
    """As torch has it (pytorch#194693): record_param_comms has the peers, the kernel is `coalesced`."""
    trace = run_of("1f1b in batches").trace(1)
    device, host = trace.device, trace.host_rows
    is_batch = np.array([n != NONE and trace.collectives[n].operation == "coalesced" for n in device.collective])
    assert is_batch.sum() == 2 * (3 + 5 + 3)  # alone while the pipeline fills and drains, both at once in between
    said = [trace.collectives[n] for n in host.collective if n != NONE]
    assert {(one.operation, one.source_rank, one.destination_rank) for one in said} == {
        ("send", None, 0),
        ("send", None, 2),
        ("recv", 0, None),
        ("recv", 2, None),
    }
    assert len({one.sequence for one in said}) == is_batch.sum()


def test_ranks_of_a_host_share_its_clock_and_hosts_do_not():
    job = Job(Layout(data=4, ranks_per_host=2), clocks=Clocks(3e6, 0), noise=replace(LOUD, stamp_ns=0, scatter_ns=0))
    run = simulate(replace(job, steps=1))
    ends = [trace.device.end_ns[trace.device.work == WORKS.index(_communication())][0] for trace in run.traces()]
    assert ends[0] == ends[1]
    assert ends[2] == ends[3]
    offsets = [clock.offset_ns for clock in run.clocks]
    assert ends[2] - ends[0] == offsets[1] - offsets[0]


def _communication():
    return next(work for work in WORKS if work.value == "communication")


def test_a_trace_begins_in_a_running_job():
    """Steps before the window leave no row, and yet what they did is what the first recorded step finds."""
    run = run_of("ddp")
    trace = run.trace(0)
    assert [mark.number for mark in trace.steps] == [1, 2]
    assert trace.start_ns == trace.steps[0].start_ns
    assert (trace.host_rows.kind == HostKind.LAUNCH).sum() == 2 * run.program(0).is_launch.sum()


def test_faults_leave_the_rows_that_people_would_see():
    faults = (Fault(FaultKind.DATA_WAIT, (0,), 5e6), Fault(FaultKind.CHECKPOINT, (1,), 7e6, steps=(2,)))
    silent = Noise(0, 0, 0, 0, scatter_ns=0, stamp_ns=0)
    run = simulate(Job(Layout(data=2), noise=silent, clocks=Clocks(0, 0), faults=faults, steps=2))
    loader = [rows_of(run.trace(rank), HostKind.LOADER) for rank in (0, 1)]
    assert loader == [[5_250_000] * 2, [250_000] * 2]
    assert [rows_of(run.trace(rank), HostKind.CHECKPOINT) for rank in (0, 1)] == [[], [7_000_000]]


def rows_of(trace, kind):
    rows = trace.host_rows
    return (rows.end_ns - rows.start_ns)[rows.kind == kind].tolist()
