"""The baselines of bench/ do what their originals do, behind pacecar's protocol."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.baselines import make_baseline
from bench.gaussian_process import (
    NOISE,
    SAMPLES_MAX,
    WARMUP_SAMPLES,
    GaussianProcessSampler,
    expected_improvement,
    fit,
)
from bench.tpe import TRIALS
from pacecar.config import TuneConfig
from pacecar.records import TunerStatus, Verdict
from tests.controller.obedient_job import BUCKET, COMPRESSION, MIB, curve, drive

CONFIG = TuneConfig(mode="lossy")


def test_horovods_search_takes_its_number_of_samples_and_ends_on_the_best() -> None:
    records, history = drive(make_baseline("gaussian-process", CONFIG), 2000, curve)
    assert history[11] == {"bucket_bytes": 4 * MIB}, "the first test point, also while warming up"
    first = [values["bucket_bytes"] // MIB for values in history[11 + 50 * WARMUP_SAMPLES :: 50]][:4]
    assert first == [4, 32, 16, 8]
    done = next(r for r in records if isinstance(r, TunerStatus) and r.state == "watching")
    assert done.step == pytest.approx(10 + 50 * (WARMUP_SAMPLES + SAMPLES_MAX + 1), abs=30)
    assert history[-1] == {"bucket_bytes": 8 * MIB}


def test_horovods_first_size_is_judged_once_after_its_warm_up_and_all_of_it_counts_as_trial() -> None:
    begun = 11
    records, _ = drive(make_baseline("gaussian-process", CONFIG), begun + 50 * (WARMUP_SAMPLES + 2), curve)
    first, second = [r for r in records if isinstance(r, Verdict)][:2]
    assert (first.decision, first.outcome) == (1, "kept"), "nothing was better yet"
    assert first.step == pytest.approx(begun + 50 * (WARMUP_SAMPLES + 1), abs=2)
    assert first.trial_steps == pytest.approx(50 * (WARMUP_SAMPLES + 1), abs=2)
    assert (second.decision, second.outcome) == (2, "rolled_back"), "32 MiB is slower than 4"
    assert second.step - first.step == pytest.approx(50, abs=2)


@pytest.mark.slow
def test_horovods_choices_are_chained() -> None:
    _, history = drive(make_baseline("gaussian-process", CONFIG), 3700, curve, BUCKET, COMPRESSION)
    order = [values["compression"] for values in history]
    assert [order[i] for i in range(1, len(order)) if order[i] != order[i - 1]][:2] == [1, 2]
    assert history[-1]["compression"] in (1, 2)


def test_expected_improvement_is_the_published_formula() -> None:
    """One sample at 0 with height and length 1, by hand."""
    x, y, there = np.array([[0.0]]), np.array([1.0]), np.array([[1.0]])
    k, total = math.exp(-0.5), 1 + NOISE**2
    mean, sigma = k / total, math.sqrt(1 - k * k / total)
    gain = mean - 1 / total - 0.01
    z = gain / sigma
    by_hand = gain * 0.5 * math.erfc(-z / math.sqrt(2)) + sigma * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    assert expected_improvement(there, x, y, 1.0, 1.0)[0] == pytest.approx(by_hand)


def test_the_fitted_kernel_follows_the_length_of_the_function() -> None:
    x = np.arange(0.0, 64.0, 2.0)[:, None]
    long, _ = fit(x, 3 * np.sin(x[:, 0] / 20))
    short, _ = fit(x, 3 * np.sin(x[:, 0] / 2))
    assert long > short


def test_a_flat_job_does_not_break_the_process() -> None:
    sampler = GaussianProcessSampler()
    sampler.begin([BUCKET])
    for _ in range(WARMUP_SAMPLES + SAMPLES_MAX + 1):
        proposed = sampler.propose()
        assert proposed is not None
        sampler.tell(proposed, 1e8)
    assert sampler.propose() is None


def test_tpe_is_optunas_begins_with_the_present_setting_and_takes_twenty_trials() -> None:
    records, history = drive(make_baseline("tpe", CONFIG), 1000, curve)
    assert history[40] == {"bucket_bytes": 25 * MIB}
    done = next(r for r in records if isinstance(r, TunerStatus) and r.state == "watching")
    assert done.step <= 10 + TRIALS * 24
    assert history[-1] == {"bucket_bytes": 8 * MIB}


def test_a_name_that_is_no_baseline_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'pacecar' is not a baseline; choose from gaussian-process, tpe"):
        make_baseline("pacecar", CONFIG)
