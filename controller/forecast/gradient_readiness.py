"""Estimates when gradients become ready during backward, from the starts of all-reduces in exact windows.

Time does not follow bytes: the gradient of an embedding is ready at once and large, a convolution computes for long
over few bytes.  An all-reduce starts as soon as its bucket is full, unless all streams are taken:

    streams      [b0]    [b1 --------][b2 ------]      b0 and b1 found a free stream: they were ready when they started
    ready        ^       ^        ^                    b2 queued: it was ready by then, perhaps long before

So the starts that did not queue are points of the curve, and those that did are upper bounds.  Between points, time is
taken to pass with the bytes.  All bytes are ready when backward ends.

Bytes and times are shares, of all gradients and of backward.  Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import median

from pacecar.records import BackwardWindow

__all__ = ["EVEN", "ReadinessCurve", "fit_readiness", "ready_ns"]

ReadinessCurve = tuple[tuple[float, float], ...]
"""Pairs of (share of the bytes, share of backward after which they are ready), both ascending from 0 to 1."""

EVEN: ReadinessCurve = ((0.0, 0.0), (1.0, 1.0))
"""Bytes and time in proportion: nothing was seen."""

QUEUED_SHARE = 0.01
"""An all-reduce that starts within this share of backward after a stream became free may have queued."""


def fit_readiness(windows: Iterable[tuple[Sequence[int], BackwardWindow]], streams: int) -> ReadinessCurve:
    """Return the curve that fits all windows, each given with the bytes of its buckets in order.

    `streams` is how many all-reduces run at once.  Windows must have one all-reduce for each bucket.
    """
    points: dict[float, list[float]] = {}
    bounds: dict[float, float] = {}
    for sizes, window in windows:
        total, ends = sum(sizes), [end for _, end in window.reduces]
        for i, filled in enumerate(accumulate(sizes)):
            if i == len(sizes) - 1:  # the end of backward
                break
            start = window.reduces[i][0]
            free = sorted(ends[:i])[i - streams] if i >= streams else None
            has_queued = free is not None and start - free < QUEUED_SHARE * window.work_ns
            ready = min(1.0, max(0.0, start / window.work_ns))
            if has_queued:
                bounds[filled / total] = min(ready, bounds.get(filled / total, 1.0))
            else:
                points.setdefault(filled / total, []).append(ready)
    curve = _ascending([*EVEN, *((x, median(seen)) for x, seen in points.items())])
    for x, bound in sorted(bounds.items()):
        if ready_at(curve, x) > bound:
            curve = _ascending([*((at, min(y, bound) if at < x else y) for at, y in curve if at != x), (x, bound)])
    return curve


def ready_at(curve: ReadinessCurve, share: float) -> float:
    """Return after which share of backward that share of the bytes is ready."""
    after = min(max(1, bisect_left(curve, (share,))), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[after - 1], curve[after]
    return y0 if x1 <= x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)


def ready_ns(curve: ReadinessCurve, buckets: Sequence[int], backward_ns: float) -> tuple[float, ...]:
    """Return when each of these buckets, sizes in bytes, is full, in nanoseconds since backward began."""
    total = sum(buckets)
    return tuple(backward_ns * ready_at(curve, filled / total) for filled in accumulate(buckets))


def _ascending(points: Sequence[tuple[float, float]]) -> ReadinessCurve:
    """Return the points by bytes; neighbours whose times descend are pooled (isotonic regression)."""
    pools: list[tuple[list[float], float]] = []  # bytes of the members, their mean time
    for x, y in sorted(points):
        members, level = [x], y
        while pools and pools[-1][1] > level:
            before, other = pools.pop()
            level = (level * len(members) + other * len(before)) / (len(members) + len(before))
            members = [*before, *members]
        pools.append((members, level))
    return tuple((x, level) for members, level in pools for x in members)
