"""Estimates sum exactly, follow their calibration and claim nothing without one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.profiler.windows.estimate import CALIBRATIONS_MAX, WINDOWS_MAX, Calibration, Calibrations, estimate, split
from pacecar.records import Knobs, Ledger
from tests.kit.selection import reduced


@pytest.mark.slow
@settings(max_examples=reduced(200), deadline=None)
@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**12), min_size=1, max_size=9).filter(any))
def test_split_is_exact_and_within_one_of_the_proportion(total, weights):
    parts = split(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * sum(weights) - total * weight) < sum(weights)


names = st.sampled_from(["data_wait", "forward", "backward", "backward_tail", "optimizer", "overhead", "rest", "odd"])
part = st.integers(0, 10**9)
ledgers = st.builds(
    lambda a, b, c, d, o: Ledger(
        wall_ns=a + b + c + d, compute_ns=a, exposed_communication_ns=b, host_bound_ns=c, unknown_ns=d,
        communication_ns=b + min(a, o), overlapped_communication_ns=min(a, o),
    ),
    part, part, part, part, part,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=reduced(200), deadline=None)
@given(part, st.dictionaries(names, part), st.none() | st.dictionaries(names, ledgers))
def test_an_estimate_always_sums_to_the_wall_time(wall, phases, mixes):
    ledger = estimate(wall, phases, None if mixes is None else Calibration(0, mixes))
    assert sum(ledger.parts().values()) == ledger.wall_ns == wall


def test_uncalibrated_only_what_timers_measure_is_charged():
    ledger = estimate(100, {"data_wait": 10, "forward": 30, "overhead": 5, "checkpoint": 7, "backward_tail": 8}, None)
    assert ledger == Ledger(wall_ns=100, data_wait_ns=10, host_bound_ns=5, checkpoint_ns=7, unknown_ns=78)


def test_a_phase_keeps_its_mix_and_follows_its_length():
    mixes = {
        "backward": Ledger(
            wall_ns=100, compute_ns=80, host_bound_ns=20, communication_ns=40, overlapped_communication_ns=40
        ),
        "backward_tail": Ledger(wall_ns=10, exposed_communication_ns=10, communication_ns=10),
        "rest": Ledger(wall_ns=4, host_bound_ns=4),
    }
    ledger = estimate(400, {"backward": 200, "backward_tail": 150}, Calibration(3, mixes))
    assert ledger == Ledger(
        wall_ns=400, compute_ns=160, exposed_communication_ns=150, host_bound_ns=90,
        communication_ns=230, overlapped_communication_ns=80, loop_host_ns=50,
    )  # fmt: skip


def test_the_settings_own_calibration_wins_over_the_latest():
    small, large = Knobs(1, {"bucket_bytes": 1}), Knobs(2, {"bucket_bytes": 9})
    table = Calibrations()
    assert table.find(small) is None
    table.add(small, Calibration(5, {}))
    table.add(large, Calibration(9, {}))
    assert table.find(Knobs(7, {"bucket_bytes": 1})).step == 5
    assert table.find(Knobs(8, {"bucket_bytes": 4})).step == 9


def test_calibrations_are_bounded_and_the_oldest_goes():
    table = Calibrations()
    for value in range(CALIBRATIONS_MAX + 3):
        table.add(Knobs(0, {"k": value}), Calibration(value, {}))
    assert table.find(Knobs(0, {"k": 0})).step == CALIBRATIONS_MAX + 2, "forgotten: the latest stands in"
    assert table.find(Knobs(0, {"k": 3})).step == 3


def window(step, compute, host, wall=100):
    return Calibration(step, {"forward": Ledger(wall_ns=wall, compute_ns=compute, host_bound_ns=host,
                                                unknown_ns=wall - compute - host)})  # fmt: skip


def compute_of(table, knobs=Knobs()):  # noqa: B008  frozen
    return estimate(1000, {"forward": 1000}, table.find(knobs)).compute_ns


def test_one_odd_window_among_several_does_not_move_the_estimate():
    table = Calibrations()
    for step, compute in enumerate((90, 90, 20, 90)):
        table.add(Knobs(), window(step, compute, 100 - compute), 0.7 if compute == 20 else 0.0)
    assert compute_of(table) == 900


def test_windows_count_alike_whatever_their_length():
    table = Calibrations()
    for step, (compute, wall) in enumerate(((90, 100), (9_000, 10_000), (80, 100))):
        table.add(Knobs(), window(step, compute, wall - compute, wall))
    assert compute_of(table) == 900


def test_two_windows_in_a_row_that_were_far_off_begin_anew():
    table = Calibrations()
    for step in range(WINDOWS_MAX):
        table.add(Knobs(), window(step, 90, 10), 0.0)
    table.add(Knobs(), window(8, 40, 60), 0.5)
    assert compute_of(table) == 900, "one is an oddity"
    table.add(Knobs(), window(9, 44, 56), 0.5)
    assert compute_of(table) == 420, "two are another job"
    assert table.find(Knobs()).windows == 2


def test_a_setting_remembers_so_many_windows_and_no_more():
    table = Calibrations()
    for step in range(3 * WINDOWS_MAX):
        table.add(Knobs(), window(step, 90 if step < 2 * WINDOWS_MAX else 50, 10), 0.0)
    assert table.find(Knobs()).windows == WINDOWS_MAX
    assert compute_of(table) == 500


def test_windows_without_a_common_heading_leave_the_newest_to_speak():
    table = Calibrations()
    for step, part in enumerate(({"compute_ns": 9}, {"host_bound_ns": 9}, {"data_wait_ns": 9})):
        table.add(Knobs(), Calibration(step, {"forward": Ledger(wall_ns=9, **part)}))
    assert estimate(5, {"forward": 5}, table.find(Knobs())) == Ledger(wall_ns=5, data_wait_ns=5)


@pytest.mark.slow
@settings(max_examples=reduced(100), deadline=None)
@given(part, st.dictionaries(names, part), st.lists(st.dictionaries(names, ledgers), min_size=1, max_size=7))
def test_an_estimate_from_several_windows_sums_to_the_wall_time(wall, phases, windows):
    table = Calibrations()
    for step, mixes in enumerate(windows):
        table.add(Knobs(), Calibration(step, mixes))
    ledger = estimate(wall, phases, table.find(Knobs()))
    assert sum(ledger.parts().values()) == ledger.wall_ns == wall
