"""Figures: spreads and percentiles are what they say, and no difference is claimed where there is none."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.commands.report import figures
from pacecar.commands.report.figures import (
    LogHistogram,
    Moments,
    block_length,
    coarsened,
    drift_ratio,
    ratio_interval,
    spread_of,
    student_over_normal,
)
from pacecar.commands.report.formatting import elapsed
from pacecar.commands.report.reading.windows import WINDOWS_MAX, WindowSums
from pacecar.run_statistics import WINDOW_STEPS
from tests.kit.selection import decisive

VALUES = st.lists(st.floats(0.001, 1e9), min_size=1, max_size=60)


def neighbours(count: int, generator: random.Random, *, alike: float = 0.7, noise: float = 0.03) -> list[float]:
    """A rate whose windows resemble their neighbours, as on a machine with other work: an AR(1) of the logarithm."""
    values, state = [], generator.gauss(0, noise)
    for _ in range(count):
        state = alike * state + math.sqrt(1 - alike**2) * generator.gauss(0, noise)
        values.append(100 * math.exp(state))
    return values


@pytest.mark.slow
@given(VALUES, VALUES)
def test_moments_of_two_parts_are_those_of_the_whole(first: list[float], second: list[float]) -> None:
    both, one, other = Moments(), Moments(), Moments()
    for value in first:
        one.add(value)
        both.add(value)
    for value in second:
        other.add(value)
        both.add(value)
    one.join(other)
    every = [*first, *second]
    assert one.count == both.count == len(every)
    assert one.mean == pytest.approx(statistics.fmean(every))
    assert one.sd == pytest.approx(statistics.stdev(every), rel=1e-6, abs=1e-6 * max(every))
    assert (one.low, one.high) == (min(every), max(every))


@pytest.mark.slow
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=80), st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_percentiles_of_the_histogram_are_within_their_width(values: list[int], share: float) -> None:
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    ordered = sorted(values)
    exact = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    found = histogram.percentile(share)
    assert found is not None
    # Within half a bin, or where the longest one cuts the middle of its bin off.
    assert exact * 0.997 <= found <= exact * 1.003


def test_a_duration_of_zero_is_a_measurement() -> None:
    histogram = LogHistogram()
    histogram.add(0)
    assert histogram.percentile(0.5) == 0.0
    assert LogHistogram().percentile(0.5) is None


@pytest.mark.slow
@given(VALUES)
def test_a_spread_is_in_order(values: list[float]) -> None:
    spread = spread_of(values)
    assert min(values) <= spread.p5 <= spread.p10 <= spread.median <= spread.p90 <= spread.p95 <= max(values)
    assert (spread.sd is None) == (len(values) == 1)


def test_no_values_have_no_spread_drift_or_interval() -> None:
    assert spread_of([]) is None
    assert drift_ratio([1.0, 2.0]) is None
    assert ratio_interval([], [1.0]) is None
    few = ratio_interval([100.0] * 3, [110.0] * 30)
    assert (few.low, few.high) == (None, None)
    assert few.change_ratio == pytest.approx(0.1)


@pytest.mark.slow
@given(VALUES)
def test_joining_windows_keeps_their_mean_between_the_extremes(values: list[float]) -> None:
    joined = coarsened(values, 8)
    assert len(joined) <= 8
    assert min(values) * 0.999 <= min(joined)
    assert max(joined) <= max(values) * 1.001


def test_a_run_does_not_differ_from_itself() -> None:
    rates = neighbours(100, random.Random(1))
    interval = ratio_interval(rates, rates)
    assert interval.change_ratio == 0.0
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low < 0 < interval.high


@pytest.mark.slow
def test_the_same_records_give_the_same_interval() -> None:
    generator = random.Random(3)
    before, after = neighbours(64, generator), neighbours(64, generator)
    assert ratio_interval(before, after) == ratio_interval(before, after)


def drawn_claims(count: int, factor: float, *, alike: float, seed: int, windows: tuple[int, int] = (64, 64)) -> int:
    """How many of `count` pairs of runs have an interval without zero."""
    generator = random.Random(seed)
    claims = 0
    for _ in range(count):
        before = neighbours(windows[0], generator, alike=alike)
        after = [rate * factor for rate in neighbours(windows[1], generator, alike=alike)]
        interval = ratio_interval(before, after, seed=generator.randrange(2**31))
        if interval.low is not None and interval.high is not None:
            claims += not interval.low <= 0 <= interval.high
    return claims


@pytest.mark.slow
@pytest.mark.parametrize("alike", decisive([0.0, 0.8], 0.8))
def test_of_equal_runs_few_intervals_leave_zero_out_even_where_neighbours_are_alike(alike: float) -> None:
    """Of 25 pairs one or two on average, at 95 %; more than five would be one chance in a hundred."""
    assert drawn_claims(25, 1.0, alike=alike, seed=5) <= 5


@pytest.mark.slow
def test_an_interval_of_few_blocks_is_wider_by_students_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws, once taken as estimated: what keeps a short stretch from claiming too often."""
    generator = random.Random(16)
    before, after = (neighbours(windows, generator, alike=0.7) for windows in (16, 200))
    blocks = min(len(side) // block_length(side) for side in (before, after))
    given = ratio_interval(before, after)
    monkeypatch.setattr(figures, "student_over_normal", lambda _: 1.0)
    estimated = ratio_interval(before, after)
    assert given is not None
    assert estimated is not None
    for end in ("low", "high"):
        wide, narrow = (math.log1p(getattr(one, end)) - math.log1p(one.change_ratio) for one in (given, estimated))
        assert wide / narrow == pytest.approx(student_over_normal(blocks - 1))
        assert wide / narrow > 1.1


@pytest.mark.slow
@pytest.mark.full
def test_a_short_stretch_against_a_long_one_differs_as_rarely() -> None:
    """As in a demo: few windows before.  Taken as estimated, 12 of these pairs differ."""
    assert drawn_claims(150, 1.0, alike=0.7, seed=16, windows=(16, 200)) <= 8


def test_blocks_are_longer_the_more_alike_neighbours_are() -> None:
    lengths = [block_length(neighbours(64, random.Random(8), alike=alike)) for alike in (0.0, 0.5, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] <= 4 < lengths[2] < 64
    assert block_length([5.0] * 64) == 1


def test_where_all_windows_are_one_block_no_interval_is_given() -> None:
    slow = [100.0 + number for number in range(64)]
    interval = ratio_interval(slow, [105.0] * 64)
    assert interval.low is None


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)]
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_over_normal(degrees) * 1.959964 == pytest.approx(quantile, rel=0.01)


@pytest.mark.slow
def test_a_difference_of_three_times_the_noise_is_found() -> None:
    assert drawn_claims(20, 1.1, alike=0.5, seed=7) == 20


@settings(max_examples=30)
@given(st.integers(1, 3 * WINDOW_STEPS + 3))
def test_a_window_takes_as_long_as_its_slowest_rank(steps: int) -> None:
    windows = WindowSums()
    for number in range(steps):
        # Ranks take turns in being late: over two steps each takes 300.
        windows.add([100, 200] if number % 2 else [200, 100], 4, None)
    whole = steps // WINDOW_STEPS
    assert windows.tokens is None
    assert windows.rates("tokens") == []
    rates = windows.rates("samples")
    assert len(rates) == max(1, whole)
    if whole:
        assert all(rate == pytest.approx(4 * WINDOW_STEPS * 1e9 / (150 * WINDOW_STEPS)) for rate in rates)
    assert windows.wall_ns <= 150 * steps + 50


def test_windows_are_bounded_and_lose_nothing_when_joined() -> None:
    windows = WindowSums()
    steps = WINDOW_STEPS * (WINDOWS_MAX + 100)
    for _ in range(steps):
        windows.add([1000], 2, 3)
    assert windows.steps_each == 2 * WINDOW_STEPS
    assert len(windows.rates("samples")) == WINDOWS_MAX // 2 + 50
    assert (windows.samples, windows.tokens, windows.wall_ns) == (2 * steps, 3 * steps, 1000 * steps)
    assert set(windows.rates("samples")) == {2e6}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (59.94, "59.9 s"), (59.96, "1 min 0 s"), (119.7, "2 min 0 s"), (3599.6, "1 h 0 min"), (86399.9, "1 d 0 h"),
        (-119.7, "-2 min 0 s"), (0, "0.0 s"),
    ],
)  # fmt: skip
def test_no_minute_has_sixty_seconds(seconds: float, words: str) -> None:
    assert elapsed(seconds * 1e9) == words
