"""Pairs of two worlds are told from noisy pairs of one."""

from __future__ import annotations

import math
import random

from pacecar.controller.experiment.sequential_test import is_broken

DEAD_BAND = 0.01


def test_a_change_that_becomes_worth_much_more_is_seen_wherever_it_happens() -> None:
    for cut in range(2, 8):
        draw = random.Random(cut)
        savings = [(0.0 if i < cut else 0.16) + draw.gauss(0, 0.01) for i in range(9)]
        assert is_broken(savings, dead_band=DEAD_BAND) is (cut <= 7), cut


def test_what_is_worth_the_same_all_along_is_not_broken() -> None:
    broken = 0
    for seed in range(1000):
        draw = random.Random(f"one world {seed}")
        savings = [0.03 + draw.gauss(0, 0.03) for _ in range(draw.randint(4, 20))]
        broken += is_broken(savings, dead_band=DEAD_BAND)
    assert broken <= 10, "one in a hundred at most, and all that it costs is to search again"


def test_what_is_correlated_from_pair_to_pair_is_seldom_taken_for_a_break() -> None:
    broken = 0
    for seed in range(500):
        draw, level, savings = random.Random(f"slow {seed}"), 0.0, []
        for _ in range(12):
            level = 0.3 * level + math.sqrt(0.91) * draw.gauss(0, 0.03)
            savings.append(0.05 + level)
        broken += is_broken(savings, dead_band=DEAD_BAND)
    assert broken <= 10


def test_a_clear_difference_of_less_than_twice_the_dead_band_is_of_no_interest() -> None:
    assert not is_broken([0.0] * 5 + [0.019] * 5, dead_band=DEAD_BAND)
    assert is_broken([0.0] * 5 + [0.021] * 5, dead_band=DEAD_BAND)


def test_a_single_pair_on_a_side_tells_nothing() -> None:
    assert not is_broken([], dead_band=DEAD_BAND)
    assert not is_broken([0.0, 0.0, 0.5], dead_band=DEAD_BAND)
    assert not is_broken([0.5, 0.0, 0.0, 0.0], dead_band=DEAD_BAND)
