"""The ledger of a trace and the causal model charge every instant of the host to the same cause."""

from __future__ import annotations

import numpy as np
import pytest

from pacecar.analysis.graph.causes import CauseCode
from pacecar.analysis.graph.rank_events import rank_events
from pacecar.analysis.one_rank.one_trace import charges_of
from pacecar.analysis.trace.columns import HostKind, Trace
from pacecar.analysis.trace.host_activity import host_activity, training_threads
from pacecar.analysis.trace.reader import read_trace
from pacecar.ledger.attribution import Work, charge
from pacecar.records import LEDGER_HEADINGS
from tests.analysis.built import build
from tests.analysis.trace.traces import each_kind, trace_file
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, Model, simulate

HEADING = {
    CauseCode.COMPUTE: "compute",
    CauseCode.HOST_BOUND: "host_bound",
    CauseCode.GC: "host_bound",
    CauseCode.DATA_WAIT: "data_wait",
    CauseCode.CHECKPOINT: "checkpoint",
    CauseCode.OPTIMIZER_HOST: "optimizer_host",
}
"""The heading of each cause of the host lane.  A blocked host has none: the cause is what it waits for."""

OF_HOST = {"host_bound", "data_wait", "checkpoint", "optimizer_host"}
"""Headings that say what the host did.  The other ones say what the device did, which the host lane does not have."""

A, W = HostKind.ANNOTATION, Work.COMPUTE


def compared(trace: Trace) -> set[tuple[str, str]]:
    """Return the pairs of headings, the ledger's and the model's, of all instants that both charge to the host."""
    charges = charges_of(trace)
    lane = rank_events(trace).host
    if charges.window is None or len(lane.cause) == 0:
        return set()
    times, heading = charge(charges.work, charges.window, causes=charges.causes, observed=charges.observed)
    at = np.union1d(times, lane.time_ns)
    at = at[(at >= max(times[0], lane.time_ns[0])) & (at < min(times[-1], lane.time_ns[-1]))]
    of_ledger = heading[np.searchsorted(times, at, side="right") - 1].tolist()
    of_lane = lane.cause[np.searchsorted(lane.time_ns, at, side="right") - 1].tolist()
    pairs = {
        (LEDGER_HEADINGS[mine], HEADING[CauseCode(its)])
        for mine, its in zip(of_ledger, of_lane, strict=True)
        if its != CauseCode.BLOCKED
    }
    hosts = OF_HOST if trace.has_device else OF_HOST | {"compute"}
    return {pair for pair in pairs if pair[0] in hosts}


def agrees(trace: Trace) -> set[str]:
    """Assert that ledger and model agree on `trace`; return the headings of the host that it has."""
    pairs = compared(trace)
    assert {pair for pair in pairs if pair[0] != pair[1]} == set()
    return {mine for mine, _ in pairs}


@pytest.mark.parametrize("name", each_kind())
def test_on_real_traces(name: str) -> None:
    agrees(read_trace(trace_file(name)))


@pytest.mark.parametrize("is_cpu", [False, True])
@pytest.mark.parametrize(
    ("kind", "heading"),
    [
        (FaultKind.GC, "host_bound"),
        (FaultKind.CHECKPOINT, "checkpoint"),
        (FaultKind.OPTIMIZER_HOST, "optimizer_host"),
        (FaultKind.DATA_WAIT, "data_wait"),
    ],
)
def test_on_simulated_jobs(kind: FaultKind, heading: str, is_cpu: bool) -> None:
    job = Job(Layout(data=2), Model(layers=1), faults=(Fault(kind, (1,), 5e6),), seed=4, is_cpu=is_cpu)
    assert heading in agrees(simulate(job).traces()[1])


def test_a_checkpoint_in_the_background_does_not_train() -> None:
    host = [
        (0, 10, HostKind.OPTIMIZER, "Optimizer.step#SGD.step"),
        (10, 30, HostKind.OPERATOR, "aten::mm"),
        (20, 60, HostKind.CHECKPOINT, "checkpoint", "writer"),
        (35, 55, HostKind.OPERATOR, "aten::copy_", "writer"),
        (70, 80, HostKind.OPERATOR, "aten::mm"),
    ]
    trace = build(host=host)
    assert training_threads(trace).tolist() == [trace.threads.index(("1", "main"))]
    assert agrees(trace) == {"compute", "checkpoint", "host_bound"}


def test_a_collective_call_of_another_thread_takes_no_compute_away() -> None:
    host = [
        (0, 1, A, "ProfilerStep#1"),
        (0, 50, HostKind.OPERATOR, "aten::mm"),
        (10, 40, HostKind.COLLECTIVE_CALL, "c10d::barrier", "side group"),
    ]
    trace = build(host=host)
    assert agrees(trace) == {"compute"}
    assert host_activity(trace).collective_calls.tolist() == []


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_garbage_collection_is_host_bound_inside_the_optimizer_and_hidden_by_work(thread: str) -> None:
    host = [
        (0, 2, HostKind.LAUNCH, "cudaLaunchKernel"),
        (20, 80, HostKind.OPTIMIZER, "Optimizer.step#SGD.step"),
        (30, 50, A, "gc.collect", thread),
        (60, 70, A, "GC: generation 2", thread),
        (90, 92, HostKind.LAUNCH, "cudaLaunchKernel"),
    ]
    trace = build([(2, 20, W, "k", 0), (40, 45, W, "k"), (92, 95, W, "k", 90)], host)
    assert agrees(trace) == {"optimizer_host", "host_bound"}
    assert len(host_activity(trace).garbage_collection) == 2


def test_an_optimizer_step_counts_on_a_thread_that_launches_nothing() -> None:
    host = [
        (0, 2, HostKind.LAUNCH, "cudaLaunchKernel"),
        (20, 80, HostKind.OPTIMIZER, "Optimizer.step#CPUAdam.step", "another"),
        (90, 92, HostKind.LAUNCH, "cudaLaunchKernel"),
    ]
    assert agrees(build([(2, 20, W, "k", 0), (92, 95, W, "k", 90)], host)) == {"optimizer_host", "host_bound"}
