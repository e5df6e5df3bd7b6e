"""Forecasts what other gradient buckets, or smaller gradients on the wire, would save, from exact windows.

Communication of 30 % of the step does not mean that 30 % can be saved: what runs under backward costs little already.
A bucket size can only save the tail, the communication that is left when backward ends.  So DDP's backward with its
bucketed all-reduces is simulated, for the present setting and the other one:

    backward        |=====|=====|=====|=====|            gradients become ready (`gradient_readiness`)
    buckets                [b0 ----][b1 ----][b2 ----]   each starts when it is full and has a stream to run on
    exposed                                  '-------'

A bucket costs alpha + bytes * beta (Hockney 1994).  With several `streams` the latency of one passes under the bytes of
another: gloo takes two (its default number of threads), while NCCL runs the collectives of a group one after the other.

The link's alpha and beta (`alpha_beta_link`) and the length of backward come from windows.  Windows of other bucket
sizes count too, because the link is the same.  Overlap costs something if communication needs the cores that compute
needs (gloo): an overlapped nanosecond saves `efficiency` of one, fitted once two bucket sizes were timed.

The uncertainty adds in quadrature: alpha between its low and its high value, the efficiency, how far the timeline is
from reproducing the present step, and the error of earlier forecasts.

Assumptions, which are wrong somewhere: the bytes of several collectives cross the link one after the other, as in a
queue, and buckets change no compute.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from pacecar.knobs import by_name
from pacecar.records import BackwardWindow

from ..observation import JobFacts, KnobSpace
from .alpha_beta_link import AlphaBetaLink, Period, assumed_link, combine, fit_periods, periods_of, streams_of
from .forecast import Forecast
from .gradient_readiness import EVEN, ReadinessCurve, fit_readiness, ready_ns
from .setting_history import (
    PACE_ERROR,
    SETTINGS_MAX,
    SPREAD_PRIOR,
    Setting,
    SettingHistory,
    SettingReading,
    setting_of,
    slope,
    typical,
)

__all__ = [
    "BUCKET_KNOBS",
    "BucketModel",
    "BucketTimeline",
    "TimelineScale",
    "bytes_share",
    "distinct_buckets",
    "pack_buckets",
    "play",
]


@dataclass(frozen=True, slots=True)
class BucketTimeline:
    """One simulated backward; `spans` are start and end of each bucket's all-reduce since backward began."""

    communication_ns: float
    exposed_ns: float
    spans: tuple[tuple[float, float], ...] = ()

    @property
    def overlapped_ns(self) -> float:
        """Communication that ran before backward ended."""
        return self.communication_ns - self.exposed_ns


def pack_buckets(gradient_bytes: Sequence[int], bucket_bytes: int, first_bytes: int | None = None) -> list[int]:
    """Return bucket sizes as DDP fills them: in ready order, closed by the gradient that reaches the cap."""
    buckets, filled = [], 0
    cap = bucket_bytes if first_bytes is None else min(first_bytes, bucket_bytes)
    for size in gradient_bytes:
        filled += size
        if filled >= cap:
            buckets.append(filled)
            filled, cap = 0, bucket_bytes
    if filled:
        buckets.append(filled)
    return buckets


def distinct_buckets(
    space: KnobSpace, gradient_bytes: Sequence[int], present_first_bytes: int | None = None
) -> KnobSpace:
    """Return the space without bucket sizes that make the same buckets as a larger size or the present one.

    A layer of 4 MiB fills a bucket of 1 MiB as it fills one of 4 MiB, so trying both would try one of them twice.
    """
    if not gradient_bytes:
        return space
    made: dict[tuple[int, ...], int] = {}
    for size in (space.value, *sorted(space.domain, reverse=True)):
        first = present_first_bytes if size == space.value else None
        made.setdefault(tuple(pack_buckets(gradient_bytes, size, first)), size)
    return replace(space, domain=tuple(sorted(made.values())))


def play(
    buckets: Sequence[int],
    backward_ns: float,
    alpha_ns: float,
    ns_per_byte: float,
    streams: int = 1,
    readiness: ReadinessCurve = EVEN,
) -> BucketTimeline:
    """Simulate one backward: each bucket waits until it is ready, then for a stream and the link."""
    link_free, busy_until, communication = 0.0, 0.0, 0.0
    spans: list[tuple[float, float]] = []
    for i, (size, ready) in enumerate(zip(buckets, ready_ns(readiness, buckets, backward_ns), strict=True)):
        start = max(ready, spans[i - streams][1] if i >= streams else 0.0)
        link_free = max(link_free, start + alpha_ns) + size * ns_per_byte
        communication += link_free - max(start, busy_until)
        busy_until = link_free
        spans.append((start, link_free))
    exposed = min(communication, max(0.0, link_free - backward_ns))
    return BucketTimeline(communication_ns=communication, exposed_ns=exposed, spans=tuple(spans))


EFFICIENCY_PRIOR = 0.9
EFFICIENCY_ERROR = 0.1
"""Share of an overlapped nanosecond that is saved, before two bucket sizes were timed: 0.83 to 1.0 fits measurements
over gloo on two cores (TUNING), where communication takes compute's own cores."""

SPREAD_MIN = 0.012
"""Least uncertainty of a forecast, in replays of real sweeps: with 0.005 82 % of the gains lie within their 90 %
intervals, with this 84 %, and more costs time where there is nothing to gain."""

BUCKET_KNOBS = frozenset({"bucket_bytes", "first_bucket_bytes"})
"""Knobs that change the buckets and nothing else."""

TIMELINES_MAX = 256
"""Timelines kept between two windows: three for each value of a domain."""

BUCKET_BYTES_DEFAULT = 25 * 2**20
"""DDP's own default, for jobs where the bucket size is not a knob."""

BYTES_SHARE = {"none": 1.0, "bf16": 0.5, "fp16": 0.5}
"""Bytes on the wire for one byte of float32 gradients; choices that depend on shapes are left out."""


@dataclass(frozen=True, slots=True)
class TimelineScale:
    """What a change of another knob multiplies pace, the backward that overlaps, and the bytes on the wire by."""

    pace_ratio: float = 1.0
    backward_ratio: float = 1.0
    bytes_ratio: float = 1.0

    def link(self, link: AlphaBetaLink) -> AlphaBetaLink:
        """Return what `link` is for a byte of gradients."""
        return replace(link, ns_per_byte=link.ns_per_byte * self.bytes_ratio)


class BucketModel:
    """Forecasts for the knobs of DDP's Reducer; `history` is shared with the models of other knobs."""

    def __init__(self, facts: JobFacts, history: SettingHistory) -> None:
        self._facts = facts
        self._history = history
        self._fits: dict[Setting, tuple[AlphaBetaLink, ReadinessCurve]] = {}
        self._fits_of = 0
        self._packed = lru_cache(SETTINGS_MAX)(
            lambda size, first: tuple(pack_buckets(facts.gradient_bytes, size, first))
        )
        self._timelines = lru_cache(TIMELINES_MAX)(play)  # nothing changes between windows, and this is called often

    def expect_buckets(
        self, knob: str, values: Mapping[str, int], to_value: int, beside: TimelineScale | None = None
    ) -> Forecast | None:
        """Return what turning `knob`, one of BUCKET_KNOBS, to `to_value` should save; None if unknown.

        `beside`: what else is turned at the same time; then the gain is a share of the pace with that change alone.
        """
        new = {**values, knob: to_value}
        pace, readings = self._history.pace(values), self._history.readings_beside(values, BUCKET_KNOBS)
        if sum(self._facts.gradient_bytes) <= 0 or pace is None or not readings:
            return None
        link, _ = self._fit(values)
        seen = typical(readings.get(setting_of(values)) or next(reversed(readings.values())))
        backward = self._history.backward_ns(seen)
        paces = self._history.paces_beside(values, BUCKET_KNOBS)
        played = {setting: self._play(dict(setting), backward, link) for setting in paces}
        efficiency, efficiency_error = _fit_efficiency(played, paces)
        exposed_ratio = played[setting_of(values)].exposed_ns / pace
        is_here = setting_of(values) in readings and seen.wall_ns > 0
        most = seen.exposed_ns / seen.wall_ns if is_here else exposed_ratio
        # A timeline that misses the present step misses the change by the same share.
        miss = abs(exposed_ratio - most) / exposed_ratio if exposed_ratio > 0 else 0.0
        if beside is not None:
            link, backward, pace = beside.link(link), backward * beside.backward_ratio, pace * beside.pace_ratio
            most = exposed_ratio = self._play(values, backward, link).exposed_ns / pace
        gains, hidden = [], 0.0
        for alpha in (link.alpha_low_ns, link.alpha_ns, link.alpha_high_ns):
            lines = [self._play(v, backward, link, alpha_ns=alpha) for v in (values, new)]
            gains.append(min(_saving(lines[0], lines[1], efficiency) / pace, most))
            if alpha == link.alpha_ns:
                hidden = (lines[0].overlapped_ns - lines[1].overlapped_ns) / pace * efficiency_error
        gain = fmean(gains)  # a large alpha costs small buckets more than a small one saves
        off = miss * min(exposed_ratio, abs(gain))
        error = self._history.error_ratio(knob)
        if gain < 0:
            error = min(error, SPREAD_PRIOR)  # an error in the size of a loss does not change its sign
        spread = math.hypot(error * gain, (max(gains) - min(gains)) / 2, hidden, off, SPREAD_MIN)
        basis = (
            f"timeline of {len(self._pack(new))} instead of {len(self._pack(values))} buckets, "
            f"{link.alpha_ns / 1e6:.2f} ms a bucket ({link.basis}) and "
            f"{1 / link.ns_per_byte if link.ns_per_byte > 0 else math.inf:.3f} GB/s"
        )
        return Forecast(gain, spread, basis)

    def best_size(self, values: Mapping[str, int], sizes: Sequence[int], beside: TimelineScale) -> int | None:
        """Return the `bucket_bytes` of `sizes` that leaves least exposed if `beside` is turned too; None if unknown."""
        readings = self._history.readings_beside(values, BUCKET_KNOBS)
        if sum(self._facts.gradient_bytes) <= 0 or not readings:
            return None
        seen = typical(readings.get(setting_of(values)) or next(reversed(readings.values())))
        backward = self._history.backward_ns(seen) * beside.backward_ratio
        link = beside.link(self._fit(values)[0])
        alphas = (link.alpha_low_ns, link.alpha_ns, link.alpha_high_ns)

        def exposed_ns(size: int) -> float:
            new = {**values, "bucket_bytes": size}
            return fmean(self._play(new, backward, link, alpha_ns=alpha).exposed_ns for alpha in alphas)

        return min(sizes, key=exposed_ns)

    def _pack(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """Return the buckets under `values`, as the Reducer makes them."""
        facts = self._facts
        size = values.get("bucket_bytes", facts.bucket_bytes or BUCKET_BYTES_DEFAULT)
        first = values.get("first_bucket_bytes")
        if first is None and size == facts.bucket_bytes:
            first = facts.first_bucket_bytes
        return self._packed(size, first)

    def _play(
        self, values: Mapping[str, int], backward_ns: float, link: AlphaBetaLink, *, alpha_ns: float | None = None
    ) -> BucketTimeline:
        alpha = link.alpha_ns if alpha_ns is None else alpha_ns
        _, readiness = self._fit(values)
        return self._timelines(self._pack(values), backward_ns, alpha, link.ns_per_byte, link.streams, readiness)

    def _fit(self, values: Mapping[str, int]) -> tuple[AlphaBetaLink, ReadinessCurve]:
        """Return what a bucket costs and when gradients are ready, from windows that differ only in their buckets."""
        if self._fits_of != self._history.windows or len(self._fits) >= SETTINGS_MAX:
            self._fits.clear()
            self._fits_of = self._history.windows
        key = tuple(pair for pair in setting_of(values) if pair[0] not in BUCKET_KNOBS)
        if key not in self._fits:
            beside = self._history.readings_beside(values, BUCKET_KNOBS)
            windows: list[tuple[tuple[int, ...], list[BackwardWindow]]] = []
            for setting, readings in beside.items():
                sizes = self._pack(dict(setting))
                seen = [reading.backward for reading in readings if reading.backward is not None]
                windows.append((sizes, [window for window in seen if len(window.reduces) == len(sizes)]))
            streams = max([1, *(streams_of(window.reduces) for _, seen in windows for window in seen)])
            readiness = fit_readiness([(sizes, window) for sizes, seen in windows for window in seen], streams)
            self._fits[key] = self._fit_link(beside, windows, streams), readiness
        return self._fits[key]

    def _fit_link(
        self,
        beside: Mapping[Setting, Sequence[SettingReading]],
        windows: Sequence[tuple[tuple[int, ...], Sequence[BackwardWindow]]],
        streams: int,
    ) -> AlphaBetaLink:
        periods: list[Period] = []
        for sizes, seen in windows:
            periods += combine([periods_of(sizes, window.reduces) for window in seen])
        measured = fit_periods(periods, streams)
        if measured is not None:
            return measured
        points = [(float(len(self._pack(dict(s)))), float(typical(r).communication_ns)) for s, r in beside.items()]
        count, communication = fmean(x for x, _ in points), fmean(y for _, y in points)
        total, per_bucket = sum(self._facts.gradient_bytes), slope(points)
        if per_bucket is None:
            return assumed_link(communication, count, total, streams)
        alpha = min(max(0.0, per_bucket), communication / count)
        return AlphaBetaLink(alpha, (communication - count * alpha) / total, 2 * alpha, streams, "fitted")

    def expect_compression(self, values: Mapping[str, int], to_value: int) -> Forecast | None:
        """Return what turning `compression` to `to_value` should save; None if unknown.

        The cost of rounding is known only if other choices were timed.
        """
        readings, pace = self._history.readings(values), self._history.pace(values)
        old_share, new_share = (bytes_share(choice) for choice in (values["compression"], to_value))
        if old_share is None or new_share is None or not readings or pace is None:
            return None
        if sum(self._facts.gradient_bytes) <= 0:
            return None
        seen, (link, _) = typical(readings), self._fit(values)
        backward = self._history.backward_ns(seen)
        less = replace(link, ns_per_byte=link.ns_per_byte * new_share / old_share)
        old, new = self._play(values, backward, link), self._play(values, backward, less)
        hidden = (1 - EFFICIENCY_PRIOR) * (old.overlapped_ns - new.overlapped_ns)
        # In a disturbed window the link looks slow against an undisturbed pace, so its own ratio is the upper bound.
        fewer = max(0.0, 1 - new_share / old_share) * seen.communication_ns / seen.wall_ns
        most = min(fewer, seen.exposed_ns / seen.wall_ns)
        gain = min((old.exposed_ns - new.exposed_ns + max(0.0, hidden)) / pace, most)
        gain -= self._rounding_ns(values, pace, old, backward, link) / pace
        basis = f"timeline with {new_share / old_share:.0%} of the bytes on the wire"
        return Forecast(gain, self._history.spread("compression", gain), basis)

    def _rounding_ns(
        self, values: Mapping[str, int], pace: float, old: BucketTimeline, backward: float, link: AlphaBetaLink
    ) -> float:
        """Return how much longer than their timelines the timed choices took; 0 without any, or without rounding.

        If bf16 arithmetic costs more than it saves, the same is predicted for fp16.
        """
        old_share, beyond = bytes_share(values["compression"]), [0.0]
        for setting, other in self._history.paces_beside(values, frozenset({"compression"})).items():
            share = bytes_share(dict(setting)["compression"])
            if share is not None and share < 1.0 == old_share:
                line = self._play(values, backward, replace(link, ns_per_byte=link.ns_per_byte * share))
                beyond.append(other - (pace - (old.exposed_ns - line.exposed_ns)))
        return max(beyond)


def _fit_efficiency(played: Mapping[Setting, BucketTimeline], paces: Mapping[Setting, float]) -> tuple[float, float]:
    """Return the efficiency and its standard error: the prior and the paces, weighted by precision.

    pace - exposed - overlapped = base - efficiency * overlapped, over the timed settings.
    """
    points = [(line.overlapped_ns, paces[setting] - line.communication_ns) for setting, line in played.items()]
    precision, per_overlapped = EFFICIENCY_ERROR**-2, slope(points)
    if per_overlapped is None:
        return EFFICIENCY_PRIOR, EFFICIENCY_ERROR
    middle, noise = fmean(x for x, _ in points), PACE_ERROR * fmean(paces.values())
    measured = math.fsum((x - middle) ** 2 for x, _ in points) / noise**2
    efficiency = (EFFICIENCY_PRIOR * precision - per_overlapped * measured) / (precision + measured)
    return min(1.0, max(0.0, efficiency)), (precision + measured) ** -0.5


def bytes_share(choice: int) -> float | None:
    """Return the share of bytes that a choice of `compression` puts on the wire; None if it depends on shapes."""
    choices = by_name["compression"].choices
    return BYTES_SHARE.get(choices[choice]) if 0 <= choice < len(choices) else None


def _saving(old: BucketTimeline, new: BucketTimeline, efficiency: float) -> float:
    """Return the time saved: no longer exposed, plus the cost of what is no longer overlapped."""
    exposed, communication = old.exposed_ns - new.exposed_ns, old.communication_ns - new.communication_ns
    return efficiency * exposed + (1 - efficiency) * communication
