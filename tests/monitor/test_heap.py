"""The daemon collects its own garbage now and then, but not at every tick."""

import gc
import weakref

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.heap_trimming import TIDY_SECONDS, HeapTrimming


class Knot:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.mark.slow
def test_cycles_are_collected_when_it_is_time_and_not_before() -> None:
    heap = HeapTrimming()
    gc.disable()
    try:
        assert heap.tick(0)
        left = weakref.ref(Knot())
        assert not heap.tick(TIDY_SECONDS * NS_PER_SECOND - 1)
        assert left() is not None
        assert heap.tick(TIDY_SECONDS * NS_PER_SECOND)
        assert left() is None
    finally:
        gc.enable()
