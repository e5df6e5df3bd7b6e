"""When gradients are ready is read from the all-reduces that did not queue; those that did only bound it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.controller.forecast.bucket_model import play
from pacecar.controller.forecast.gradient_readiness import EVEN, fit_readiness, ready_ns
from pacecar.records import BackwardWindow

WORK_NS = 1_000_000
BUCKETS = (10, 20, 20, 50)
LATE = ((0.0, 0.0), (0.1, 0.5), (1.0, 1.0))
"""The first tenth of the bytes takes half of backward."""


def _window(true, ns_per_byte: float, buckets=BUCKETS, *, streams: int = 1) -> BackwardWindow:
    played = play(buckets, WORK_NS, 0.0, ns_per_byte, streams, true)
    return BackwardWindow(work_ns=WORK_NS, reduces=tuple((round(a), round(b)) for a, b in played.spans))


def test_nothing_seen_spreads_the_gradients_by_their_bytes() -> None:
    assert fit_readiness([], 1) == EVEN
    assert ready_ns(EVEN, BUCKETS, 100.0) == pytest.approx((10, 30, 50, 100))


def test_all_reduces_that_did_not_queue_are_points_of_the_curve() -> None:
    curve = fit_readiness([(BUCKETS, _window(LATE, 1.0))], 1)
    assert ready_ns(curve, BUCKETS, WORK_NS) == pytest.approx(ready_ns(LATE, BUCKETS, WORK_NS), rel=1e-3)


def test_all_reduces_that_queued_bound_it_from_above() -> None:
    """The second and third wait for a slow link: the third starts when 0.05 + 2 x 0.2 of backward have passed."""
    early = ((0.0, 0.0), (0.5, 0.05), (1.0, 1.0))
    curve = fit_readiness([(BUCKETS, _window(early, 1e4))], 1)
    found, true = ready_ns(curve, BUCKETS, WORK_NS), ready_ns(early, BUCKETS, WORK_NS)
    assert found[0] == pytest.approx(true[0], rel=1e-3)
    assert true[1] < found[1] <= 0.15 * WORK_NS
    assert true[2] < found[2] <= 0.35 * WORK_NS
    assert found[3] == WORK_NS


def test_a_second_size_of_buckets_tells_more() -> None:
    early = ((0.0, 0.0), (0.5, 0.05), (1.0, 1.0))
    finer = (5,) * 20
    windows = [(BUCKETS, _window(early, 1e4)), (finer, _window(early, 1e2, finer))]
    curve = fit_readiness(windows, 1)
    assert ready_ns(curve, finer, WORK_NS) == pytest.approx(ready_ns(early, finer, WORK_NS), abs=0.03 * WORK_NS)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 100), min_size=1, max_size=6),
            st.lists(st.integers(0, 2 * WORK_NS), min_size=6, max_size=6),
        ),
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_whatever_windows_show_the_curve_ascends_from_nothing_to_all(seen, streams: int) -> None:
    windows = [
        (sizes, BackwardWindow(work_ns=WORK_NS, reduces=tuple((a, a + 10) for a in sorted(starts)[: len(sizes)])))
        for sizes, starts in seen
    ]
    curve = fit_readiness(windows, streams)
    assert (curve[0], curve[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(curve))
