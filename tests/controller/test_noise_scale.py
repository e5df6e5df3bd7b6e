"""The noise scale: the known one is found in synthetic gradients, and what follows from it matches the papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pacecar.config import TuneConfig
from pacecar.controller.knobs.batch.gradient_noise_scale import (
    MEASUREMENTS_MIN,
    GradientNoiseScale,
    StatisticalPace,
    learning_rate_factor,
    progress,
)
from pacecar.controller.observation import JobFacts, KnobSpace, Observation
from tests.kit.selection import reduced

SIZE = 4000


def measured(phi: float, small: int, ranks: int, measurements: int, seed: int) -> GradientNoiseScale:
    """Gradients with |G|^2 = 1 and tr(Sigma) = phi, `ranks` of them averaged, as DDP does."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(SIZE, generator=generator, dtype=torch.double)
    true /= true.norm()
    scale = GradientNoiseScale()
    for _ in range(measurements):
        noise = torch.randn(ranks, SIZE, generator=generator, dtype=torch.double) * math.sqrt(phi / SIZE / small)
        own = true + noise
        scale.observe(float(own.square().sum(1).mean()), small, float(own.mean(0).square().sum()), small * ranks)
    return scale


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("phi", "small"), [(10.0, 8), (100.0, 8), (200.0, 32), (0.0, 8)])
def test_a_known_noise_scale_is_found_within_a_fifth(phi: float, small: int, ranks: int) -> None:
    for seed in range(reduced(3)):
        found = measured(phi, small, ranks, 200, seed).samples
        assert found == pytest.approx(phi, rel=0.2, abs=1e-6)


def test_the_scale_of_the_loss_does_not_matter() -> None:
    plain, scaled = GradientNoiseScale(), GradientNoiseScale()
    for _ in range(MEASUREMENTS_MIN):
        plain.observe(3.0, 8, 2.0, 16)
        scaled.observe(3.0 * 2**30, 8, 2.0 * 2**30, 16)
    assert plain.samples == pytest.approx(scaled.samples)


def test_zero_is_a_measurement_and_too_few_are_none() -> None:
    scale = GradientNoiseScale()
    for _ in range(MEASUREMENTS_MIN - 1):
        scale.observe(2.0, 8, 2.0, 16)
    assert scale.samples is None
    scale.observe(2.0, 8, 2.0, 16)
    assert scale.samples == 0.0


def test_nonsense_is_left_out_and_a_gradient_below_its_noise_is_unknown() -> None:
    scale = GradientNoiseScale()
    for numbers in ((math.nan, 8, 1.0, 16), (1.0, 8, math.inf, 16), (1.0, 16, 1.0, 16), (1.0, 0, 1.0, 16)):
        scale.observe(*numbers)
    assert scale.measurements == 0
    for _ in range(MEASUREMENTS_MIN):
        scale.observe(8.0, 8, 3.0, 16)  # even less than half of it is left: no signal
    assert scale.samples is None


@given(st.floats(0, 1e6), st.integers(1, 4096), st.integers(1, 64))
def test_progress_is_between_one_and_the_ratio_of_batches(phi: float, base: int, multiplier: int) -> None:
    gained = progress(phi, base, base * multiplier)
    assert 1 - 1e-9 <= gained <= multiplier + 1e-9
    assert progress(None, base, base * multiplier) == 1.0
    assert learning_rate_factor("adascale", phi, base, base * multiplier) == gained


def test_progress_is_adascale_s_gain_in_its_own_terms() -> None:
    """(sigma^2 + mu^2) / (sigma^2 / S + mu^2), Johnson et al. 2020; sigma^2 of the base batch's gradient."""
    base, multiplier, mu2, trace = 32, 8, 0.7, 90.0
    sigma2 = trace / base
    gain = (sigma2 + mu2) / (sigma2 / multiplier + mu2)
    assert progress(trace / mu2, base, base * multiplier) == pytest.approx(gain)


def test_each_rule_is_its_name() -> None:
    assert learning_rate_factor("none", 50.0, 32, 128) == 1.0
    assert learning_rate_factor("linear", None, 32, 128) == 4.0
    assert learning_rate_factor("sqrt", None, 32, 128) == 2.0
    assert learning_rate_factor("adascale", None, 32, 128) == 1.0
    assert set(TuneConfig.__annotations__["learning_rate_rule"].replace('"', "'").split("'")[1::2]) == {
        "none", "linear", "sqrt", "adascale",
    }  # fmt: skip


def test_a_policy_sees_the_time_for_the_same_way() -> None:
    """A step of twice the batch that takes 1.5 times as long is faster with much noise, and slower with little."""
    for phi, seen in ((1e9, 750), (0.0, 1500), (None, 1500), (32.0, 1125)):
        pace = StatisticalPace(lambda phi=phi: phi)  # type: ignore[misc]
        pace.begin(JobFacts("job", 2), [KnobSpace("batch_samples", 32, (32, 64))], turns_knobs=True)
        assert pace.judgeable(Observation(1, 0, {"batch_samples": 32}, 1000)).pace_ns == 1000
        judged = pace.judgeable(Observation(2, 0, {"batch_samples": 64}, 1500))
        assert judged.pace_ns == pytest.approx(seen, abs=1)
