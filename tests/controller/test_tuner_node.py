"""A disturbed rank votes for no trial and for every way back; a step with a checkpoint or an evaluation is marked."""

from __future__ import annotations

import pytest

from pacecar.clock import FakeClock
from pacecar.controller.guards.node_monitor import NodeMonitor
from pacecar.controller.observation import TuningTurn
from pacecar.controller.tuner import OFFER_BOUNDARY
from pacecar.records.host_signals import HostSignals
from tests.controller.test_tuner import Bench
from tests.kit.records import job_hello

SHORT = HostSignals(period_ns=10**9, taken_ns=1, memory_stalled_ratio=0.9)
WELL = HostSignals(period_ns=10**9, taken_ns=1, memory_stalled_ratio=0.0)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.tuner._node = NodeMonitor(job_hello(world_size=1), FakeClock(monotonic_ns=1))
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    return bench


def say(bench: Bench, signal: HostSignals | None) -> None:
    assert bench.tuner._node is not None
    bench.tuner._node.record(signal)


def test_no_trial_is_turned_while_the_rank_s_node_is_disturbed(bench: Bench) -> None:
    say(bench, SHORT)
    bench.policy.turn = TuningTurn(1, {"micro_batch": 8}, is_trial=True)
    bench.run(6)
    assert bench.switches() == []
    say(bench, WELL)
    bench.run(2)
    assert [knobs for _, _, knobs in bench.switches()] == [{"micro_batch": 8}]


def test_the_way_back_is_open_in_a_disturbance(bench: Bench) -> None:
    bench.policy.turn = TuningTurn(1, {"micro_batch": 8}, is_trial=True)
    bench.run(4)
    say(bench, SHORT)
    bench.policy.turn = TuningTurn(1, {"micro_batch": 4})
    bench.run(4)
    assert [knobs["micro_batch"] for _, _, knobs in bench.switches()] == [8, 4]


def test_a_silent_daemon_permits_a_trial(bench: Bench) -> None:
    say(bench, SHORT)
    bench.policy.turn = TuningTurn(1, {"micro_batch": 8}, is_trial=True)
    bench.run(2)
    assert bench.switches() == []
    say(bench, None)
    bench.run(2)
    assert len(bench.switches()) == 1


def test_a_step_that_was_paused_is_seen_as_one_that_is_not_to_be_judged(bench: Bench) -> None:
    bench.was_paused = lambda step: step.step in (20, 21)  # type: ignore[method-assign]
    bench.run(20)
    assert [o.step for o in bench.policy.seen if o.profiled] == [9, 10, 20, 21]
