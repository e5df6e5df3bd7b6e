"""Fits the alpha-beta model of a link (cost of a collective = alpha + bytes * beta) to all-reduces in exact windows.

The obvious way, a bandwidth from all bytes over all communication time, says nothing of alpha, and alpha is what small
buckets cost: 0.1 ms or 25 ms (5 ms one way) makes the same ledger with large ones.  But the buckets of a single step
are seldom all of one size.  DDP's first one is 1 MiB by default, and the last one holds what is left.  Two sizes are
two equations in two unknowns, so one window before the first trial gives both.

    periods    [1 MiB]         [25 MiB -----------]
                                  [15 MiB -----------]    overlapping: one period, whose bytes share the link
    equations  1 alpha + 1 MiB beta = 7 ms,    1 alpha + 40 MiB beta = 341 ms

Each is weighed by its duration, so that they count by relative error; alpha counts once in a period as long as the link
is busy without a gap, and more often where latency binds.  The first collective of a backward waits for the last rank,
and never ends early: of several windows its lower quartile counts, of the others the median.  With few windows alpha is
rather too high and small buckets rather too expensive, which is the careful side.  The uncertainty is stated as
`alpha_high_ns`.

Pure.  Left out: how alpha grows with the number of ranks (it does not change in a job), and congestion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

__all__ = [
    "ALPHA_PRIOR_NS",
    "AlphaBetaLink",
    "Period",
    "assumed_link",
    "combine",
    "fit_periods",
    "periods_of",
    "streams_of",
]

ALPHA_PRIOR_NS = 300_000
"""Fixed cost of a bucket before it was measured: between NCCL in a node (30 us) and gloo over TCP (1 ms)."""

ALPHA_RANGE = 30.0
"""An assumed alpha may be that many times as large: 9 ms, as with gloo over a link of 5 ms one way (measured 20 ms at
most); communication over the number of buckets bounds it as well."""

DURATION_ERROR = 0.25
"""One collective's duration is taken to be off by so much (gloo over 1 Gbit/s, same bucket in two windows: 6.9 and 6.9
ms, at 5 ms one way 29.7 and 31.7; on busy cores and with a late rank more)."""

STREAMS_MAX = 8
"""Most collectives at once that are taken for real: gloo has two threads, NCCL one stream a group."""

OVERLAP_MIN = 0.05
"""Share of a collective that another must overlap to run beside it, and not just after it."""

ROUNDS = 3
"""How often a period counts alpha depends on alpha: a few rounds settle it."""


DISTINCT_MIN = 0.1
"""1 - cos^2 of the two columns; below, the sizes are too alike to tell alpha from bytes: with two periods alone it is
reached where one holds about twice the other's bytes."""


@dataclass(frozen=True, slots=True)
class Period:
    """Collectives that overlap each other: start (since the first) and bytes of each, and how long they all took.

    `windows` are how many it was taken from.
    """

    starts_ns: tuple[float, ...]
    sizes: tuple[int, ...]
    duration_ns: float
    windows: int = 1


@dataclass(frozen=True, slots=True)
class AlphaBetaLink:
    """Cost of a collective: alpha + bytes * beta, `streams` at once.  `basis` says where alpha comes from."""

    alpha_ns: float
    ns_per_byte: float
    alpha_high_ns: float
    streams: int
    basis: str

    @property
    def alpha_low_ns(self) -> float:
        """As far below the estimate as `alpha_high_ns` is above, and no less than nothing."""
        return max(0.0, 2 * self.alpha_ns - self.alpha_high_ns)


def streams_of(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many collectives ran at the same time at most."""
    deepest = depth = 0
    edges = [(start, 1) for start, _ in spans] + [(_well_before(span), -1) for span in spans]
    for _, change in sorted(edges):
        depth += change
        deepest = max(deepest, depth)
    return min(max(1, deepest), STREAMS_MAX)


def periods_of(sizes: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Period]:
    """Return the periods of one window; `spans` in order of their beginning, one for each bucket in `sizes`."""
    found: list[Period] = []
    members: list[tuple[int, tuple[int, int]]] = []
    for size, span in zip(sizes, spans, strict=True):
        if members and span[0] >= max(_well_before(member) for _, member in members):
            found.append(_period(members))
            members = []
        members.append((size, span))
    return [*found, _period(members)] if members else found


def _well_before(span: tuple[int, int]) -> float:
    """Return a collective's end for the test of what overlaps it: the next may begin while it is being completed."""
    return span[1] - OVERLAP_MIN * (span[1] - span[0])


def _period(members: Sequence[tuple[int, tuple[int, int]]]) -> Period:
    begun = members[0][1][0]
    return Period(
        starts_ns=tuple(float(start - begun) for _, (start, _) in members),
        sizes=tuple(size for size, _ in members),
        duration_ns=float(max(end for _, (_, end) in members) - begun),
    )


def combine(windows: Sequence[Sequence[Period]]) -> list[Period]:
    """Return the periods of several windows of one setting as those of one, of windows with the same periods."""
    alike: dict[tuple[tuple[int, ...], ...], list[Sequence[Period]]] = {}
    for window in windows:
        alike.setdefault(tuple(period.sizes for period in window), []).append(window)
    combined: list[Period] = []
    for members in alike.values():
        for i, same in enumerate(zip(*members, strict=True)):
            durations = sorted(period.duration_ns for period in same)
            duration = durations[len(durations) // 4] if i == 0 else median(durations)
            combined.append(replace(same[0], duration_ns=duration, windows=len(same)))
    return combined


def fit_periods(periods: Sequence[Period], streams: int) -> AlphaBetaLink | None:
    """Fit both by least squares of relative errors; None where periods do not tell alpha from bytes."""
    usable = [period for period in periods if period.duration_ns > 0 and sum(period.sizes) > 0]
    counts = [1.0] * len(usable)
    alpha = ns_per_byte = error = 0.0
    for _ in range(ROUNDS):
        solved = _solve(usable, counts)
        if solved is None:
            return None
        alpha, ns_per_byte, error = solved
        if alpha > 0:
            counts = [_count(period, alpha, ns_per_byte) for period in usable]
    return AlphaBetaLink(alpha, ns_per_byte, alpha + error, streams, "measured")


def assumed_link(communication_ns: float, count: float, total_bytes: int, streams: int = 1) -> AlphaBetaLink:
    """Return a link from one ledger: all bytes in that time, and the prior for alpha."""
    bound = communication_ns / max(1.0, count)
    alpha = min(float(ALPHA_PRIOR_NS), bound / 2)
    ns_per_byte = (communication_ns - count * alpha) / total_bytes
    return AlphaBetaLink(alpha, ns_per_byte, min(bound, ALPHA_RANGE * ALPHA_PRIOR_NS), streams, "assumed")


def _count(period: Period, alpha: float, ns_per_byte: float) -> float:
    """Return how often alpha counts in the period's duration, without what passes under other collectives' bytes."""
    link_free = 0.0
    for start, size in zip(period.starts_ns, period.sizes, strict=True):
        link_free = max(link_free, start + alpha) + size * ns_per_byte
    waited = link_free - sum(period.sizes) * ns_per_byte
    return min(float(len(period.sizes)), max(1.0, waited / alpha))


def _solve(periods: Sequence[Period], counts: Sequence[float]) -> tuple[float, float, float] | None:
    """Return alpha and beta, neither negative, and alpha's standard error; None without two independent equations.

    `counts` says how often alpha counts in each period.
    """
    rows = [
        (p.windows, count / p.duration_ns, sum(p.sizes) / p.duration_ns)
        for p, count in zip(periods, counts, strict=True)
    ]
    aa, bb = math.fsum(w * a * a for w, a, _ in rows), math.fsum(w * b * b for w, _, b in rows)
    ab = math.fsum(w * a * b for w, a, b in rows)
    determinant = aa * bb - ab * ab
    if not rows or determinant <= DISTINCT_MIN * aa * bb:
        return None
    a_sum, b_sum = math.fsum(w * a for w, a, _ in rows), math.fsum(w * b for w, _, b in rows)
    alpha, beta = (a_sum * bb - b_sum * ab) / determinant, (b_sum * aa - a_sum * ab) / determinant
    error = DURATION_ERROR * math.sqrt(bb / determinant)
    if alpha < 0:  # small ones may be quicker than their bytes would be (buffers, a token bucket): the large ones count
        return 0.0, math.fsum(p.duration_ns for p in periods) / math.fsum(sum(p.sizes) for p in periods), error
    if beta < 0:
        return a_sum / aa, 0.0, error
    return alpha, beta, error
