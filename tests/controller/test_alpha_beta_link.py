"""Alpha and beta are recovered from simulated and real windows, and unknown values are reported as unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.controller.forecast.alpha_beta_link import (
    ALPHA_PRIOR_NS,
    assumed_link,
    combine,
    fit_periods,
    periods_of,
    streams_of,
)
from pacecar.controller.forecast.bucket_model import pack_buckets, play

MIB = 2**20
MS = 1_000_000
FORTY = (MIB,) * 40  # the job of 10.5 M parameters
DEFAULT = pack_buckets(FORTY, 25 * MIB, MIB)

# Begin and end of each gloo all-reduce, ns from the step's start, as a window saw them on a shaped link of two ranks.
AT_0_MS = [(117_304_215, 124_214_815), (275_548_063, 616_459_441), (361_749_628, 608_490_687)]
AT_5_MS = [(112_800_000, 144_500_000), (250_100_000, 668_700_000), (337_600_000, 607_400_000)]
DEEP_AT_5_MS = [
    (214_100_000, 243_800_000),
    (349_300_000, 777_600_000),
    (484_800_000, 932_000_000),
    (777_700_000, 1_167_900_000),
]


def _spans(sizes: list[int], alpha: float, ns_per_byte: float, streams: int = 1) -> list[tuple[int, int]]:
    played = play(sizes, 200 * MS, alpha, ns_per_byte, streams)
    return [(round(begin), round(end)) for begin, end in played.spans]


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(("alpha", "ns_per_byte"), [(0.3 * MS, 8.0), (20 * MS, 9.0), (5 * MS, 1.5)])
def test_one_window_with_a_small_first_bucket_tells_alpha_and_beta(
    alpha: float, ns_per_byte: float, streams: int
) -> None:
    spans = _spans(DEFAULT, alpha, ns_per_byte, streams)
    link = fit_periods(periods_of(DEFAULT, spans), streams_of(spans))
    assert link.alpha_ns == pytest.approx(alpha, rel=0.05, abs=1000)
    assert link.ns_per_byte == pytest.approx(ns_per_byte, rel=0.02)
    assert link.alpha_low_ns <= link.alpha_ns <= link.alpha_high_ns


def test_gloo_at_one_gigabit_has_no_latency_to_speak_of_and_its_bandwidth() -> None:
    link = fit_periods(periods_of(DEFAULT, AT_0_MS), streams_of(AT_0_MS))
    assert link.streams == 2
    assert link.alpha_ns < MS
    assert 1e9 / link.ns_per_byte == pytest.approx(119e6, rel=0.03)  # 0.95 Gbit/s


def test_gloo_at_five_milliseconds_pays_two_round_trips_for_a_bucket() -> None:
    deep = pack_buckets((266_668,) * 300, 25 * MIB, MIB)
    links = [
        fit_periods(periods_of(sizes, spans), streams_of(spans))
        for sizes, spans in ((DEFAULT, AT_5_MS), (deep, DEEP_AT_5_MS))
    ]
    alphas = [link.alpha_ns for link in links if link is not None]
    assert len(alphas) == 2
    assert all(18 * MS < alpha < 23 * MS for alpha in alphas)


def test_buckets_of_one_size_tell_no_alpha() -> None:
    sizes = [8 * MIB] * 5
    assert fit_periods(periods_of(sizes, _spans(sizes, MS, 8.0)), 1) is None
    assert fit_periods([], 1) is None


def test_a_late_rank_in_one_window_of_four_leaves_alpha_alone() -> None:
    spans = _spans(DEFAULT, MS, 8.0)
    late = [(spans[0][0], spans[0][1] + 30 * MS), *spans[1:]]
    windows = [periods_of(DEFAULT, one) for one in (spans, late, spans, spans)]
    link, misled = fit_periods(combine(windows), 1), fit_periods(combine(windows[1:2]), 1)
    assert misled is not None
    assert link.alpha_ns == pytest.approx(MS, rel=0.05)
    assert misled.alpha_ns > 20 * MS, "rather too dear: the careful side"


def test_more_windows_make_alpha_surer() -> None:
    window = periods_of(DEFAULT, _spans(DEFAULT, MS, 8.0))
    one, four = (fit_periods(combine([window] * n), 1) for n in (1, 4))
    assert four.alpha_high_ns - four.alpha_ns == pytest.approx((one.alpha_high_ns - one.alpha_ns) / 2)


def test_a_collective_that_begins_while_the_last_is_cleared_away_runs_after_it() -> None:
    assert streams_of([(0, 100), (97, 200), (198, 300)]) == 1
    assert streams_of([(0, 100), (50, 200)]) == 2
    assert len(periods_of([1, 1, 1], [(0, 100), (97, 200), (198, 300)])) == 3


def test_without_single_collectives_alpha_is_a_guess_that_may_be_far_too_low() -> None:
    link = assumed_link(400 * MS, 3, 42 * MIB)
    assert link.alpha_ns == ALPHA_PRIOR_NS
    assert link.alpha_high_ns > 10 * ALPHA_PRIOR_NS
    assert 3 * link.alpha_ns + 42 * MIB * link.ns_per_byte == pytest.approx(400 * MS)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20),
)
def test_whatever_a_window_says_nothing_is_negative(told: list[tuple[int, int, int]]) -> None:
    spans = sorted((begin, begin + took) for _, begin, took in told)
    link = fit_periods(periods_of([size for size, _, _ in told], spans), streams_of(spans))
    if link is not None:
        assert 0 <= link.alpha_low_ns <= link.alpha_ns <= link.alpha_high_ns
        assert link.ns_per_byte >= 0
