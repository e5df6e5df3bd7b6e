"""A link twice as fast saves what the same job on such a link takes less, where collectives share the link too."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.document.report import Scenario
from pacecar.analysis.graph.shared_wire import _played, _work, shared_sets
from pacecar.analysis.trace.columns import Trace
from tests.analysis.models import analyzed, modelled
from tests.kit.simulated_jobs import Job, Layout, Links, Model, simulate

STEPS = 8


def job(speed: float, *, shared: bool, threads: int = 2, seed: int = 1) -> Job:
    """Three buckets, of which the second comes before the first is over."""
    model = Model(layers=6, buckets_of=2, gloo_threads=threads)
    links = Links(within=speed, within_latency_ns=0, is_shared=shared)
    return Job(Layout(data=4), model, links, is_cpu=True, steps=STEPS, seed=seed)


def true_ns(speed: float, *, shared: bool) -> float:
    slow, fast = (simulate(job(each, shared=shared)).recorded_ns for each in (speed, 2 * speed))
    return (slow - fast) / STEPS


def said(traces: list[Trace]) -> Scenario:
    return next(one for one in analyzed(traces).what_if if one.name == "link_twice_as_fast")


def without_sizes(trace: Trace) -> Trace:
    """Return the trace as torch writes gloo's rows without `record_shapes`."""
    metas = [msgspec.structs.replace(meta, bytes=None, dtype=None) for meta in trace.collectives]
    return replace(trace, collectives=tuple(metas))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_collectives_at_the_same_time_share_the_link_or_do_not_as_the_times_show(shared: bool) -> None:
    answer, true = said(simulate(job(2e9, shared=shared)).traces()), true_ns(2e9, shared=shared)
    assert answer.saved_ns == pytest.approx(true, rel=0.01)
    assert ("share it" in answer.note) == shared
    assert ("do not slow each other" in answer.note) != shared
    other = said(simulate(job(2e9, shared=shared, threads=1)).traces())
    assert answer.error_ns == pytest.approx(other.error_ns, rel=0.2), "no more doubt than where nothing overlaps"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_where_the_times_do_not_show_it_the_error_covers_both(shared: bool) -> None:
    """Without sizes the second bucket may be larger or slowed, and arrivals that hardly vary do not tell."""
    traces = simulate(job(2e9, shared=shared)).traces()
    answer, told = said([without_sizes(trace) for trace in traces]), said(traces)
    assert answer.error_ns is not None
    assert told.error_ns is not None
    assert "is unknown" in answer.note
    assert answer.error_ns > 1.5 * told.error_ns
    assert abs(answer.saved_ns - true_ns(2e9, shared=shared)) <= answer.error_ns


@pytest.mark.slow
def test_collectives_that_take_turns_share_nothing() -> None:
    assert shared_sets(modelled(simulate(job(2e9, shared=True, threads=1)).traces()).graph) == []


times = st.integers(0, 1000)


@pytest.mark.slow
@given(st.lists(st.tuples(times, st.integers(1, 300)), min_size=1, max_size=12))
def test_what_is_played_as_it_was_takes_as_long_as_it_did(spans: list[tuple[int, int]]) -> None:
    start, work = (np.array(column, dtype=np.float64) for column in zip(*spans, strict=True))
    wire = _played(start, work)
    assert _work(start, wire) == pytest.approx(work, abs=1e-6)
    assert (wire >= work - 1e-6).all()
    assert (wire <= work.sum() + 1e-6).all()


def test_two_that_overlap_halve_each_other() -> None:
    """The first has 4 alone and then shares 8; the second shares these and has 4 alone."""
    start, wire = np.array([0.0, 4.0]), np.array([12.0, 12.0])
    assert _work(start, wire).tolist() == [8.0, 8.0]
    assert _played(start, np.array([4.0, 4.0])).tolist() == [4.0, 4.0], "in half the time they do not meet any more"
