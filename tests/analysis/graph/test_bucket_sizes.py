"""Buckets twice as large save, or cost, what the same job with such buckets takes less, or longer."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pacecar.analysis.document.report import TraceJob
from pacecar.analysis.graph.bucket_sizes import latency_of
from tests.analysis.models import analyzed
from tests.kit.simulated_jobs import Job, Layout, Links, Model, simulate

STEPS = 8
NAME = "buckets_twice_as_large"


def job(layers: int, buckets_of: int, links: Links, *, is_cpu: bool = False, threads: int = 1) -> Job:
    model = Model(layers=layers, buckets_of=buckets_of, gloo_threads=threads)
    return Job(Layout(data=4), model, links, is_cpu=is_cpu, steps=STEPS, seed=1)


def saved_of(found: TraceJob) -> list[float]:
    return [one.saved_ns for one in found.what_if if one.name == NAME]


NCCL = Links(within=20e9, within_latency_ns=300_000)
LATE = Links(within=60e9, within_latency_ns=800_000)
GLOO = Links(within=2e9, within_latency_ns=2_000_000, is_shared=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "buckets_of", "links", "threads"),
    [(7, 2, NCCL, 0), (9, 2, LATE, 0), (14, 3, NCCL, 0), (7, 2, GLOO, 1), (7, 2, GLOO, 2)],
    ids=["two of a pair", "the last alone", "of three layers", "gloo", "gloo of two threads"],
)
def test_buckets_twice_as_large_cost_what_they_do(layers: int, buckets_of: int, links: Links, threads: int) -> None:
    now, then = (
        simulate(job(layers, each, links, is_cpu=threads > 0, threads=max(threads, 1)))
        for each in (buckets_of, 2 * buckets_of)
    )
    true = (now.recorded_ns - then.recorded_ns) / STEPS
    answer = next(one for one in analyzed(now.traces()).what_if if one.name == NAME)
    assert answer.error_ns is not None
    assert abs(true) > answer.error_ns, "there is something to see"
    assert answer.saved_ns == pytest.approx(true, abs=answer.error_ns)
    assert answer.error_ns < 0.02 * now.step_ns


@pytest.mark.slow
def test_where_much_of_a_bucket_is_latency_larger_ones_save_it() -> None:
    """Five buckets of 4 ms latency each, longer than the kernels of their layers."""
    links = Links(within=200e9, within_latency_ns=2_000_000)
    now, then = (simulate(job(9, each, links)) for each in (2, 4))
    true = (now.recorded_ns - then.recorded_ns) / STEPS
    assert true > 0
    answer = next(one for one in analyzed(now.traces()).what_if if one.name == NAME)
    assert answer.saved_ns == pytest.approx(true, abs=answer.error_ns)


@pytest.mark.slow
def test_buckets_of_one_size_are_not_answered_and_that_is_said() -> None:
    found = analyzed(simulate(job(6, 2, NCCL)).traces())
    assert saved_of(found) == []
    assert found.what_if_untold == [
        "other sizes of DDP's buckets: unknown, because they are too alike to tell latency from bandwidth"
    ]


@pytest.mark.slow
def test_buckets_whose_bytes_are_not_in_the_traces_are_not_answered_and_that_is_said() -> None:
    traces = simulate(job(7, 2, NCCL)).traces()
    bare = [
        replace(trace, collectives=tuple(msgspec.structs.replace(meta, bytes=None) for meta in trace.collectives))
        for trace in traces
    ]
    found = analyzed(bare)
    assert saved_of(found) == []
    assert ["bytes were not recorded" in said for said in found.what_if_untold] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(data=4, is_sharded=True), Layout(tensor=4)], ids=["reduce-scatters of FSDP", "tensor parallel"]
)
def test_what_are_no_buckets_of_ddp_has_no_answer(layout: Layout) -> None:
    """Sums over tensor parallel ranks are waited for one by one, and FSDP's shards are no buckets."""
    found = analyzed(simulate(Job(layout, Model(layers=3), steps=3, seed=2)).traces())
    assert saved_of(found) == []
    assert found.what_if_untold == []


@pytest.mark.slow
def test_buckets_of_several_micro_batches_are_those_of_the_last() -> None:
    layout, links = Layout(pipeline=2, data=2), Links(within=20e9, within_latency_ns=300_000)
    now, then = (
        simulate(Job(layout, Model(layers=7, buckets_of=each, microbatches=4), links, steps=STEPS, seed=3))
        for each in (2, 4)
    )
    answer = next(one for one in analyzed(now.traces()).what_if if one.name == NAME)
    true = (now.recorded_ns - then.recorded_ns) / STEPS
    assert answer.saved_ns == pytest.approx(true, abs=answer.error_ns)


def test_latency_is_the_time_of_no_bytes() -> None:
    drawn = np.random.default_rng(3)
    size = np.repeat([1_000_000, 8_000_000, 25_000_000], 40)
    work = (50_000 + size / 20) * (1 + 0.01 * drawn.standard_normal(len(size)))
    found = latency_of(size, work)
    assert found is not None
    assert abs(found.ns - 50_000) <= 3 * found.error_ns
    assert found.error_ns < 10_000
    assert latency_of(np.full(9, 1_000), np.full(9, 5.0)) is None
    assert latency_of(np.array([1_000, -1, 2_000]), np.ones(3)) is None
