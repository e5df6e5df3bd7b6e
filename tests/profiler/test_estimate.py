"""Estimates sum exactly, follow their calibration and claim nothing without one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.profiler.estimate import CALIBRATIONS_MAX, Calibration, Calibrations, estimate, split
from pacecar.records import Knobs, Ledger


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
        communication_ns=230, overlapped_communication_ns=80,
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
