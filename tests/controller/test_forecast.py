"""Expected gains and losses equal their integrals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.controller.forecast.forecast import (
    HORIZON_STEPS_MIN,
    Forecast,
    expected_gain,
    expected_loss,
    horizon_steps,
    proof_pairs,
)


@pytest.mark.parametrize(("gain", "spread"), [(0.1, 0.05), (0.0, 0.03), (-0.05, 0.02), (0.02, 0.001)])
def test_expectations_are_means_over_the_gaussian(gain: float, spread: float) -> None:
    drawn = np.random.default_rng(1).normal(gain, spread, 400_000)
    assert expected_gain(gain, spread, 0.01) == pytest.approx(
        float(np.mean(np.where(drawn > 0.01, drawn, 0))), abs=3e-4
    )
    assert expected_loss(gain, spread) == pytest.approx(float(np.mean(np.maximum(-drawn, 0))), abs=3e-4)


def test_what_is_certain_needs_no_integral() -> None:
    assert expected_gain(0.05, 0.0, 0.01) == 0.05
    assert expected_gain(0.005, 0.0, 0.01) == 0.0
    assert expected_loss(0.05, 0.0) == 0.0


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 0.1))
def test_neither_expectation_is_negative(gain: float, spread: float, threshold: float) -> None:
    assert expected_gain(gain, spread, threshold) >= -1e-12
    assert expected_loss(gain, spread) >= -1e-12


def test_the_job_is_taken_to_go_on_as_long_as_it_has() -> None:
    assert horizon_steps(0) == horizon_steps(HORIZON_STEPS_MIN) == HORIZON_STEPS_MIN
    assert horizon_steps(5000) == 5000


def test_half_the_gain_takes_four_times_the_proof() -> None:
    assert proof_pairs(0.02, 0.06) == pytest.approx(4 * proof_pairs(0.04, 0.06))
    assert proof_pairs(0.0, 0.06) == proof_pairs(-0.1, 0.06) == float("inf")


def test_the_sure_part_of_a_gain_is_one_standard_error_less() -> None:
    assert Forecast(0.2, 0.05, "").sure_ratio == pytest.approx(0.15)
