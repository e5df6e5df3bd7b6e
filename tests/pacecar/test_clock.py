"""Durations use a clock that never goes back, instants one that may."""

from __future__ import annotations

import time

import pytest

from pacecar.clock import SystemClock
from tests.kit.fake_clock import FakeClock


def test_the_system_clock_is_monotonic_and_its_wall_time_is_the_systems() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_ns() for _ in range(1000)]
    assert readings == sorted(readings)
    assert abs(clock.wall_ns() - time.time_ns()) < 10**9


def test_a_fake_clock_moves_only_when_told() -> None:
    clock = FakeClock(monotonic_ns=5)
    wall_ns = clock.wall_ns()
    assert clock.monotonic_ns() == 5
    clock.advance(7)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (12, wall_ns + 7)


def test_the_wall_clock_may_jump_back_and_durations_do_not_notice() -> None:
    clock = FakeClock()
    before_ns, wall_ns = clock.monotonic_ns(), clock.wall_ns()
    clock.jump_wall(-1000)
    assert clock.monotonic_ns() == before_ns
    assert clock.wall_ns() == wall_ns - 1000
    with pytest.raises(AssertionError):
        clock.advance(-1)
