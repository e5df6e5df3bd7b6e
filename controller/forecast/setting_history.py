"""Keeps what was measured of each setting: exact windows, typical paces, and the errors of forecasts.

A setting is the values of all knobs.  Measurements of one apply partly to others, because the link is the same for all
buckets.  So most queries are for the settings `beside` one, which differ from it only in some knobs.

Pure.  Bounded: the oldest setting goes when there are too many, and the oldest window of a setting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from pacecar.records import BackwardWindow

from ..observation import Observation
from .forecast import Forecast

__all__ = [
    "PACE_ERROR",
    "SETTINGS_MAX",
    "SPREAD_PRIOR",
    "Setting",
    "SettingHistory",
    "SettingReading",
    "TypicalPace",
    "setting_of",
    "slope",
    "typical",
]

BACKWARD_SHARE = 2 / 3
"""Backward's share of compute if it was not measured: two matrix products for forward's one."""

SPREAD_PRIOR = 0.5
"""Uncertainty of a forecast as a share of it, before any forecast was measured; for knobs other than buckets 1 % of the
step is added."""

SMALL_GAIN = 0.02
"""For smaller forecasts the error is a share of this gain."""

LEDGERS_MAX = 8
"""Exact ledgers kept for each setting; their median counts, and the lower quartile has two."""

SETTINGS_MAX = 64
"""Most settings kept; a knob's domain has fewer, and the oldest goes first."""

FORECASTS_MAX = 64
"""Forecasts remembered beside what was measured."""

PHASES_MAX = 32
"""Steps whose host timers give backward's share."""

PACE_ERROR = 0.015
"""Relative error of a setting's pace: a trial's typical result at 5 % step noise."""

DRIFT_ERROR = 0.005
"""Error of a measured gain besides its pairs': conditions move a little between trials."""

Setting = tuple[tuple[str, int], ...]


class TypicalPace(NamedTuple):
    """The typical pace of a setting, with its relative standard error."""

    ns: float
    error_ratio: float


class MeasuredSaving(NamedTuple):
    """What trials measured of a setting beside `base`: the difference of log pace, old minus new, and its error."""

    base: Setting
    log_saving: float
    error: float


@dataclass(frozen=True, slots=True)
class SettingReading:
    """What one window measured."""

    wall_ns: int
    communication_ns: int
    exposed_ns: int
    compute_ns: int
    host_bound_ns: int
    micro_batches: int | None
    backward: BackwardWindow | None


class SettingHistory:
    """Paces and windows by setting, and forecasts beside what was measured."""

    def __init__(self) -> None:
        self._readings: dict[Setting, deque[SettingReading]] = {}
        self._paces: dict[Setting, TypicalPace] = {}
        self._savings: dict[Setting, MeasuredSaving] = {}
        self._backward_shares: deque[float] = deque(maxlen=PHASES_MAX)
        self._forecasts: deque[tuple[str, Forecast, float]] = deque(maxlen=FORECASTS_MAX)
        self.windows = 0
        """Changes with every new window, so caches of what was computed from windows compare it."""

    def learn(self, step: Observation) -> SettingReading | None:
        """Learn from a step's timers and exact ledger about the setting in force; return what a window measured."""
        if step.forward_ns is not None and step.backward_ns is not None and not step.profiled:
            both = step.forward_ns + step.backward_ns
            if both > 0:
                self._backward_shares.append(step.backward_ns / both)
        if step.ledger is None or not step.exact:
            return None
        ledger = step.ledger
        reading = SettingReading(
            wall_ns=ledger.wall_ns,
            communication_ns=ledger.communication_ns,
            exposed_ns=ledger.exposed_communication_ns,
            compute_ns=ledger.compute_ns,
            host_bound_ns=ledger.host_bound_ns,
            micro_batches=step.micro_batches,
            backward=step.backward,
        )
        setting = setting_of(step.values)
        if setting not in self._readings and len(self._readings) >= SETTINGS_MAX:
            del self._readings[next(iter(self._readings))]
        self._readings.setdefault(setting, deque(maxlen=LEDGERS_MAX)).append(reading)
        self.windows += 1
        return reading

    def note_pace(self, values: Mapping[str, int], pace_ns: float, error_ratio: float = PACE_ERROR) -> None:
        """Record a setting's typical pace; a newer one replaces an older one."""
        setting = setting_of(values)
        if setting not in self._paces and len(self._paces) >= SETTINGS_MAX:
            del self._paces[next(iter(self._paces))]
        self._paces[setting] = TypicalPace(pace_ns, max(PACE_ERROR, error_ratio))

    def forget(self) -> None:
        """Forget paces and windows, because conditions changed.  The record of forecasts stays."""
        self._readings.clear()
        self._paces.clear()
        self._savings.clear()
        self.windows += 1

    def note_saving(self, base: Mapping[str, int], values: Mapping[str, int], log_saving: float, error: float) -> None:
        """Record what a trial of `values` measured beside `base`, in log pace; a newer one replaces an older one."""
        setting = setting_of(values)
        if setting not in self._savings and len(self._savings) >= SETTINGS_MAX:
            del self._savings[next(iter(self._savings))]
        self._savings[setting] = MeasuredSaving(setting_of(base), log_saving, error)

    def measured(self, here: Mapping[str, int], there: Mapping[str, int]) -> tuple[float, float] | None:
        """Return what `there` saves beside `here` by their trials, with its standard error; None if unknown.

        Both may have been tried beside one other.
        """
        start, end = setting_of(here), setting_of(there)
        first, last = self._savings.get(start), self._savings.get(end)
        if last is not None and last.base == start:
            log_saving, error = last.log_saving, last.error
        elif first is not None and first.base == end:
            log_saving, error = -first.log_saving, first.error
        elif first is not None and last is not None and first.base == last.base:
            log_saving, error = last.log_saving - first.log_saving, math.hypot(first.error, last.error)
        else:
            return None
        return -math.expm1(-log_saving), math.hypot(error, DRIFT_ERROR)

    def pace(self, values: Mapping[str, int]) -> float | None:
        """Return the pace of the setting, None before it was noted."""
        pace = self._paces.get(setting_of(values))
        return None if pace is None else pace.ns

    def readings(self, values: Mapping[str, int]) -> Sequence[SettingReading]:
        """Return the windows of the setting."""
        return self._readings.get(setting_of(values), ())

    def timed_windows(self, values: Mapping[str, int]) -> int:
        """Return how many windows of the setting recorded its all-reduces one by one."""
        return sum(reading.backward is not None for reading in self.readings(values))

    def readings_beside(
        self, values: Mapping[str, int], knobs: frozenset[str]
    ) -> dict[Setting, Sequence[SettingReading]]:
        """Return the windows of settings that differ from `values` in `knobs` only, its own among them."""
        return {s: readings for s, readings in self._readings.items() if is_beside(s, values, knobs)}

    def paces_beside(self, values: Mapping[str, int], knobs: frozenset[str]) -> dict[Setting, float]:
        """Return the paces of such settings."""
        return {setting: pace.ns for setting, pace in self.typical_paces_beside(values, knobs).items()}

    def typical_paces_beside(self, values: Mapping[str, int], knobs: frozenset[str]) -> dict[Setting, TypicalPace]:
        """Return the paces of such settings with their errors."""
        return {setting: pace for setting, pace in self._paces.items() if is_beside(setting, values, knobs)}

    def backward_ns(self, reading: SettingReading) -> float:
        """Return the length of the backward that overlaps with communication, the last micro-batch's."""
        if reading.backward is not None:
            return float(reading.backward.work_ns)
        share = median(self._backward_shares) if self._backward_shares else BACKWARD_SHARE
        return reading.compute_ns * min(0.8, max(0.5, share)) / (reading.micro_batches or 1)

    # --- forecasts ---

    @property
    def forecasts(self) -> list[tuple[str, Forecast, float]]:
        """Knob, forecast and measured gain of every forecast that was tested by a trial."""
        return list(self._forecasts)

    def remember(self, knob: str, forecast: Forecast, measured: float) -> None:
        """Keep a forecast beside what was measured; later forecasts of that knob state that error."""
        self._forecasts.append((knob, forecast, measured))

    def error_ratio(self, knob: str) -> float:
        """Return the relative error of earlier forecasts of the knob; the prior counts as one of them."""
        pairs = [(forecast.gain_ratio, measured) for name, forecast, measured in self._forecasts if name == knob]
        errors = [min(1.0, abs(e - m) / max(abs(e), abs(m), SMALL_GAIN)) for e, m in pairs]
        return math.sqrt(fmean([SPREAD_PRIOR**2, *(error**2 for error in errors)]))

    def error_factor(self, knob: str) -> float:
        """Return by how many standard errors earlier forecasts of the knob were off; 1 counts as one of them."""
        off = [
            (forecast.gain_ratio - measured) / max(forecast.spread_ratio, PACE_ERROR)
            for name, forecast, measured in self._forecasts
            if name == knob
        ]
        return math.sqrt(fmean([1.0, *(one**2 for one in off)]))

    def spread(self, knob: str, gain: float) -> float:
        """Return the uncertainty from tested forecasts, but at least the prior."""
        errors = [(forecast.gain_ratio - measured) ** 2 for name, forecast, measured in self._forecasts if name == knob]
        prior = SPREAD_PRIOR * abs(gain) + 0.01
        return max(prior, math.sqrt(fmean(errors))) if errors else prior


def setting_of(values: Mapping[str, int]) -> Setting:
    """Return the values as a key: pairs of knob and value, sorted."""
    return tuple(sorted(values.items()))


def is_beside(setting: Setting, values: Mapping[str, int], knobs: frozenset[str]) -> bool:
    """Return whether `setting` differs from `values` in `knobs` only."""
    there = dict(setting)
    return there.keys() == values.keys() and all(there[name] == values[name] for name in values if name not in knobs)


def typical(readings: Sequence[SettingReading]) -> SettingReading:
    """Return the reading with the median exposed communication: a real one, so that its parts agree."""
    return sorted(readings, key=lambda reading: reading.exposed_ns)[len(readings) // 2]


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the least squares slope; None with fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = math.fsum((x - x_mean) ** 2 for x, _ in points)
    return math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / spread
