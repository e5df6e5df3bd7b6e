"""Unions of intervals are exact set algebra: compared with sets of nanoseconds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.ledger.intervals import clip, intervals, length, subtract, total, union

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=10).map(intervals)


def instants(rows):
    return {n for start, end in rows.tolist() for n in range(start, end)}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(pairs, pairs)
def test_union_subtract_clip_and_length_are_set_algebra(a, b):
    one, other = union(a), union(b)
    assert instants(one) == instants(a)
    assert length(one) == len(instants(a))
    assert (one[1:, 0] > one[:-1, 1]).all(), "disjoint, and touching rows are one"
    assert instants(subtract(one, other)) == instants(a) - instants(b)
    assert instants(clip(a, 10, 30)) == instants(a) & set(range(10, 30))


def test_empty_and_backward_pairs_are_no_intervals():
    assert intervals([(5, 5), (9, 3)]).tolist() == []
    assert length(union(intervals([]))) == 0


@pytest.mark.slow
@given(st.lists(st.integers(0, 1 << 62), max_size=12))
def test_a_sum_of_durations_is_exact_beyond_64_bits(durations):
    assert total(np.array(durations, dtype=np.int64)) == sum(durations)
