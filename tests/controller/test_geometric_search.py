"""The search stays near what works, climbs where that won, and crosses plateaus without running away."""

from __future__ import annotations

from pacecar.controller.forecast.forecast import Forecast
from pacecar.controller.observation import KnobSpace
from pacecar.controller.policy.geometric_search import GeometricSearch

MIB = 2**20
SIZES = tuple(size * MIB for size in (1, 2, 4, 8, 16, 25, 32, 64, 128))
HERE = {"bucket_bytes": 25 * MIB}


def screen() -> GeometricSearch:
    return GeometricSearch([KnobSpace("bucket_bytes", 25 * MIB, SIZES)])


def near(one: GeometricSearch) -> list[int]:
    return [value // MIB for value in one.values_near("bucket_bytes", HERE["bucket_bytes"])]


def tell(one: GeometricSearch, how: str, *sizes: int) -> None:
    for size in sizes:
        getattr(one, how)("bucket_bytes", size * MIB)


def test_the_neighbours_are_at_about_twice_and_half() -> None:
    assert near(screen()) == [64, 16]


def test_one_further_where_the_neighbour_was_level_and_nothing_where_it_lost() -> None:
    one = screen()
    tell(one, "level", 16)
    tell(one, "lost", 64)
    assert near(one) == [8]


def test_one_further_than_a_leap_that_met_the_edge_of_a_plateau() -> None:
    one = screen()
    tell(one, "undecided", 8)
    assert near(one) == [64, 16, 4]


def test_a_plateau_is_followed_no_further_than_a_leap_goes_and_one() -> None:
    one = screen()
    tell(one, "level", 16, 8)
    assert near(one) == [64, 4]
    tell(one, "level", 4)
    assert near(one) == [64]


def test_nothing_beyond_a_value_that_lost_on_the_way() -> None:
    one = screen()
    tell(one, "level", 8)
    tell(one, "lost", 16)
    assert near(one) == [64]


def test_what_is_barred_is_no_way_on_either() -> None:
    one = screen()
    tell(one, "level", 8)
    tell(one, "bar", 4)
    assert near(one) == [64, 16]


def test_a_second_look_takes_what_was_undecided_back_in_and_what_was_level_not() -> None:
    one = screen()
    tell(one, "level", 16)
    tell(one, "undecided", 8)
    assert near(one) == [64, 4]
    assert one.retry_undecided()
    assert near(one) == [64, 8]
    assert not one.retry_undecided()


def test_every_value_that_should_gain_is_a_candidate_however_far_and_the_neighbours_are() -> None:
    def gains(_: str, __: dict[str, int], to_value: int) -> Forecast:
        return Forecast(0.2 if to_value < 2 * MIB else -0.01, 0.1, "forecast")

    found, _ = screen().candidates(HERE, gains, 0.3)
    values = [one.value // MIB for one in found]
    assert values[0] == 1
    assert set(values) >= {1, 16, 64}
    assert not {2, 4, 8} & set(values)
