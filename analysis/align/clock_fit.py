"""Estimates offset and drift of every clock against all others, from the ends of all collectives at once.

Ranks leave a collective nearly together, so its ends on two hosts show how far their clocks are apart.  Fitting one
pair of hosts at a time would waste most of the data and make one host the reference for all.  Here all ends are fitted
at once: the end of collective c on clock h is

    end[c, h] + offset[h] + drift[h] * (end[c, h] - middle[h]) = T[c] + noise

T[c] is eliminated, and the rest is least squares with Huber's weights (P. Huber, Robust Estimation of a Location
Parameter, 1964), so that ranks that wake late count little.  Standard errors are those of the sandwich estimator with
the collective as cluster, times `SMALL_SAMPLE_FACTOR`.  A link that always makes one host leave
late looks like a clock that is ahead, except that its residuals are skewed: so the squared distance between their Huber
mean and their mode is added to the variance.

Pure: arrays in, arrays out.  Left out: which clocks are one (the caller numbers them), and which rows are one
collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ClockFit", "Meetings", "RankClockCorrection", "fit_clocks"]

HUBER_K = 1.345
"""In scales of the noise: 95 % efficient if the noise is normal (Huber 1964)."""

ROUNDS_MAX = 30
"""Rounds of reweighting; 5 to 10 are enough."""

CONVERGED_NS = 1.0

DRIFT_PRIOR_RATIO = 50e-6
"""Prior for drifts: quartz is within 50 parts in a million, a disciplined clock within 5."""

SMALL_SAMPLE_FACTOR = 1.12
"""Corrects sandwich errors in small samples: 95 % intervals then covered 93 to 99 % of simulated offsets."""

SCALE_NS_MIN = 100.0
"""The least noise assumed: time stamps are whole microseconds in older traces and jump by tens of ns in newer."""

RESOLUTION_NS = 100.0
"""No offset is known better than this: ranks leave a collective one after the other, always in the same order."""

LABEL_SAMPLES_MIN = 8
"""The fewest ends that give a scatter for one operation in one group."""

SKEW_SAMPLES_MIN = 6
"""The fewest residuals that give a mode."""

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankClockCorrection:
    """A trace's time t is t + `offset_ns` + `drift` * (t - `middle_ns`) on the common clock."""

    offset_ns: float
    drift: float = 0.0
    middle_ns: int = 0

    def common(self, times: Index) -> Index:
        """Return these times on the common clock."""
        if self.drift == 0.0:
            return times + round(self.offset_ns)
        moved: Index = times + np.rint(self.offset_ns + self.drift * (times - self.middle_ns)).astype(np.int64)
        return moved


@dataclass(frozen=True, slots=True)
class Meetings:
    """The ends of collectives as the clocks show them: n of them.

    `meeting` numbers collectives, `clock` clocks from 0; `end_ns` is on that clock; `kind` numbers kinds of operations
    whose ends scatter alike (collectives, point-to-point), `label` one operation in one group, which may scatter more
    because some of its ranks are always a little later.
    """

    meeting: Index
    clock: Index
    end_ns: Index
    kind: Index
    label: Index


@dataclass(frozen=True, slots=True)
class ClockFit:
    """The corrections: clock h's time t becomes t + `offset_ns[h]` + `drift[h]` * (t - `middle_ns[h]`).

    `middle_ns` is one instant, the middle of the collectives, as each clock shows it.

    Clocks with one `island` are connected by collectives; offsets of different islands are not comparable.
    `covariance` (h, h) is that of the offsets, `drift_covariance` that of the drifts, both with the terms for skewed
    residuals.  Within an island the corrections of its clocks are zero on average; a difference is what counts.
    """

    offset_ns: Floats
    drift: Floats
    middle_ns: Index
    island: Index
    covariance: Floats
    drift_covariance: Floats
    scale_ns: Floats

    def error_ns(self, a: int, b: int) -> float | None:
        """Return the standard error of the difference of two clocks; None if no collective connects them."""
        if self.island[a] != self.island[b]:
            return None
        c = self.covariance
        return float(np.sqrt(max(c[a, a] + c[b, b] - 2 * c[a, b], 0.0)))


def fit_clocks(meetings: Meetings, clocks: int) -> ClockFit:
    """Return offset and drift of each clock; a clock without a collective in common with another is its own island."""
    data = _one_end_each(meetings)
    middle = np.zeros(clocks, dtype=np.int64)
    island = _islands(data, clocks)
    offset, drift = np.zeros(clocks), np.zeros(clocks)
    covariance, drift_covariance = np.zeros((clocks, clocks)), np.zeros((clocks, clocks))
    scale = np.full(clocks, SCALE_NS_MIN)
    for number in np.unique(island).tolist():
        members = np.flatnonzero(island == number)
        if len(members) > 1:
            mine = _of(data, members, clocks)
            fit = _Island(mine, len(members))
            fit.solve()
            middle[members] = fit.middle_ns
            at = np.ix_(members, members)
            offset[members], drift[members] = fit.offset, fit.drift
            covariance[at], drift_covariance[at] = fit.covariances()
            scale[members] = fit.scale
    return ClockFit(offset, drift, middle, island, covariance, drift_covariance, scale)


def _one_end_each(meetings: Meetings) -> Meetings:
    """Return the mean end of each clock in each collective that at least two clocks saw."""
    order = np.lexsort((meetings.clock, meetings.meeting))
    meeting, clock = meetings.meeting[order], meetings.clock[order]
    end, kind, label = meetings.end_ns[order], meetings.kind[order], meetings.label[order]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (meeting[1:] != meeting[:-1]) | (clock[1:] != clock[:-1])
    begins = np.flatnonzero(first)
    if len(begins) == 0:
        return meetings
    base = end[begins]
    group = np.cumsum(first) - 1
    mean = base + np.add.reduceat(end - base[group], begins) // np.diff(np.append(begins, len(order)))
    meeting, clock, kind, label = meeting[begins], clock[begins], kind[begins], label[begins]
    _, number, count = np.unique(meeting, return_inverse=True, return_counts=True)
    seen = count[number] > 1
    _, number = np.unique(number[seen], return_inverse=True)
    return Meetings(number.astype(np.int64), clock[seen], mean[seen], kind[seen], label[seen])


def _islands(data: Meetings, clocks: int) -> Index:
    """For each clock, return the lowest-numbered clock that collectives connect it with."""
    island = np.arange(clocks)
    if len(data.meeting) == 0:
        return island
    while True:
        least = np.full(int(data.meeting.max()) + 1, clocks)
        np.minimum.at(least, data.meeting, island[data.clock])
        new = island.copy()
        np.minimum.at(new, data.clock, least[data.meeting])
        new = new[new]
        if np.array_equal(new, island):
            return island
        island = new


def _of(data: Meetings, members: Index, clocks: int) -> Meetings:
    place = np.full(clocks, -1)
    place[members] = np.arange(len(members))
    mine = place[data.clock] >= 0
    _, number = np.unique(data.meeting[mine], return_inverse=True)
    found = place[data.clock[mine]], data.end_ns[mine], data.kind[mine], data.label[mine]
    return Meetings(number.astype(np.int64), *found)


class _Island:
    """The fit of clocks that are connected: n ends of m collectives on k clocks."""

    def __init__(self, data: Meetings, clocks: int) -> None:
        self._meeting, self._clock, self._kind = data.meeting, data.clock, data.kind
        _, self._label = np.unique(data.label, return_inverse=True)
        self._count = int(data.meeting.max()) + 1
        base = np.zeros(self._count, dtype=np.int64)
        base[data.meeting] = data.end_ns
        self._end = (data.end_ns - base[data.meeting]).astype(np.float64)
        """Relative to the collective: differences of nanoseconds since 1970 need all bits of a float."""
        self._clocks = clocks
        self._weight = np.ones(len(data.meeting))
        self._residual = np.zeros(len(data.meeting))
        self.offset: Floats = np.zeros(clocks)
        self._slope: Floats = np.zeros(clocks)
        self.scale = SCALE_NS_MIN
        self._begin()
        # When each collective happened, in spans around the middle, on clocks aligned by medians.
        self._zero = int(data.end_ns[0])
        when = self._means((data.end_ns - self._zero) + self.offset[self._clock])
        self._span = max(float(np.ptp(when)), 1.0)
        self._middle = float(when.min() + when.max()) / 2
        self._tau = ((when - self._middle) / self._span)[self._meeting]

    @property
    def middle_ns(self) -> Index:
        """The middle of the collectives as each clock shows it."""
        return self._zero + np.rint(self._middle - self.offset).astype(np.int64)

    @property
    def drift(self) -> Floats:
        """The drift of each clock."""
        return self._slope / self._span

    def solve(self) -> None:
        """Fit by reweighted least squares, beginning at medians."""
        for _ in range(ROUNDS_MAX):
            before = self.offset
            self._reweight()
            matrix, right = self._equations()
            solved = _solved(matrix, right)
            self.offset, self._slope = solved[: self._clocks], solved[self._clocks :]
            if np.abs(self.offset - before).max() < CONVERGED_NS:
                break
        self._reweight()

    def _begin(self) -> None:
        """Set initial offsets from medians, along a tree of clocks with collectives in common."""
        known = np.zeros(self._clocks, dtype=np.bool_)
        known[np.bincount(self._clock, minlength=self._clocks).argmax()] = True
        while not known.all():
            seen = known[self._clock]
            total, count = np.zeros(self._count), np.zeros(self._count)
            np.add.at(total, self._meeting[seen], (self._end + self.offset[self._clock])[seen])
            np.add.at(count, self._meeting[seen], 1)
            new = ~seen & (count[self._meeting] > 0)
            apart = total[self._meeting[new]] / count[self._meeting[new]] - self._end[new]
            clock = self._clock[new]
            order = np.lexsort((apart, clock))
            clocks, first, number = np.unique(clock[order], return_index=True, return_counts=True)
            self.offset[clocks] = apart[order][first + number // 2]
            known[clocks] = True
        self.offset -= self.offset.mean()

    def _reweight(self) -> None:
        """Set the residuals, from the weighted mean end of each collective, and Huber's weights for them."""
        moved = self._end + self.offset[self._clock] + self._slope[self._clock] * self._tau
        middle = self._means(moved)
        self._residual = moved - middle[self._meeting]
        far = np.abs(self._residual)
        scales = np.full(len(far), SCALE_NS_MIN)
        for kind in np.unique(self._kind).tolist():
            mine = self._kind == kind
            # In a collective of two, residuals are half as far apart as the ends; 1.4826 turns a median into a
            # deviation.
            scales[mine] = max(1.4826 * float(np.median(far[mine])), SCALE_NS_MIN)
        self.scale = float(scales[np.argmin(self._kind)])
        np.maximum(scales, self._label_scales(far), out=scales)
        self._weight = 1.0 / (np.maximum(far / (HUBER_K * scales), 1.0) * (scales / self.scale) ** 2)

    def _label_scales(self, far: Floats) -> Floats:
        """For each end, return the scale of its label, zero if the label has too few."""
        order = np.lexsort((far, self._label))
        count = np.bincount(self._label)
        first = np.concatenate(([0], np.cumsum(count)[:-1]))
        median = far[order][first + (count - 1) // 2]
        scale: Floats = np.where(count >= LABEL_SAMPLES_MIN, 1.4826 * median, 0.0)[self._label]
        return scale

    def _means(self, values: Floats) -> Floats:
        total = np.bincount(self._meeting, self._weight * values, self._count)
        mean: Floats = total / np.bincount(self._meeting, self._weight, self._count)
        return mean

    def _equations(self) -> tuple[Floats, Floats]:
        """Return the normal equations for offsets and slopes with each collective's own time eliminated."""
        k, w, tau, clock = self._clocks, self._weight, self._tau, self._clock
        share = np.bincount(self._meeting, w, self._count)
        one, slope = np.zeros((self._count, k)), np.zeros((self._count, k))
        one[self._meeting, clock] = w
        slope[self._meeting, clock] = w * tau
        # A collective is at one instant for all: tau is the same for its members, and slope = one * tau.
        matrix = np.zeros((2 * k, 2 * k))
        matrix[:k, :k] = np.diag(np.bincount(clock, w, k)) - one.T @ (one / share[:, None])
        cross = np.diag(np.bincount(clock, w * tau, k)) - one.T @ (slope / share[:, None])
        matrix[:k, k:], matrix[k:, :k] = cross, cross.T
        matrix[k:, k:] = np.diag(np.bincount(clock, w * tau * tau, k)) - slope.T @ (slope / share[:, None])
        matrix[k:, k:] += np.eye(k) * (self.scale / (DRIFT_PRIOR_RATIO * self._span)) ** 2
        # Only differences are determined: the sum of the offsets is held at zero.
        matrix[:k, :k] += np.trace(matrix[:k, :k]) / (k * k)
        apart = self._end - self._means(self._end)[self._meeting]
        pull = -w * apart
        right: Floats = np.concatenate(
            (np.bincount(clock, pull, k), np.bincount(clock, pull * tau, k)), dtype=np.float64
        )
        return matrix, right

    def covariances(self) -> tuple[Floats, Floats]:
        """Return the covariances of the offsets and of the drifts, with the terms for skewed residuals."""
        k = self._clocks
        matrix, _ = self._equations()
        inverse = np.linalg.pinv(matrix, hermitian=True)
        score = np.zeros((self._count, 2 * k))
        pull = self._weight * self._residual
        score[self._meeting, self._clock] = pull
        score[self._meeting, k + self._clock] = pull * self._tau
        both = (SMALL_SAMPLE_FACTOR**2) * (inverse @ (score.T @ score) @ inverse)
        # Few collectives fit any offsets exactly and look free of error, so the noise's scale is a lower bound.
        freedom = max(len(self._meeting) - self._count - k + 1, 0)
        least = np.diag(inverse)[:k] * self.scale**2 if freedom < 2 * k else np.zeros(k)
        least = np.maximum(least, RESOLUTION_NS**2)
        offsets, slopes = both[:k, :k].copy(), both[k:, k:] / self._span**2
        offsets[np.diag_indices(k)] = np.maximum(np.diag(offsets), least) + self._skews() ** 2
        return offsets, slopes

    def _skews(self) -> Floats:
        """Return how far the mode of each clock's residuals lies from their weighted mean."""
        skews = np.zeros(self._clocks)
        order = np.lexsort((self._residual, self._clock))
        bounds = np.searchsorted(self._clock[order], np.arange(self._clocks + 1))
        for clock in range(self._clocks):
            mine = order[bounds[clock] : bounds[clock + 1]]
            if len(mine) >= SKEW_SAMPLES_MIN:
                mean = np.average(self._residual[mine], weights=self._weight[mine])
                skews[clock] = _mode(self._residual[mine]) - mean
        return skews


def _solved(matrix: Floats, right: Floats) -> Floats:
    try:
        return np.asarray(np.linalg.solve(matrix, right), dtype=np.float64)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0], dtype=np.float64)


def _mode(values: Floats) -> float:
    """Return the half-sample mode of ascending values (Robertson and Cryer 1974): the middle of the densest half."""
    while len(values) > 2:
        half = (len(values) + 1) // 2
        widths = values[half - 1 :] - values[: len(values) - half + 1]
        at = int(widths.argmin())
        values = values[at : at + half]
    return float(values.mean())
