"""Statistics that demo and report share."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pacecar.run_statistics import percentile, proven


class Tried(NamedTuple):
    """A change, as its trial measured it."""

    measured_gain_ratio: float | None
    gain_low: float | None
    gain_high: float | None


def test_percentile_is_numpys_default() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.1) == pytest.approx(1.3)
    assert percentile([7.0], 0.9) == 7.0


def test_what_changes_save_together_is_the_product_of_what_each_leaves_and_a_loss_takes_away() -> None:
    both = proven([Tried(0.2, 0.1, 0.3), Tried(0.1, -0.1, 0.2)])
    assert both.ratio == pytest.approx(1 - 0.8 * 0.9)
    assert both.low == pytest.approx(1 - 0.9 * 1.1)
    assert both.high == pytest.approx(1 - 0.7 * 0.8)


def test_where_one_bound_is_unknown_that_of_all_is() -> None:
    assert proven([Tried(0.2, None, None), Tried(0.1, 0.05, 0.2)]).low is None
    assert proven([]) == (None, None, None)
