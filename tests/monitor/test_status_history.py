"""The last minutes are all there, in a fixed amount of memory, and a gap stays a gap."""

import json

from pacecar.monitor.http.status_history import HistoryKeeper, series_name


def said(keeper):
    return json.loads(keeper.json())


def test_the_oldest_tick_leaves_when_the_ring_is_full():
    keeper = HistoryKeeper(1.0, ticks=3)
    for tick in range(5):
        keeper.add(float(tick), {"a": tick * 1.5})
    history = said(keeper)
    assert history["time_seconds"] == [2.0, 3.0, 4.0]
    assert history["series"] == {"a": [3.0, 4.5, 6.0]}
    assert (history["version"], history["period_seconds"]) == (1, 1.0)


def test_what_was_not_read_is_null_and_zero_is_zero():
    keeper = HistoryKeeper(1.0, ticks=4)
    keeper.add(0.0, {"a": 0.0})
    keeper.add(1.0, {})
    keeper.add(2.0, {"a": 2.0, "b": 0.0})
    assert said(keeper)["series"] == {"a": [0.0, None, 2.0], "b": [None, None, 0.0]}


def test_a_series_that_fell_silent_is_forgotten_after_one_ring():
    keeper = HistoryKeeper(1.0, ticks=3)
    keeper.add(0.0, {"old": 1.0, "new": 1.0})
    for tick in range(1, 4):
        keeper.add(float(tick), {"new": 1.0})
    assert list(said(keeper)["series"]) == ["new"]


def test_series_beyond_the_bound_are_left_out_and_counted():
    keeper = HistoryKeeper(1.0, ticks=3, series_max=2)
    taken = keeper.add(0.0, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert (taken, keeper.left_out) == ({"a": 1.0, "b": 2.0}, 1)
    assert said(keeper)["series_left_out"] == 1


def test_a_ring_that_was_never_filled_is_as_long_as_what_was_added():
    keeper = HistoryKeeper(1.0, ticks=600)
    assert said(keeper)["time_seconds"] == []
    keeper.add(7.0, {"a": 1.0})
    assert said(keeper)["time_seconds"] == [7.0]


def test_names_are_escaped_as_prometheus_does():
    assert series_name("m", training_job='a"b\\c\nd') == 'm{training_job="a\\"b\\\\c\\nd"}'


def test_series_that_come_and_go_make_room_for_those_that_are_said_now():
    keeper = HistoryKeeper(1.0, ticks=600, series_max=10)
    for tick in range(100):
        keeper.add(tick, {"kept": 1.0, f"job-{tick}": 2.0})
    assert keeper.left_out == 0
    taken = keeper.add(100, {"kept": 1.0, "late": 3.0})
    assert taken == {"kept": 1.0, "late": 3.0}
    assert keeper.add(101, {f"s{number}": 1.0 for number in range(12)}).keys() == {f"s{number}" for number in range(10)}
    assert keeper.left_out == 2
