"""Damaged traces lack what they are said to lack, and nothing else."""

from functools import cache

import numpy as np
import pytest

from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.trace.columns import NONE, HostKind
from tests.kit.simulated_jobs import Job, Layout, Model, damage, simulate


@cache
def trace():
    return simulate(Job(Layout(pipeline=2, data=2), Model(layers=1, microbatches=2), steps=3)).trace(0)


def fields(damaged, *names):
    return {tuple(getattr(one, name) for name in names) for one in damaged.collectives}


def test_what_older_torch_did_not_write_is_missing():
    whole = trace()
    assert (None,) not in fields(whole, "sequence")
    assert fields(damage.without_sequence(whole), "sequence") == {(None,)}
    assert fields(damage.without_sequence(whole), "group") == fields(whole, "group")
    assert fields(damage.without_peers(whole), "source_rank", "destination_rank") == {(None, None)}
    assert fields(damage.without_groups(whole), "group", "ranks", "sequence") == {(None, None, None)}
    assert fields(damage.without_groups(whole), "operation", "bytes") == fields(whole, "operation", "bytes")


def test_kernels_without_a_launch_are_still_there():
    whole, damaged = trace(), damage.without_launches(trace(), 0.3)
    lost = damaged.device.launch_ns == NONE
    assert 0.15 < lost.mean() < 0.45
    assert len(lost) == len(whole.device.start_ns)
    launches = damaged.host_rows.correlation[damaged.host_rows.kind == HostKind.LAUNCH]
    assert not np.isin(damaged.device.correlation[lost], launches).any()
    assert np.isin(damaged.device.correlation[~lost], launches).all()


@pytest.mark.parametrize("by", [7_000_000, -7_000_000])
def test_a_clock_that_jumps_moves_all_that_follows(by):
    whole = trace()
    at = whole.steps[1].start_ns
    damaged = damage.jumped(whole, at, by)
    assert damaged.steps[0].start_ns == whole.steps[0].start_ns
    assert damaged.steps[2].start_ns == whole.steps[2].start_ns + by
    assert (np.diff(damaged.device.start_ns) >= 0).all()
    assert sorted(damaged.device.correlation) == sorted(whole.device.correlation)


def test_a_cut_trace_has_the_steps_that_were_kept():
    damaged = damage.cut(trace(), 2, 3)
    assert [step.number for step in damaged.steps] == [2, 3]
    assert damaged.start_ns == damaged.steps[0].start_ns
    assert [step.step for step in analyze_trace(damaged, window="steps").steps] == [2, 3]


def test_doubled_rows_are_equal_neighbours_and_an_absurd_one_is_absurd():
    whole, damaged = trace(), damage.doubled(trace(), 0.2)
    more = len(damaged.device.start_ns) - len(whole.device.start_ns)
    assert more == (np.diff(damaged.device.correlation) == 0).sum() > 0
    absurd = damage.stretched(whole, 5, 10**15)
    assert absurd.end_ns == absurd.device.end_ns[5] == whole.device.start_ns[5] + 10**15
