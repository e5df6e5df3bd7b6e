"""Trials wait while the node is disturbed, but not on old signals, and not forever."""

from __future__ import annotations

import msgspec
import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.controller.guards.node_monitor import (
    AGE_PERIODS,
    HOLD_SECONDS_MAX,
    PERIOD_NS_MAX,
    REGAIN_RATIO,
    Disturbance,
    DisturbanceGate,
    own_bytes_per_second,
)
from pacecar.records.host_signals import HostSignals

PERIOD = 5 * NS_PER_SECOND
LINK = 125_000_000


def signal(others: float = 0.0, own: float = 1e6, **changes: object) -> HostSignals:
    told: dict[str, object] = {
        "period_ns": PERIOD, "taken_ns": 0, "device_uuid": "GPU-1", "throttled_by": (), "interface": "eth0",
        "receive_bytes_per_second": 2.0, "transmit_bytes_per_second": 1.5 * own + others * LINK,
        "link_bytes_per_second": LINK,
    }  # fmt: skip
    return HostSignals(**(told | changes))  # type: ignore[arg-type]


class Daemon:
    """Says one thing each period."""

    def __init__(self) -> None:
        self.gate, self.now_ns = DisturbanceGate(), 1

    def say(self, told: HostSignals | None, times: int = 1) -> str | None:
        for _ in range(times):
            self.now_ns += PERIOD
            now = None if told is None else msgspec.structs.replace(told, taken_ns=self.now_ns)
            self.gate.record(now, self.now_ns, own_bytes_per_second=1e6)
            bad = self.gate.reason(self.now_ns)
        return None if bad is None else bad[1]


def test_nothing_is_held_while_nobody_says_anything() -> None:
    assert DisturbanceGate().reason(10**18) is None
    assert DisturbanceGate().link_ratio(0) is None


def test_a_throttled_device_holds_and_is_named_until_it_is_not() -> None:
    daemon = Daemon()
    assert daemon.say(signal()) is None
    assert daemon.say(signal(throttled_by=("hw_slowdown",))) == "this node's device is throttled: hw_slowdown"
    assert daemon.say(signal()) is None


@pytest.mark.parametrize("periods", [1, AGE_PERIODS])
def test_a_signal_is_believed_for_three_periods_and_not_longer(periods: int) -> None:
    daemon = Daemon()
    daemon.say(signal(throttled_by=("hw_slowdown",)))
    assert daemon.gate.reason(daemon.now_ns + periods * PERIOD) is not None
    assert daemon.gate.reason(daemon.now_ns + AGE_PERIODS * PERIOD + 1) is None
    assert daemon.gate.fresh(daemon.now_ns + AGE_PERIODS * PERIOD + 1) is None


def test_a_daemon_that_promises_to_be_silent_for_hours_is_not_believed_for_hours() -> None:
    gate = DisturbanceGate()
    gate.record(signal(period_ns=10**15, throttled_by=("x",)), 0, own_bytes_per_second=None)
    assert gate.reason(AGE_PERIODS * PERIOD_NS_MAX) is not None
    assert gate.reason(AGE_PERIODS * PERIOD_NS_MAX + 1) is None


def test_a_clock_that_went_back_is_no_fresh_signal() -> None:
    daemon = Daemon()
    daemon.say(signal(throttled_by=("x",)))
    assert daemon.gate.reason(daemon.now_ns - 1) is None


def test_a_daemon_that_is_gone_releases() -> None:
    daemon = Daemon()
    assert daemon.say(signal(throttled_by=("x",))) is not None
    assert daemon.say(None) is None


def test_the_job_s_own_traffic_is_not_somebody_else_s() -> None:
    assert Daemon().say(signal(0.0), 9) is None


def test_others_traffic_holds_when_two_signals_say_so_and_releases_when_two_say_not() -> None:
    daemon = Daemon()
    assert daemon.say(signal(0.3)) is None, "a burst"
    assert daemon.say(signal(0.3)) == "others send over eth0: over 20% of the link"
    assert daemon.say(signal(0.15), 5) is not None, "between the two bounds nothing changes"
    assert daemon.say(signal(0.0)) is not None
    assert daemon.say(signal(0.0)) is None


def test_what_was_before_a_silence_does_not_count() -> None:
    daemon = Daemon()
    daemon.say(signal(0.3))
    daemon.now_ns += (AGE_PERIODS + 1) * PERIOD
    assert daemon.say(signal(0.3)) is None, "the first of two"


@pytest.mark.parametrize("lacks", ["link_bytes_per_second", "transmit_bytes_per_second"])
def test_what_is_unknown_holds_nothing(lacks: str) -> None:
    told = msgspec.structs.replace(signal(0.9), **{lacks: None, "receive_bytes_per_second": None})
    assert Daemon().say(told, 5) is None


def test_zero_is_a_measurement() -> None:
    daemon = Daemon()
    daemon.say(signal(receive_bytes_per_second=0.0, transmit_bytes_per_second=0.0, device_free_bytes=0))
    assert daemon.gate.link_ratio(daemon.now_ns) == 0.0


def test_a_signal_that_lay_in_a_socket_while_the_job_was_stopped_is_as_old_as_its_tick() -> None:
    gate = DisturbanceGate()
    gate.record(signal(throttled_by=("x",), taken_ns=PERIOD), 30 * PERIOD, own_bytes_per_second=None)
    assert gate.reason(30 * PERIOD) is None


def test_a_fault_and_want_of_memory_hold_and_waits_for_a_processor_do_not() -> None:
    daemon = Daemon()
    assert daemon.say(signal(faults=())) is None
    assert daemon.say(signal(faults=("Xid 79",))) == "this node's device has a fault: Xid 79"
    said = daemon.say(signal(memory_stalled_ratio=0.4))
    assert said == "this node is short of memory: tasks waited for it 40% of the time"
    assert daemon.say(signal(memory_stalled_ratio=0.05, cpu_stalled_ratio=1.0)) is None


def test_what_comes_and_goes_without_end_is_the_world_too() -> None:
    """A job that loads its data over the same link in bursts is not held for ever."""
    daemon = Daemon()
    held = [
        daemon.say(signal(0.5 if second % 4 < 2 else 0.0), 1) is not None
        for second in range(int(40 * HOLD_SECONDS_MAX * NS_PER_SECOND / PERIOD))
    ]
    late = held[len(held) // 2 :]
    assert sum(late) / len(late) < 2 * REGAIN_RATIO
    assert any(late), "and patience grows back"


def test_the_gravest_of_several_is_told_and_the_next_when_that_became_the_world() -> None:
    daemon = Daemon()
    both = signal(faults=("Xid 79",), throttled_by=("x",))
    assert daemon.say(both) == "this node's device has a fault: Xid 79"
    daemon.say(both, int(HOLD_SECONDS_MAX * NS_PER_SECOND / PERIOD) + 2)
    bad = daemon.gate.reason(daemon.now_ns)
    assert bad[0] is Disturbance.THROTTLED


def test_what_stays_bad_is_the_world_and_a_new_kind_of_bad_is_news() -> None:
    daemon = Daemon()
    stays = int(HOLD_SECONDS_MAX * NS_PER_SECOND / PERIOD)
    reasons = [daemon.say(signal(0.5)) for _ in range(stays + 5)]
    assert reasons[2] is not None
    assert reasons[-1] is None
    assert daemon.say(signal(0.5, throttled_by=("x",))) is not None


def test_a_ring_s_bytes() -> None:
    assert own_bytes_per_second(100, world_size=2, ranks_on_node=1, pace_ns=NS_PER_SECOND) == 100
    assert own_bytes_per_second(100, world_size=4, ranks_on_node=2, pace_ns=NS_PER_SECOND // 2, sent_ratio=0.5) == 300
    assert own_bytes_per_second(100, world_size=1, ranks_on_node=1, pace_ns=5) == 0
    assert own_bytes_per_second(100, world_size=2, ranks_on_node=1, pace_ns=0) is None


def test_signals_cross_the_wire() -> None:
    told = signal(0.25, throttled_by=("a", "b"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=HostSignals) == told
