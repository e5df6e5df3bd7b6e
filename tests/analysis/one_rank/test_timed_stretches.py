"""A recorded trace with what the job's timers know says of a slow rank what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacecar.analysis.one_rank.timed_stretches import with_collections, with_passes
from pacecar.analysis.reading.rank_window import TimedStretch, judge, prepared
from pacecar.analysis.trace.columns import HostKind, Trace
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, simulate

GLOO = Job(Layout(data=4), is_cpu=True, seed=4)


def operators_ns(trace: Trace) -> int:
    host = trace.host_rows
    rows = host.kind == HostKind.OPERATOR
    return int((host.end_ns - host.start_ns)[rows].sum())


def pauses(trace: Trace, name: str) -> list[TimedStretch]:
    """What timers say of a rank whose pass, or whose collection, lasts from each operator to the next."""
    host, wall_ns = trace.host_rows, trace.wall_offset_ns
    assert wall_ns is not None
    rows = np.isin(host.kind, (HostKind.OPERATOR, HostKind.COLLECTIVE_CALL))
    starts, ends = host.start_ns[rows], np.maximum.accumulate(host.end_ns[rows])
    pairs = zip((ends[:-1] + wall_ns).tolist(), (starts[1:] + wall_ns).tolist(), strict=True)
    return [TimedStretch(name, start, end) for start, end in pairs if end > start]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cause"), [("gc", "gc"), ("forward", "compute")])
def test_a_rank_whose_python_takes_longer_is_named_as_the_timers_call_it(name: str | None, cause: str) -> None:
    whole = simulate(replace(GLOO, faults=(Fault(FaultKind.SLOW_HOST, (2,), 30.0),))).traces()
    timed = [[] if name is None else pauses(trace, name) for trace in whole]
    verdict = judge([prepared(trace, some) for trace, some in zip(whole, timed, strict=True)])
    assert [(one.ranks, one.cause) for one in verdict.findings] == [([2], cause)]


@pytest.mark.slow
def test_python_in_passes_is_work_but_not_what_may_be_a_wait_for_a_process_group() -> None:
    trace = simulate(GLOO).traces()[0]
    host = trace.host_rows
    passes = [(step.start_ns, step.end_ns) for step in trace.steps]
    filled = with_passes(trace, "Python of forward", passes)
    assert filled.names[-1] == "Python of forward"
    new = filled.host_rows.name == len(trace.names)
    starts, ends = filled.host_rows.start_ns[new], filled.host_rows.end_ns[new]
    assert new.any()
    assert (np.diff(filled.host_rows.start_ns) >= 0).all()
    for end in host.end_ns[host.kind == HostKind.COLLECTIVE_WORK].tolist():
        assert not ((starts <= end) & (end < ends)).any()
    assert with_passes(trace, "Python of forward", []) is trace


def test_a_trace_without_marks_of_steps_stays_as_it_is() -> None:
    trace = replace(simulate(GLOO).traces()[0], names=("no mark",))
    trace = replace(trace, host_rows=replace(trace.host_rows, name=np.zeros_like(trace.host_rows.name)))
    assert with_collections(trace, [(0, 10)]) is trace
