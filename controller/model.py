"""What would a setting be worth?  Expected gain from the ledger, before anything is tried.

"Communication takes 30 % of the step, so 30 % can be won" is wrong: what runs under backward costs little already,
and what a bucket size can win is the tail, the communication that is still to do when backward ends.  So
the timeline of DDP is played through:

    backward        |=====|=====|=====|=====|            gradients become ready, spread by their bytes
    buckets                [b0 ----][b1 ----][b2 ----]   each starts when it is full and the one before is done
    exposed                                  '-------'

Bucket cost is alpha + bytes * beta.  beta comes from the communication measured in exact ledgers, alpha from several
bucket sizes by least squares, before that it is a stated prior.  Overlap is not free where communication
needs the cores that compute needs (gloo): an overlapped nanosecond is worth `efficiency` of one, fitted likewise.

The micro-batch: step(m) = a + f * micro-batches at a constant global batch.  With one size seen the host-bound time is
a lower bound of what the micro-batches cost; with two the line is drawn through the nearest ones.

Assumptions, stated because they are wrong somewhere: backward time is proportional to gradient bytes; buckets run one
after the other; a change of bucket size changes no compute.  So a forecast orders trials and never decides
one, each is remembered beside its measurement, and None means that nothing can be said.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pacecar.controller.loader_forecast import DATA_WAIT_RATIO_MIN, loader_gain
from pacecar.controller.observation import Facts, KnobSpace, Observation
from pacecar.knobs import by_name

__all__ = ["Forecast", "Model", "Timeline", "pack_buckets", "play"]

ALPHA_PRIOR_NS = 300_000
"""Fixed cost of a bucket before it was measured: between NCCL in a node (30 us) and gloo over TCP (1 ms)."""

BACKWARD_SHARE = 2 / 3
"""Share of compute that is backward when the host timers do not say: it does two matrix products for forward's one."""

EFFICIENCY_PRIOR = 0.7
"""Share of an overlapped nanosecond that is saved, before two bucket sizes were measured."""

SPREAD_PRIOR = 0.5
"""Uncertainty of a forecast as a share of it (plus 1 % of the step) until forecasts met measurements."""

LEDGERS_MAX = 4
"""Exact ledgers kept per setting; the median of the last ones counts."""

SETTINGS_MAX = 64
"""Settings remembered; a knob's domain has fewer, and the oldest goes first."""

FORECASTS_MAX = 64
"""Forecasts remembered beside what was measured."""

PHASES_MAX = 32
"""Steps whose host timers give backward's share."""

RECENT_STEPS = 8
"""Steps that are of the world as it is now when a change of it has just been seen; a window, as elsewhere."""

BUCKET_BYTES_DEFAULT = 25 * 2**20
"""DDP's own, where the size of buckets is no knob."""

BYTES_SHARE = {"none": 1.0, "bf16": 0.5, "fp16": 0.5}
"""Bytes on the wire of one byte of float32 gradients; of choices that depend on shapes nothing is said."""

Setting = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected fraction of step time saved, and its uncertainty.  `is_floor`: at least this much, more is open.

    Nothing with no uncertainty: there is nothing to win, and the basis says why.
    """

    gain_ratio: float
    spread_ratio: float
    basis: str
    is_floor: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """One backward, played through."""

    communication_ns: float
    exposed_ns: float

    @property
    def overlapped_ns(self) -> float:
        """Communication that ran before backward ended."""
        return self.communication_ns - self.exposed_ns


def pack_buckets(gradient_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Return bucket sizes as DDP fills them: in ready order, closed by the gradient that reaches the cap."""
    buckets, filled = [], 0
    for size in gradient_bytes:
        filled += size
        if filled >= bucket_bytes:
            buckets.append(filled)
            filled = 0
    if filled:
        buckets.append(filled)
    return buckets


def distinct_buckets(space: KnobSpace, gradient_bytes: Sequence[int]) -> KnobSpace:
    """Return the space without the bucket sizes that make the very same buckets as a larger one or the present one.

    A layer of 4 MiB fills a bucket of 1 MiB as it fills one of 4: trying both is trying one twice.
    """
    if not gradient_bytes:
        return space
    made: dict[tuple[int, ...], int] = {}
    for size in (space.value, *sorted(space.domain, reverse=True)):
        made.setdefault(tuple(pack_buckets(gradient_bytes, size)), size)
    return KnobSpace(space.knob, space.value, tuple(sorted(made.values())))


def play(buckets: Sequence[int], backward_ns: float, alpha_ns: float, ns_per_byte: float) -> Timeline:
    """Play one backward: bucket i is ready when its share of all bytes is done, and waits for the link."""
    total = sum(buckets)
    done, link_free, communication = 0, 0.0, 0.0
    for size in buckets:
        done += size
        cost = alpha_ns + size * ns_per_byte
        link_free = max(link_free, backward_ns * done / total) + cost
        communication += cost
    exposed = min(communication, max(0.0, link_free - backward_ns))
    return Timeline(communication_ns=communication, exposed_ns=exposed)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one exact ledger said."""

    wall_ns: int
    communication_ns: int
    exposed_ns: int
    compute_ns: int
    host_bound_ns: int
    micro_batches: int | None


class Model:
    """Learns from steps and verdicts; forecasts the gain of a change of one knob."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._readings: dict[Setting, deque[_Reading]] = {}
        self._paces: dict[Setting, float] = {}
        self._backward_shares: deque[float] = deque(maxlen=PHASES_MAX)
        self._waits: deque[tuple[Setting, float]] = deque(maxlen=PHASES_MAX)
        self._forecasts: deque[tuple[str, float, float]] = deque(maxlen=FORECASTS_MAX)
        self._last: _Reading | None = None

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed communication over the step in the last exact ledger; None before the first."""
        if self._last is None or self._last.wall_ns == 0:
            return None
        return self._last.exposed_ns / self._last.wall_ns

    @property
    def forecasts(self) -> list[tuple[str, float, float]]:
        """Knob, expected and measured gain of every forecast that was put to the test."""
        return list(self._forecasts)

    def learn(self, step: Observation) -> None:
        """Take what a step's timers and exact ledger say about the setting in force."""
        if step.forward_ns is not None and step.backward_ns is not None and not step.profiled:
            both = step.forward_ns + step.backward_ns
            if both > 0:
                self._backward_shares.append(step.backward_ns / both)
        if step.data_wait_ns is not None and not step.profiled:
            self._waits.append((_setting(step.values), min(1.0, step.data_wait_ns / step.pace_ns)))
        if step.ledger is None or not step.exact:
            return
        ledger = step.ledger
        self._last = _Reading(
            wall_ns=ledger.wall_ns,
            communication_ns=ledger.communication_ns,
            exposed_ns=ledger.exposed_communication_ns,
            compute_ns=ledger.compute_ns,
            host_bound_ns=ledger.host_bound_ns,
            micro_batches=step.micro_batches,
        )
        setting = _setting(step.values)
        _make_room(self._readings, setting)
        self._readings.setdefault(setting, deque(maxlen=LEDGERS_MAX)).append(self._last)

    def note_pace(self, values: Mapping[str, int], pace_ns: float) -> None:
        """Take a measured typical pace of a setting; a newer one replaces an older one."""
        setting = _setting(values)
        _make_room(self._paces, setting)
        self._paces[setting] = pace_ns

    def remember(self, knob: str, expected: float, measured: float) -> None:
        """Keep a forecast beside what was measured; later forecasts of that knob state that error."""
        self._forecasts.append((knob, expected, measured))

    def forget(self) -> None:
        """The world changed: paces and ledgers are of another one.  The record of forecasts stays."""
        self._readings.clear()
        self._paces.clear()
        while len(self._waits) > RECENT_STEPS:  # the last ones are what says so
            self._waits.popleft()
        self._last = None

    def expect(self, knob: str, values: Mapping[str, int], to_value: int) -> Forecast | None:
        """Return what turning `knob` from `values` to `to_value` should save; None when nothing can be said."""
        if knob == "bucket_bytes":
            return self._expect_buckets(values, to_value)
        if knob == "compression":
            return self._expect_compression(values, to_value)
        if knob == "micro_batch":
            return self._expect_micro_batch(values, to_value)
        if knob.startswith("loader_"):
            return self._expect_loader(knob, values, to_value)
        return None

    # --- buckets ---

    def _expect_buckets(self, values: Mapping[str, int], to_value: int) -> Forecast | None:
        sizes = self._facts.gradient_bytes
        pace = self._paces.get(_setting(values))
        readings = self._bucket_readings(values)
        here = values["bucket_bytes"]
        if sum(sizes) <= 0 or pace is None or here not in readings:
            return None
        alpha, ns_per_byte, is_fitted = self._fit_link(readings)
        backward = self._backward_ns(readings[here])
        timed = {dict(s)["bucket_bytes"] for s in self._paces if _is_beside(s, values, "bucket_bytes")}
        played = {
            size: play(pack_buckets(sizes, size), backward, alpha, ns_per_byte) for size in {*timed, here, to_value}
        }
        efficiency = self._fit_efficiency(values, played)
        old, new = played[here], played[to_value]
        exposed_saving = old.exposed_ns - new.exposed_ns
        saving = efficiency * exposed_saving + (1 - efficiency) * (old.communication_ns - new.communication_ns)
        gain = min(saving / pace, readings[here].exposed_ns / readings[here].wall_ns)
        basis = (
            f"timeline of {len(pack_buckets(sizes, to_value))} instead of {len(pack_buckets(sizes, here))} buckets, "
            f"{alpha / 1e6:.2f} ms a bucket ({'fitted' if is_fitted else 'assumed'}) and "
            f"{1 / ns_per_byte if ns_per_byte > 0 else math.inf:.3f} GB/s"
        )
        return Forecast(gain, self._spread("bucket_bytes", gain), basis)

    def _bucket_readings(self, values: Mapping[str, int]) -> dict[int, _Reading]:
        """Return bucket size -> typical ledger, of settings that differ from `values` in the bucket size only."""
        return {
            dict(setting)["bucket_bytes"]: _typical(readings)
            for setting, readings in self._readings.items()
            if _is_beside(setting, values, "bucket_bytes") and readings
        }

    def _fit_link(self, readings: Mapping[int, _Reading]) -> tuple[float, float, bool]:
        """Fit communication = buckets * alpha + bytes / beta; return alpha, ns per byte, and if alpha is fitted."""
        sizes = self._facts.gradient_bytes
        total = sum(sizes)
        points = [(len(pack_buckets(sizes, size)), r.communication_ns) for size, r in readings.items()]
        slope = _slope([(float(x), float(y)) for x, y in points])
        count = fmean(x for x, _ in points)
        communication = fmean(y for _, y in points)
        if slope is None:
            alpha = min(float(ALPHA_PRIOR_NS), communication / (2 * count))
        else:
            alpha = min(max(0.0, slope), communication / count)
        return alpha, (communication - count * alpha) / total, slope is not None

    def _fit_efficiency(self, values: Mapping[str, int], played: Mapping[int, Timeline]) -> float:
        """Fit pace - exposed - overlapped = base - efficiency * overlapped over the bucket sizes that were timed."""
        points = []
        for size, timeline in played.items():
            pace = self._paces.get(_setting({**values, "bucket_bytes": size}))
            if pace is not None:
                points.append((timeline.overlapped_ns, pace - timeline.communication_ns))
        slope = _slope(points)
        return EFFICIENCY_PRIOR if slope is None else min(1.0, max(0.0, -slope))

    def _backward_ns(self, reading: _Reading) -> float:
        """Return the compute time of the one backward that overlaps with communication: the last micro-batch's."""
        share = median(self._backward_shares) if self._backward_shares else BACKWARD_SHARE
        return reading.compute_ns * min(0.8, max(0.5, share)) / (reading.micro_batches or 1)

    # --- compression ---

    def _expect_compression(self, values: Mapping[str, int], to_value: int) -> Forecast | None:
        """Play the timeline with fewer bytes on the wire.  What rounding costs is not known before it was tried."""
        sizes = self._facts.gradient_bytes
        reading = self._readings.get(_setting(values))
        pace = self._paces.get(_setting(values))
        old_share, new_share = (bytes_share(choice) for choice in (values["compression"], to_value))
        if old_share is None or new_share is None or not reading or pace is None or sum(sizes) <= 0:
            return None
        readings = self._bucket_readings(values) if "bucket_bytes" in values else {}
        here = values.get("bucket_bytes", BUCKET_BYTES_DEFAULT)
        typical = _typical(reading)
        alpha, ns_per_byte, _ = self._fit_link(readings or {here: typical})
        buckets, backward = pack_buckets(sizes, here), self._backward_ns(typical)
        old = play(buckets, backward, alpha, ns_per_byte)
        new = play(buckets, backward, alpha, ns_per_byte * new_share / old_share)
        hidden = (1 - EFFICIENCY_PRIOR) * (old.overlapped_ns - new.overlapped_ns)
        gain = min((old.exposed_ns - new.exposed_ns + max(0.0, hidden)) / pace, typical.exposed_ns / typical.wall_ns)
        basis = f"timeline with {new_share / old_share:.0%} of the bytes on the wire, rounding not counted"
        return Forecast(gain, self._spread("compression", gain), basis)

    # --- the data loader ---

    def _expect_loader(self, knob: str, values: Mapping[str, int], to_value: int) -> Forecast | None:
        """What rank 0 sees is a floor: while another rank waits for data, this one waits in the collective for it."""
        waits = [wait for setting, wait in self._waits if setting == _setting(values)]
        if not waits:
            return None
        wait = median(waits)
        others = 0.0 if self._facts.world_size == 1 else 1.0 if self.exposed_ratio is None else self.exposed_ratio
        if wait + others < DATA_WAIT_RATIO_MIN:
            return Forecast(0.0, 0.0, f"waiting for data is {wait:.1%} of the step, nothing to win")
        gain = loader_gain(knob, values[knob], to_value, wait)
        is_floor = gain > 0 and others >= DATA_WAIT_RATIO_MIN
        return Forecast(gain, self._spread(knob, gain), f"waiting for data is {wait:.0%} of the step", is_floor)

    # --- micro-batch ---

    def _expect_micro_batch(self, values: Mapping[str, int], to_value: int) -> Forecast | None:
        here = values["micro_batch"]
        pace = self._paces.get(_setting(values))
        batch = self._facts.batch_samples
        if pace is None or batch is None:
            return None
        count, new_count = math.ceil(batch / here), math.ceil(batch / to_value)
        others = sorted(
            (abs(math.log(size / here)), size, other)
            for setting, other in self._paces.items()
            if _is_beside(setting, values, "micro_batch")
            and math.ceil(batch / (size := dict(setting)["micro_batch"])) != count
        )
        if others:
            _, size, other = others[0]
            fixed = _slope([(float(count), pace), (float(math.ceil(batch / size)), other)])
            if fixed is not None:
                gain = min(0.9, fixed * (count - new_count) / pace)
                basis = f"{fixed / 1e6:.2f} ms a micro-batch, fitted, {count} -> {new_count} micro-batches"
                return Forecast(gain, self._spread("micro_batch", gain), basis)
        readings = self._readings.get(_setting(values))
        if not readings:
            return None
        floor = _typical(readings).host_bound_ns / count
        gain = floor * (count - new_count) / pace
        if gain <= 0:
            return None  # what more micro-batches cost at least, a bound on their gain from above, is no forecast
        basis = f"{floor / 1e6:.2f} ms host-bound a micro-batch, {count} -> {new_count} micro-batches"
        return Forecast(gain, max(gain, 0.01), basis, is_floor=True)

    def _spread(self, knob: str, gain: float) -> float:
        """Return the uncertainty: from forecasts of that knob that were put to the test, else the prior."""
        errors = [(expected - measured) ** 2 for name, expected, measured in self._forecasts if name == knob]
        prior = SPREAD_PRIOR * abs(gain) + 0.01
        return max(prior, math.sqrt(fmean(errors))) if errors else prior


def bytes_share(choice: int) -> float | None:
    """Return what share of its bytes a choice of `compression` puts on the wire; None where it depends on shapes."""
    choices = by_name["compression"].choices
    return BYTES_SHARE.get(choices[choice]) if 0 <= choice < len(choices) else None


def _setting(values: Mapping[str, int]) -> Setting:
    return tuple(sorted(values.items()))


def _is_beside(setting: Setting, values: Mapping[str, int], knob: str) -> bool:
    """True when `setting` is `values` but for `knob`."""
    there = dict(setting)
    return there.keys() == values.keys() and all(there[name] == values[name] for name in values if name != knob)


def _typical(readings: Sequence[_Reading]) -> _Reading:
    """Return the reading with the median exposed communication (a real one, so that its parts agree)."""
    return sorted(readings, key=lambda reading: reading.exposed_ns)[len(readings) // 2]


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the least squares slope; None with fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = math.fsum((x - x_mean) ** 2 for x, _ in points)
    return math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / spread


def _make_room(settings: dict[Setting, float] | dict[Setting, deque[_Reading]], setting: Setting) -> None:
    """Let the oldest setting go when a new one would be one too many."""
    if setting not in settings and len(settings) >= SETTINGS_MAX:
        del settings[next(iter(settings))]
