"""Driver counters that wrap, fall and restart, and what is derived from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.monitor.gpu.queries.derived import CHARGED_NS_MAX, ROUND, ClockEvents, GpuCounter, LinkCounter, MeanPower

TOP = 1 << 32
SECOND = 1_000_000_000


def total(*values, bits=64):
    counter = GpuCounter()
    return [counter.update(value, bits) for value in values][-1]


def test_the_first_value_counts_from_zero_and_zero_is_a_measurement():
    assert total(0) == 0
    assert total(7) == 7
    assert total(7, 7) == 7
    assert total(7, 12) == 12


@pytest.mark.parametrize("bits", [32, 64])
def test_a_counter_that_wraps_at_32_bits_loses_nothing_whatever_its_type_says(bits):
    assert total(TOP - 10, 5, bits=bits) is None  # it may be 0 once, and back
    assert total(TOP - 10, 5, 6, bits=bits) == TOP + 6
    assert total(TOP - 10, 5, 6, TOP - 1, 0, 0, bits=bits) == 2 * TOP


def test_a_counter_of_64_bits_wraps_at_64():
    assert total((1 << 64) - 3, 4, 4) == (1 << 64) + 4


def test_a_fall_that_is_no_wrap_is_a_new_start_once_the_next_reading_says_so():
    assert total(1000, 40) is None
    assert total(1000, 40, 41) == 1041
    assert total(TOP - 10, TOP - 20, TOP - 20) == (TOP - 10) + (TOP - 20)
    assert total(1 << 40, 40, 50) == (1 << 40) + 50


@pytest.mark.parametrize("last", [1000, TOP - 10, TOP // 2, 1 << 40, (1 << 64) - 100])
def test_a_counter_that_reads_zero_once_and_goes_on_where_it_was_has_not_moved(last):
    counter = GpuCounter()
    totals = [counter.update(value) for value in (last, 0, last + 7, 3, last + 9)]
    assert totals == [last, None, last + 7, None, last + 9]


def test_a_counter_that_falls_at_each_reading_has_no_total():
    assert [total(1000, *range(900, 900 - n, -1)) for n in range(1, 5)] == [None] * 4


def test_an_energy_of_zero_is_believed_at_the_second_reading():
    assert [(counter := GpuCounter(doubts_zero=True)).update(0), counter.update(7_000), counter.update(7_100)] == [
        None, 7_000, 7_100,
    ]  # fmt: skip
    assert [(counter := GpuCounter(doubts_zero=True)).update(0), counter.update(0), counter.update(9)] == [None, 0, 9]


def test_link_bytes_that_read_zero_once_have_not_moved_and_a_confirmed_fall_began_again():
    for values, totals in (
        ((1 << 40, 0, (1 << 40) + 5), [1 << 40, None, (1 << 40) + 5]),
        ((1 << 40, 0, 30, 31), [1 << 40, None, (1 << 40) + 30, (1 << 40) + 31]),
    ):
        counter = LinkCounter()
        got = [counter.update(v, n * SECOND, n * SECOND + 1, 31.5e9) for n, v in enumerate(values, 1)]
        assert got == totals


def test_after_a_reload_a_fall_is_never_a_wrap_and_what_goes_on_is_not_counted_twice():
    counter = GpuCounter()
    counter.update(TOP - 10, 32)
    counter.restart()
    assert counter.update(5, 32) == TOP - 5
    counter.restart()
    assert counter.update(9, 32) == TOP - 1
    assert counter.update(8, 32) is None
    assert counter.update(8, 32) == TOP + 7


@pytest.mark.slow
@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=20), st.sampled_from([16, 31, 32, 63, 64]))
def test_a_total_never_falls(values, bits):
    counter = GpuCounter()
    totals = [total for value in values if (total := counter.update(value, bits)) is not None]
    assert totals == sorted(totals)


@pytest.mark.slow
@given(st.integers(0, TOP - 1), st.lists(st.integers(0, TOP // 2 - 1), max_size=20))
def test_steps_below_half_a_round_add_up_over_any_number_of_wraps(start, steps):
    counter, at = GpuCounter(), start
    counter.update(start, 32)
    for step in steps:
        at += step
        counter.update(at % TOP, 32)
    counter.update(at % TOP, 32)  # which says of the last step that it was a wrap
    # A wrap is only told from a new start when it crosses from the upper half to the lower one, as such steps do.
    assert counter.total == at


def test_the_time_of_a_reason_is_that_between_samples_that_saw_it():
    events = ClockEvents("3")

    def take(mask, now, counted=None):
        return {s.labels: s.value for s in events.update(mask, 0x5, now, counted or {})}

    idle, cap = ("3", "gpu_idle", "sampled"), ("3", "sw_power_cap", "sampled")
    assert take(0x5, 0) == {idle: 0, cap: 0}
    assert take(0x1, 2 * SECOND) == {idle: 2 * SECOND, cap: 0}
    assert take(0x4, 3 * SECOND) == {idle: 2 * SECOND, cap: SECOND}
    assert take(0x0, 9 * SECOND) == {idle: 2 * SECOND, cap: SECOND}
    assert take(0x4, 10 * SECOND, counted={"sw_power_cap": 7}) == {idle: 2 * SECOND}


def test_no_sample_stands_for_more_than_a_bounded_time():
    events = ClockEvents("0")
    list(events.update(0x1, 0x1, 0, {}))
    assert [s.value for s in events.update(0x1, 0x1, 1000 * SECOND, {})] == [CHARGED_NS_MAX]


def disbelieved(seconds, is_held, counted, gap=1):
    """Return the second after which the driver's count is disbelieved; None if it never is."""
    events, heat = ClockEvents("0"), 0x20
    for second in range(0, seconds + 1, gap):
        mask = heat if is_held(second) else 0
        list(events.update(mask, heat, second * SECOND, {"sw_thermal_slowdown": int(counted(second) * SECOND)}))
        if events.disbelieved:
            return second
    return None


@pytest.mark.parametrize(
    ("is_held", "counted", "by"),
    [
        (lambda second: True, lambda second: second, None),  # as it should be
        (lambda second: True, lambda second: 0.05 * second, None),  # on and off within milliseconds, met each time
        (lambda second: True, lambda second: second // 5 * 5, None),  # a counter that moves every five seconds
        (lambda second: True, lambda second: 80e-9, 10),  # power smoothing
        (lambda second: second > 20, lambda second: 80e-9, 31),
        (lambda second: False, lambda second: 0, None),
        (lambda second: False, lambda second: 0.5 * second, None),  # between samples
        (lambda second: False, lambda second: second, 10),
        (lambda second: second % 2 == 0, lambda second: second / 2, None),  # nothing can be told of it
        (lambda second: True, lambda second: 40 * second, 10),  # faster than time
    ],
)
def test_a_count_that_contradicts_all_samples_of_ten_seconds_is_not_believed(is_held, counted, by):
    assert disbelieved(120, is_held, counted) == by


def test_after_a_gap_nothing_is_concluded_and_a_new_driver_is_believed():
    assert disbelieved(600, lambda second: True, lambda second: 0, gap=60) is None
    events = ClockEvents("0")
    for second in range(20):
        list(events.update(0x20, 0x20, second * SECOND, {"sw_thermal_slowdown": 0}))
    assert events.disbelieved == {"sw_thermal_slowdown"}
    events.restart()
    assert events.disbelieved == set()


def test_mean_power_is_energy_over_time_and_absent_until_there_is_a_window():
    power = MeanPower("0")
    assert list(power.update(1000, 0)) == []
    assert [s.value for s in power.update(1000 + 700_000, SECOND)] == [700_000]
    assert [s.value for s in power.update(1000 + 700_000, SECOND + 1000)] == [700_000]  # too short a window: the last
    assert [s.value for s in power.update(1000 + 700_000, 2 * SECOND)] == [0]
    power.restart()
    assert list(power.update(5, 3 * SECOND)) == []


READINGS = st.lists(
    st.tuples(st.integers(1_000_000, 5_000_000_000), st.floats(0, 1), st.integers(0, 900_000), st.integers(0, 900_000)),
    min_size=1,
    max_size=60,
)


@pytest.mark.slow
@given(
    st.integers(0, ROUND - 1),
    READINGS,
    st.sampled_from([0.25e9, 16e9, 31.5e9, 63e9, 121e9]),
)
def test_a_counter_of_a_link_says_what_was_moved_or_nothing(first, readings, rate):
    """Between readings without a gap the totals differ by exactly the bytes that the link moved.

    The driver reads the counter some time after the request, and some time before its answer arrives.
    """
    counter, moved, now, asked = LinkCounter(), first, 7, 7
    assert counter.update(first, now, now, rate) is None, "nobody knows yet how many bits it has"
    last = None
    for elapsed_ns, share, before_ns, after_ns in readings:
        now += elapsed_ns
        moved += int(rate * elapsed_ns / 1e9 * share)
        total = counter.update(moved % ROUND, now - before_ns, now + after_ns, rate)
        assert (total is None) == (rate * (now + after_ns - asked) / 1e9 >= ROUND)
        asked = now - before_ns
        if total is not None and last is not None:
            assert total - last[0] == moved - last[1]
        last = None if total is None else (total, moved)


def test_a_counter_that_shows_more_bits_is_right_at_any_rate_and_one_that_began_again_is_no_round():
    counter = LinkCounter()
    assert counter.update(ROUND - 1, 0, 0, 63e9) is None
    assert counter.update(5 * ROUND, 10**9, 10**9, 63e9) == 5 * ROUND
    assert counter.update(90 * ROUND, 2 * 10**9, 2 * 10**9, None) == 90 * ROUND
    counter.restart()
    assert counter.update(8, 3 * 10**9, 3 * 10**9, 63e9) == 90 * ROUND + 8
    narrow = LinkCounter()
    narrow.update(ROUND - 10, 0, 0, 1e9)
    narrow.restart()
    assert narrow.update(5, 10**9, 10**9, 1e9) == ROUND - 5, "a driver that was loaded anew counts from zero"
