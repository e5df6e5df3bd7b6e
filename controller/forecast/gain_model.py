"""Forecasts the gain of a change of one knob from exact windows, before anything is tried.

Each kind of knob has its own arithmetic:

- buckets and compression: the simulated timeline of `bucket_model`;
- the data loader: the wait for data (`_loader_gain`);
- the micro-batch: step(m) = a + f * micro-batches at a constant global batch.  With one size seen, the host-bound time
  is a lower bound of what the micro-batches cost; with two, a line is drawn through the nearest ones.

A forecast chooses trials and never decides one.  Each is kept beside its measurement (`setting_history`).  None means
that there is no forecast.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from ..observation import JobFacts, Observation
from .bucket_model import BUCKET_KNOBS, BucketModel
from .forecast import Forecast
from .setting_history import PHASES_MAX, Setting, SettingHistory, SettingReading, setting_of, slope, typical

__all__ = ["GainModel"]

RECENT_STEPS = 8
"""Steps kept after a change of conditions is detected, one window's worth: they came after it."""

DATA_WAIT_RATIO_MIN = 0.03
"""Below this share of the step the wait for data leaves nothing to gain, as with exposed communication."""

PREFETCH_SHARE = 0.25
"""Share of the wait that prefetching saves: it does not speed loading up, it only evens it out."""


class GainModel:
    """Learns from steps and verdicts; forecasts the gain of a change of one knob."""

    def __init__(self, facts: JobFacts) -> None:
        self._facts = facts
        self.history = SettingHistory()
        self._buckets = BucketModel(facts, self.history)
        self._waits: deque[tuple[Setting, float]] = deque(maxlen=PHASES_MAX)
        self._last: SettingReading | None = None

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed communication over the step in the last exact ledger; None before the first."""
        if self._last is None or self._last.wall_ns == 0:
            return None
        return self._last.exposed_ns / self._last.wall_ns

    def learn(self, step: Observation) -> None:
        """Learn from a step's timers and exact ledger about the setting in force."""
        if step.data_wait_ns is not None and not step.profiled:
            self._waits.append((setting_of(step.values), min(1.0, step.data_wait_ns / step.pace_ns)))
        self._last = self.history.learn(step) or self._last

    def forget(self) -> None:
        """Forget paces and ledgers, because conditions changed.  The record of forecasts stays."""
        self.history.forget()
        while len(self._waits) > RECENT_STEPS:  # the last ones came after the change
            self._waits.popleft()
        self._last = None

    def expect(self, knob: str, values: Mapping[str, int], to_value: int) -> Forecast | None:
        """Return what turning `knob` from `values` to `to_value` should save; None if unknown."""
        if knob in BUCKET_KNOBS:
            return self._buckets.expect_buckets(knob, values, to_value)
        if knob == "compression":
            return self._buckets.expect_compression(values, to_value)
        if knob == "micro_batch":
            return self._expect_micro_batch(values, to_value)
        if knob.startswith("loader_"):
            return self._expect_loader(knob, values, to_value)
        return None

    # --- the data loader ---

    def _expect_loader(self, knob: str, values: Mapping[str, int], to_value: int) -> Forecast | None:
        """Forecast from rank 0's wait, a lower bound: while another rank waits for data, rank 0 waits for that rank."""
        waits = [wait for setting, wait in self._waits if setting == setting_of(values)]
        if not waits:
            return None
        wait = median(waits)
        others = 0.0 if self._facts.world_size == 1 else 1.0 if self.exposed_ratio is None else self.exposed_ratio
        if wait + others < DATA_WAIT_RATIO_MIN:
            return Forecast(0.0, 0.0, f"waiting for data is {wait:.1%} of the step, nothing to win")
        gain = _loader_gain(knob, values[knob], to_value, wait)
        is_floor = gain > 0 and others >= DATA_WAIT_RATIO_MIN
        return Forecast(gain, self.history.spread(knob, gain), f"waiting for data is {wait:.0%} of the step", is_floor)

    # --- micro-batch ---

    def _expect_micro_batch(self, values: Mapping[str, int], to_value: int) -> Forecast | None:
        here = values["micro_batch"]
        pace = self.history.pace(values)
        batch = self._facts.batch_samples
        if pace is None or batch is None:
            return None
        count, new_count = math.ceil(batch / here), math.ceil(batch / to_value)
        others = sorted(
            (abs(math.log(size / here)), size, other)
            for setting, other in self.history.paces_beside(values, frozenset({"micro_batch"})).items()
            if math.ceil(batch / (size := dict(setting)["micro_batch"])) != count
        )
        if others:
            _, size, other = others[0]
            fixed = slope([(float(count), pace), (float(math.ceil(batch / size)), other)])
            if fixed is not None:
                gain = min(0.9, fixed * (count - new_count) / pace)
                basis = f"{fixed / 1e6:.2f} ms a micro-batch, fitted, {count} -> {new_count} micro-batches"
                return Forecast(gain, self.history.spread("micro_batch", gain), basis)
        readings = self.history.readings(values)
        if not readings:
            return None
        floor = typical(readings).host_bound_ns / count
        gain = floor * (count - new_count) / pace
        if gain <= 0:
            return None  # more micro-batches: this only bounds the gain from above
        basis = f"{floor / 1e6:.2f} ms host-bound a micro-batch, {count} -> {new_count} micro-batches"
        return Forecast(gain, max(gain, 0.01), basis, is_floor=True)


def _loader_gain(knob: str, here: int, to: int, wait_ratio: float) -> float:
    """Return the fraction of the step saved by turning a loader knob from `here` to `to`; negative if lost.

    `wait_ratio` is the share of the step that waits for data.  Twice the workers do not halve the wait.  A step that
    waits is as long as the workers need for a batch, so twice the workers halve the *step*, until something else is
    the longest part:

        without workers   step = rest + load           with w of them   step = max(rest, load / w)

    Left out: workers share cores and disks, so the load of a batch grows with their number if they compute.  No ledger
    shows that beforehand, hence a wide spread, and the trial decides.
    """
    if knob == "loader_prefetch":
        return PREFETCH_SHARE * wait_ratio if to > here else -wait_ratio
    rest = 1.0 - wait_ratio
    if to == 0:
        return -float(here) * rest  # all of the loading comes into the step
    load = wait_ratio if here == 0 else float(here)
    return 1.0 - max(rest, load / to)
