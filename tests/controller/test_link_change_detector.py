"""A changed link is told from a noisy one by its windows, even if the pace does not show it."""

from __future__ import annotations

import math
import random

import pytest

from pacecar.controller.observation import Observation
from pacecar.controller.policy.change_detector import CONFIRM_WINDOWS, REFERENCE_MIN, LinkChangeDetector
from pacecar.records import BackwardWindow, Ledger
from tests.kit.selection import reduced

MS = 1_000_000
USUAL_MS = (7.0, 210.0, 120.0)
VALUES = {"bucket_bytes": 25}


def _window(durations_ms: tuple[float, ...], step: int = 1) -> Observation:
    spans, begin = [], 0
    for duration in durations_ms:
        spans.append((begin, begin + round(duration * MS)))
        begin += round(duration * MS)
    ledger = Ledger(wall_ns=max(1, begin), compute_ns=max(1, begin))
    backward = BackwardWindow(work_ns=begin, reduces=tuple(spans))
    return Observation(step, 1, dict(VALUES), max(1, begin), True, ledger, True, backward=backward)


def _scaled(factor: float) -> Observation:
    return _window(tuple(duration * factor for duration in USUAL_MS))


def _settled() -> LinkChangeDetector:
    watch = LinkChangeDetector()
    for _ in range(REFERENCE_MIN):
        assert watch.observe(VALUES, _scaled(1.0)) is None
    return watch


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_changed_link_is_told_after_three_windows_and_by_how_much(factor: float) -> None:
    watch = _settled()
    told = [watch.observe(VALUES, _scaled(factor)) for _ in range(CONFIRM_WINDOWS)]
    assert told[:-1] == [None] * (CONFIRM_WINDOWS - 1)
    assert told[-1] == pytest.approx(factor)
    assert all(watch.observe(VALUES, _scaled(factor)) is None for _ in range(20)), "it is the usual from now on"


def test_it_is_suspicious_from_the_first_window_on_until_one_is_as_usual() -> None:
    watch = _settled()
    assert not watch.is_suspicious
    watch.observe(VALUES, _scaled(3.0))
    assert watch.is_suspicious
    watch.observe(VALUES, _scaled(1.0))
    assert not watch.is_suspicious
    assert [watch.observe(VALUES, _scaled(3.0)) for _ in range(CONFIRM_WINDOWS - 1)] == [None] * (CONFIRM_WINDOWS - 1)


def test_windows_that_disagree_about_the_direction_prove_nothing() -> None:
    watch = _settled()
    assert all(watch.observe(VALUES, _scaled((0.3, 3.0)[i % 2])) is None for i in range(12))


def test_a_late_rank_that_the_first_bucket_waits_for_is_not_the_link() -> None:
    watch = _settled()
    late = _window((USUAL_MS[0] + 90.0, *USUAL_MS[1:]))
    assert all(watch.observe(VALUES, late) is None for _ in range(12))
    assert not watch.is_suspicious


def test_a_dearer_bucket_is_seen_where_buckets_are_small() -> None:
    """Alpha from 1 to 11 ms; 4 ms of each bucket are bytes."""
    watch = LinkChangeDetector()
    for _ in range(REFERENCE_MIN):
        watch.observe(VALUES, _window((5.0,) * 40))
    told = [watch.observe(VALUES, _window((15.0,) * 40)) for _ in range(CONFIRM_WINDOWS)]
    assert told[-1] == pytest.approx(3.0)


def test_other_values_or_buckets_are_another_reference() -> None:
    watch = _settled()
    other = {"bucket_bytes": 1}
    assert all(watch.observe(other, _scaled(0.2)) is None for _ in range(REFERENCE_MIN + 5))
    watch = _settled()
    assert all(watch.observe(VALUES, _window((60.0, 60.0))) is None for _ in range(REFERENCE_MIN + 5))


def test_windows_that_tell_nothing_are_passed_over() -> None:
    watch = _settled()
    silent = Observation(1, 1, dict(VALUES), 1, True, None, False)
    watch.observe(VALUES, _scaled(3.0))
    for empty in (silent, _window(()), _window((0.0, 210.0, 120.0))):
        assert watch.observe(VALUES, empty) is None
    assert watch.is_suspicious, "they are no evidence that it is as usual either"


def test_a_link_that_drifts_is_followed() -> None:
    watch = _settled()
    assert all(watch.observe(VALUES, _scaled(1.01**i)) is None for i in range(200))


@pytest.mark.slow
def test_loud_windows_raise_no_alarm() -> None:
    """Durations that differ by a quarter from bucket to bucket and by a fifth from window to window, 200 jobs."""
    alarms = windows = 0
    for seed in range(reduced(200)):
        draw, watch = random.Random(seed), LinkChangeDetector()
        for _ in range(200):
            common = draw.gauss(0.0, 0.2)
            durations = [d * math.exp(common + draw.gauss(0.0, 0.25)) for d in (7.0, *(40.0,) * 8)]
            alarms += watch.observe(VALUES, _window(tuple(durations))) is not None
            windows += 1
    assert alarms <= windows / 10_000, f"{alarms} alarms in {windows} windows"


def test_a_change_is_found_among_loud_windows() -> None:
    """A link four times as fast under the same noise: seen within ten windows by nearly every job."""
    seen = 0
    for seed in range(100):
        draw, watch = random.Random(seed), LinkChangeDetector()
        for i in range(20):
            scale = 40.0 if i < 10 else 10.0
            durations = [scale * math.exp(draw.gauss(0.0, 0.25)) for _ in range(8)]
            if watch.observe(VALUES, _window(tuple(durations))) is not None:
                seen += i >= 10
                break
    assert seen >= 95
