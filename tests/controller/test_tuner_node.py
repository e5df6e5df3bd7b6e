"""A disturbed rank votes against trials but for every way back; steps with a checkpoint or an evaluation are marked."""

from __future__ import annotations

import pytest

from pacecar.controller.guards.node_monitor import NodeMonitor
from pacecar.controller.observation import Proposal
from pacecar.controller.tuner import OFFER_BOUNDARY
from pacecar.records.host_signals import HostSignals
from tests.controller.test_tuner import Bench
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello

SHORT = HostSignals(period_ns=10**9, taken_ns=1, memory_stalled_ratio=0.9)
WELL = HostSignals(period_ns=10**9, taken_ns=1, memory_stalled_ratio=0.0)


@pytest.fixture
def node() -> NodeMonitor:
    return NodeMonitor(job_hello(world_size=1), FakeClock(monotonic_ns=1))


@pytest.fixture
def bench(node: NodeMonitor) -> Bench:
    bench = Bench(node=node)
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    return bench


def test_the_policy_sees_the_node_with_each_step(bench: Bench, node: NodeMonitor) -> None:
    node.record(HostSignals(period_ns=10**9, taken_ns=1, cpu_stalled_ratio=0.25))
    bench.run(2)
    view = bench.policy.seen[-1].node
    assert view.cpu_stalled_ratio == 0.25


def test_no_trial_is_turned_while_the_rank_s_node_is_disturbed(bench: Bench, node: NodeMonitor) -> None:
    node.record(SHORT)
    bench.policy.turn = Proposal(1, {"micro_batch": 8}, is_trial=True)
    bench.run(6)
    assert bench.switches() == []
    node.record(WELL)
    bench.run(2)
    assert [knobs for _, _, knobs in bench.switches()] == [{"micro_batch": 8}]


def test_the_way_back_is_open_in_a_disturbance(bench: Bench, node: NodeMonitor) -> None:
    bench.policy.turn = Proposal(1, {"micro_batch": 8}, is_trial=True)
    bench.run(4)
    node.record(SHORT)
    bench.policy.turn = Proposal(1, {"micro_batch": 4})
    bench.run(4)
    assert [knobs["micro_batch"] for _, _, knobs in bench.switches()] == [8, 4]


def test_a_silent_daemon_permits_a_trial(bench: Bench, node: NodeMonitor) -> None:
    node.record(SHORT)
    bench.policy.turn = Proposal(1, {"micro_batch": 8}, is_trial=True)
    bench.run(2)
    assert bench.switches() == []
    node.record(None)
    bench.run(2)
    assert len(bench.switches()) == 1


def test_a_step_that_was_paused_is_seen_as_one_that_is_not_to_be_judged(bench: Bench, node: NodeMonitor) -> None:
    bench.was_paused = lambda step: step.step in (20, 21)  # type: ignore[method-assign]
    bench.run(20)
    assert [o.step for o in bench.policy.seen if o.profiled] == [9, 10, 20, 21]
