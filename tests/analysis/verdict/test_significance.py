"""Chance names nobody: what is named is larger than what dealing the excesses out again gives."""

from __future__ import annotations

import numpy as np
import pytest

from pacecar.analysis.verdict.significance import (
    P_MAX,
    change_step,
    lasting_ratio,
    least_p,
    outliers,
    permutation_p,
    spread_ratio,
    steps_out,
    winsorised,
)


@pytest.mark.slow
def test_of_equal_ranks_few_are_below_the_limit() -> None:
    random = np.random.default_rng(0)
    below = sum(
        permutation_p(table, int(table.sum(axis=1).argmax())) < 0.05 for table in random.standard_normal((100, 8, 6))
    )
    assert below <= 15


@pytest.mark.parametrize(("ranks", "columns"), [(2, 4), (2, 8), (3, 4), (8, 3)])
def test_no_excess_however_large_is_less_likely_than_ranks_and_columns_allow(ranks: int, columns: int) -> None:
    table = np.zeros((ranks, columns))
    table[1] = 1e9
    assert permutation_p(table, 1) == pytest.approx(least_p(ranks, columns), rel=0.5)


def test_one_outlying_step_is_pulled_in() -> None:
    table = np.zeros((8, 6))
    table[3, 2] = 100
    assert permutation_p(table, 3) > P_MAX
    assert winsorised(table).max() == 0
    assert lasting_ratio(table[3], 1) == 0


def test_an_excess_in_every_step_is_no_chance() -> None:
    table = np.random.default_rng(1).standard_normal((8, 6))
    table[3] += 6
    assert permutation_p(table, 3) < P_MAX
    assert lasting_ratio(table[3], 1) > 0.9


def test_two_ranks_and_few_steps_prove_nothing() -> None:
    assert permutation_p(np.array([[0.0] * 6, [5.0] * 6]), 1) > P_MAX
    assert permutation_p(np.array([[0.0] * 12, [5.0] * 12]), 1) < P_MAX


def test_what_stands_out_does_so_of_all_other_ranks_and_steps() -> None:
    table = np.abs(np.random.default_rng(2).standard_normal((8, 6)))
    table[5, 1] = table[5, 4] = 60
    assert steps_out(table, 5).tolist() == [1, 4]
    assert steps_out(table, 2).tolist() == []
    table[2, 3] = 30  # another stands out, too: neither hides the other
    assert steps_out(table, 5).tolist() == [1, 4]
    assert steps_out(table, 2).tolist() == [3]
    assert outliers(table) == [(2, 3), (5, 1), (5, 4)]
    table[7, 0] = 40  # three ranks do: it is how these ranks vary
    assert [steps_out(table, rank).tolist() for rank in (2, 5, 7)] == [[], [], []]


def test_where_an_excess_begins() -> None:
    assert change_step(np.array([0.0, 0.1, 5.0, 5.1, 4.9, 5.0])) == 2
    assert change_step(np.array([5.0, 5.1, 4.9, 5.0, 5.2, 5.0])) == 0


def test_a_stop_is_in_one_part_of_its_step_and_slow_work_in_all() -> None:
    assert spread_ratio(np.array([[0.0, 3, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]])) == 0
    assert spread_ratio(np.ones((3, 4))) == 0.75
