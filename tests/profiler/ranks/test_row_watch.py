"""The estimate of rows is no less than there are, and exact where steps are as before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.profiler.ranks.cross_rank.row_watch import RECORDED_NS, SLOWED_ROW_NS, RowWatch

ROWS, STEP_NS = 1000, 50_000_000


class Processor:
    """The processor time of a thread."""

    def __init__(self) -> None:
        self.ns = 7

    def __call__(self) -> int:
        return self.ns


def begun(*lengths: int, rows: int = ROWS) -> tuple[RowWatch, Processor]:
    clock = Processor()
    watch = RowWatch(rows, clock)
    watch.passed()
    for length in lengths:
        clock.ns += length
        watch.passed()
    if lengths:
        watch.begin()
    return watch, clock


def test_steps_as_before_have_the_counted_rows() -> None:
    watch, clock = begun(STEP_NS, STEP_NS)
    for steps in range(1, 7):
        clock.ns += STEP_NS + SLOWED_ROW_NS * ROWS
        assert watch.rows(steps) == steps * ROWS


def test_without_a_step_before_it_is_not_ready() -> None:
    watch, clock = begun()
    assert not watch.is_ready
    clock.ns += STEP_NS
    watch.passed()
    assert watch.is_ready


@pytest.mark.slow
@given(
    steps=st.integers(1, 6),
    more=st.integers(0, 10**6),
    row_ns=st.integers(RECORDED_NS, 100 * RECORDED_NS),
    counted=st.integers(0, 10**5),
)
def test_more_rows_are_never_underestimated(steps: int, more: int, row_ns: int, counted: int) -> None:
    watch, clock = begun(STEP_NS, rows=counted)
    clock.ns += steps * (STEP_NS + SLOWED_ROW_NS * counted) + more * row_ns
    assert steps * counted + more <= watch.rows(steps) <= steps * counted + more * row_ns // RECORDED_NS


def test_fewer_rows_than_counted_are_not_expected() -> None:
    watch, clock = begun(STEP_NS)
    clock.ns += STEP_NS // 2
    assert watch.rows(1) == ROWS
