"""Scrapes are forecast: a punctual scraper does not wait for the page, and few pages are written in vain."""

import random

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.export.scrape_beat import BEATS_MISSED_MAX, SCRAPERS_MAX, ScrapeBeat

TICK = NS_PER_SECOND
HORIZON = 5 * TICK // 4


def replay(scrapes, *, seconds, seed=1):
    """Return how many scrapes were foreseen by the tick before them, and how many ticks foresaw one.

    `scrapes` are (second, source) in order of time; ticks come once a second, jittered by a tenth.
    """
    chance = random.Random(seed)
    beat, pending = ScrapeBeat(), [(int(at * NS_PER_SECOND), source) for at, source in scrapes]
    foreseen = written = 0
    ticks = [tick * TICK + int(chance.random() * TICK / 10) for tick in range(seconds)]
    for tick, following in zip(ticks, [*ticks[1:], seconds * TICK], strict=True):
        is_due = beat.is_due(tick, tick + HORIZON)
        written += is_due
        while pending and pending[0][0] < following:
            at, source = pending.pop(0)
            foreseen += is_due
            beat.record(source, at)
    return foreseen, written


def steady(period, seconds, *, start=0.4, source="a", jitter=0.005, seed=2):
    chance = random.Random(seed)
    return [(start + n * period + chance.random() * jitter, source) for n in range(int((seconds - start) / period) + 1)]


@pytest.mark.parametrize(("period", "learning"), [(5, 3), (15, 3), (30, 3), (60, 3)])
@pytest.mark.parametrize("start", [0.02, 0.4, 0.97])
def test_a_steady_scraper_is_foreseen_and_hardly_anything_else(period, learning, start):
    scrapes = steady(period, 1200, start=start)
    foreseen, written = replay(scrapes, seconds=1200)
    assert foreseen >= len(scrapes) - learning
    assert written <= 2.5 * len(scrapes)


@pytest.mark.parametrize("period", [0.1, 0.5, 1])
def test_a_scraper_as_fast_as_the_ticks_is_expected_at_each(period):
    scrapes = steady(period, 100)
    foreseen, written = replay(scrapes, seconds=100)
    assert foreseen >= len(scrapes) - max(3, 2 / period)
    assert written >= 95


@pytest.mark.parametrize("offset", [0.3, 2.0, 7.5, 14.0])
def test_two_scrapers_of_one_address_are_told_apart(offset):
    """Two Prometheus of a pair come from the same node, each with its own beat of 15 s."""
    scrapes = sorted(steady(15, 900) + steady(15, 900, start=0.4 + offset, seed=3))
    foreseen, written = replay(scrapes, seconds=900)
    assert foreseen >= len(scrapes) - 6
    assert written <= 4 * len(scrapes)


def test_scrapers_of_two_addresses_do_not_disturb_each_other():
    scrapes = sorted(steady(15, 900) + steady(20, 900, source="b", start=3.3))
    foreseen, written = replay(scrapes, seconds=900)
    assert foreseen >= len(scrapes) - 6
    assert written <= 2.5 * len(scrapes)


def test_people_who_come_at_random_cost_a_few_pages_at_most():
    chance = random.Random(5)
    scrapes = sorted((chance.random() * 3600, "a") for _ in range(60))
    assert replay(scrapes, seconds=3600)[1] <= 3 * len(scrapes)


@pytest.mark.parametrize("period", [0.5, 15])
def test_a_scraper_that_is_gone_is_expected_no_more(period):
    beat = ScrapeBeat()
    for n in range(10):
        beat.record("a", int(n * period * NS_PER_SECOND))
    last = int(9 * period * NS_PER_SECOND)
    gone = last + int((BEATS_MISSED_MAX + 1) * max(period, HORIZON / NS_PER_SECOND) * NS_PER_SECOND)
    assert beat.is_due(last + int(period * NS_PER_SECOND) - TICK // 2, last + int(period * NS_PER_SECOND) + TICK)
    assert not any(beat.is_due(at, at + HORIZON) for at in range(gone, gone + 100 * TICK, TICK))


def test_one_scrape_that_failed_does_not_lose_the_beat():
    scrapes = steady(15, 900)
    del scrapes[20]
    assert replay(scrapes, seconds=900)[0] >= len(scrapes) - 3 - 3


def test_sources_that_come_and_go_are_bounded():
    beat = ScrapeBeat()
    for n in range(1000):
        beat.record(f"10.0.0.{n}", n)
    assert len(beat._times) == SCRAPERS_MAX
