"""Collections are timed where they happen, once, and the interpreter is left as it was."""

from __future__ import annotations

import gc

import pytest

from pacecar.profiler.timing.garbage_collections import LONG_NS_MIN, GarbageCollections


class Clock:
    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def collections(clock):
    found = GarbageCollections(clock)
    before = list(gc.callbacks)
    found.start()
    yield found
    found.close()
    found.close()
    assert gc.callbacks == before


def collect(collections, clock, start, end):
    for clock.now, phase in ((start, "start"), (end, "stop")):
        collections.collects(phase, {})


def test_what_a_step_lost_to_collections_is_the_part_within_it(collections, clock):
    long = 10 * LONG_NS_MIN
    collect(collections, clock, long, 2 * long)
    collect(collections, clock, 4 * long, 6 * long)
    collect(collections, clock, 7 * long, 7 * long + 1)
    assert collections.within(0, 3 * long) == long
    assert collections.within(3 * long, 5 * long) == long
    assert collections.within(5 * long, 9 * long) == long, "one that is short is only in the total"
    assert collections.within(9 * long, 10 * long) == 0
    assert collections.total_ns == 3 * long + 1


def test_a_collection_that_began_before_it_was_timed_is_left_out(collections, clock):
    clock.now = 5
    collections.collects("stop", {})
    assert (collections.total_ns, collections.take_cost_ns()) == (0, 0)


def test_each_collection_is_charged_once(collections, clock):
    for number in range(1000):
        collect(collections, clock, number, number)
    cost = collections.take_cost_ns()
    assert 0 < cost < 1000 * 100_000
    assert collections.take_cost_ns() == 0


@pytest.mark.slow
def test_real_collections_of_this_process_are_seen():
    collections = GarbageCollections()
    assert (collections.total_ns, collections.within(0, 1)) == (None, None), "not timed is not zero"
    collections.start()
    gc.collect()
    assert collections.total_ns > 0
    before = collections.total_ns
    collections.close()
    gc.collect()
    assert collections.total_ns == before
