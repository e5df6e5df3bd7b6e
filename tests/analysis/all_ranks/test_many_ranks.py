"""What is done for each rank does not grow with the number of ranks."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from pacecar.analysis.align.collective_matching import Events, Matched
from pacecar.analysis.all_ranks.model_input import _joins
from pacecar.analysis.trace.columns import CollectiveColumns
from tests.analysis.built import build

ROWS = 2**18


def seconds(ranks: int) -> float:
    """Return how long a group of so many ranks takes that has ROWS rows in all."""
    each = np.arange(ROWS // ranks)
    meta = CollectiveColumns(operation="all_reduce", bytes=8, dtype="Float", group="0", group_size=ranks)
    lines = np.tile(each[:, None], (1, ranks))
    metas = (meta,) * len(each)
    group = Matched("0", ranks, False, None, tuple(range(ranks)), metas, lines, lines * 1000, lines * 1000 + 500)
    events = [Events(each, each, each, each, metas, each + place) for place in range(ranks)]
    nothing = build()
    traces = [replace(nothing, rank=rank) for rank in range(ranks)]
    begin = time.process_time()
    joins = _joins(traces, [group], events, ["host"] * ranks)
    took = time.process_time() - begin
    assert np.array_equal(joins.row, (lines + np.arange(ranks)).reshape(-1))
    return took


@pytest.mark.slow
def test_the_rows_of_a_group_take_as_long_with_many_ranks_as_with_few() -> None:
    few = min(seconds(2**6) for _ in range(3))
    many = min(seconds(2**12) for _ in range(3))
    assert many < 5 * few
