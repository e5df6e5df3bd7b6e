"""Fits the alpha-beta model of a link (cost of a collective = alpha + bytes * beta) to all-reduces in exact windows.

A bandwidth from all bytes over all communication time does not give alpha, which is what small buckets cost: 0.1 ms or
25 ms (5 ms one way) makes the same ledger with large buckets.  But the buckets of one step are rarely of one size:
DDP's first is 1 MiB by default, and the last holds the rest.  Two sizes are two equations in two unknowns, so one
window before the first trial gives both.

    periods    [1 MiB]         [25 MiB -----------]
                                  [15 MiB -----------]    overlapping: one period, whose bytes share the link
    equations  1 alpha + 1 MiB beta = 7 ms,    1 alpha + 40 MiB beta = 341 ms

Each equation is weighted by its duration, so that relative errors count.  Alpha counts once in a period while the link
is busy without a gap, and more often if latency binds.  The first collective of a backward waits for the last rank and
never ends early, so of several windows its lower quartile counts; of the others the median.  With few windows alpha is
rather too high and small buckets rather too expensive, which is the safe side; `alpha_high_ns` states the uncertainty.

Pure.  Left out: how alpha grows with the number of ranks (constant in a job), and congestion.
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
"""An assumed alpha may be this many times as large: 9 ms, as with gloo over a link of 5 ms one way (20 ms at most).
Communication time over the number of buckets bounds it as well."""

DURATION_ERROR = 0.25
"""Assumed relative error of one collective's duration (gloo over 1 Gbit/s, one bucket in two windows: 6.9 and 6.9 ms,
at 5 ms one way 29.7 and 31.7; more on busy cores and with a late rank)."""

STREAMS_MAX = 8
"""Most collectives at once: gloo has two threads, NCCL one stream a group."""

OVERLAP_MIN = 0.05
"""Share of a collective that another must overlap to count as simultaneous."""

ROUNDS = 3
"""How often a period counts alpha depends on alpha: a few rounds settle it."""


DISTINCT_MIN = 0.1
"""1 - cos^2 of the two columns; below it the sizes are too alike to tell alpha from bytes.  Two periods reach it if one
holds about twice the other's bytes."""


@dataclass(frozen=True, slots=True)
class Period:
    """Collectives that overlap: start (since the first) and bytes of each, and how long they took together.

    `windows` is the number of windows that it comes from.
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
        """As far below the estimate as `alpha_high_ns` is above it, but not negative."""
        return max(0.0, 2 * self.alpha_ns - self.alpha_high_ns)


def streams_of(spans: Sequence[tuple[int, int]]) -> int:
    """Return the largest number of collectives that ran at the same time."""
    deepest = depth = 0
    edges = [(start, 1) for start, _ in spans] + [(_well_before(span), -1) for span in spans]
    for _, change in sorted(edges):
        depth += change
        deepest = max(deepest, depth)
    return min(max(1, deepest), STREAMS_MAX)


def periods_of(sizes: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Period]:
    """Return the periods of one window; `spans` in order of their start, one for each bucket in `sizes`."""
    found: list[Period] = []
    members: list[tuple[int, tuple[int, int]]] = []
    for size, span in zip(sizes, spans, strict=True):
        if members and span[0] >= max(_well_before(member) for _, member in members):
            found.append(_period(members))
            members = []
        members.append((size, span))
    return [*found, _period(members)] if members else found


def _well_before(span: tuple[int, int]) -> float:
    """Return a collective's end for the overlap test: the next may begin while it completes."""
    return span[1] - OVERLAP_MIN * (span[1] - span[0])


def _period(members: Sequence[tuple[int, tuple[int, int]]]) -> Period:
    begun = members[0][1][0]
    return Period(
        starts_ns=tuple(float(start - begun) for _, (start, _) in members),
        sizes=tuple(size for size, _ in members),
        duration_ns=float(max(end for _, (_, end) in members) - begun),
    )


def combine(windows: Sequence[Sequence[Period]]) -> list[Period]:
    """Combine the periods of several windows of one setting; windows with the same periods become one."""
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
    """Fit alpha and beta by least squares of relative errors; None if the periods do not tell them apart."""
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
    """Return a link from one ledger: all bytes in the communication time, and the prior for alpha."""
    bound = communication_ns / max(1.0, count)
    alpha = min(float(ALPHA_PRIOR_NS), bound / 2)
    ns_per_byte = (communication_ns - count * alpha) / total_bytes
    return AlphaBetaLink(alpha, ns_per_byte, min(bound, ALPHA_RANGE * ALPHA_PRIOR_NS), streams, "assumed")


def _count(period: Period, alpha: float, ns_per_byte: float) -> float:
    """Return how often alpha counts in the period, leaving out alphas hidden under other collectives' bytes."""
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
    if alpha < 0:  # small ones may beat the bandwidth (buffers, a token bucket): the large ones count
        return 0.0, math.fsum(p.duration_ns for p in periods) / math.fsum(sum(p.sizes) for p in periods), error
    if beta < 0:
        return a_sum / aa, 0.0, error
    return alpha, beta, error
