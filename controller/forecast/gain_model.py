"""Forecasts the gain of a change of one knob, or of two together, from exact windows, before anything is tried.

Each kind of knob has its own arithmetic:

- buckets and compression: the simulated timeline of `bucket_model`;
- the data loader: the wait for data (`_loader_gain`);
- the micro-batch: `micro_batch_model`;
- activation checkpointing: the second forward of the blocks (`_expect_checkpointing`);
- gathering by FSDP2: `gather_model`;
- shares of work: what a sample costs each rank (`share_plan`);
- garbage collections: what they cost per step (`guards.collection_cost`).

Of two knobs the second's forecast assumes that the first was turned: its share of the joint gain comes on top of the
first's.  The timeline of buckets is played again with fewer bytes, or with the longer backward of fewer micro-batches.

A forecast chooses trials and never decides one.  Each is kept beside its measurement (`setting_history`).  None means
that there is no forecast.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from pacecar.knobs import AUTOMATIC_GC

from ..knobs.batch.share_plan import RankWork, longest_ns, plan_shares, shares_text
from ..observation import JobFacts, Observation
from .bucket_model import BUCKET_KNOBS, EFFICIENCY_PRIOR, BucketModel, TimelineScale, bytes_share
from .forecast import Forecast
from .gather_model import expect_prefetch, expect_reshard
from .micro_batch_model import expect_micro_batch
from .setting_history import (
    PHASES_MAX,
    SPREAD_PRIOR,
    Setting,
    SettingHistory,
    SettingReading,
    TypicalPace,
    setting_of,
    typical,
)

__all__ = ["GainModel", "joint_name"]

RECENT_STEPS = 8
"""Steps kept after a change of conditions is detected, one window's worth: they came after it."""

DATA_WAIT_RATIO_MIN = 0.03
"""Below this share of the step the wait for data leaves nothing to gain, as with exposed communication."""

COLLECTION_RATIO_MIN = 0.015
"""Below this share of the step garbage collections leave too little to prove: the dead band, and what they still cost
when scheduled."""

COLLECTION_SPREAD = 0.5
"""Share of an expected gain by which it may be wrong: scheduled collections cost something, too."""

SHARE_GAIN_MIN = 0.03
"""A smaller difference between ranks is noise, and no reason to move work."""

PREFETCH_SHARE = 0.25
"""Share of the wait that prefetching saves: it does not speed loading up, it only evens it out."""


class GainModel:
    """Learns from steps and verdicts; forecasts the gain of a change."""

    def __init__(self, facts: JobFacts) -> None:
        self._facts = facts
        self.history = SettingHistory()
        self._buckets = BucketModel(facts, self.history)
        self._waits: deque[tuple[Setting, float]] = deque(maxlen=PHASES_MAX)
        self._last: SettingReading | None = None
        self._collections: dict[int, float] = {}  # interval -> share of the step
        self._works: tuple[RankWork, ...] | None = None
        self._shares_used = 0
        self._pace_ns = 0

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed communication over the step in the last exact ledger; None before the first."""
        if self._last is None or self._last.wall_ns == 0:
            return None
        return self._last.exposed_ns / self._last.wall_ns

    @property
    def winnable_ratio(self) -> float | None:
        """The most that less communication could save of the last window: exposed, and what the rest may slow down."""
        if self._last is None or self._last.wall_ns == 0:
            return None
        hidden_ns = self._last.communication_ns - self._last.exposed_ns
        return (self._last.exposed_ns + (1 - EFFICIENCY_PRIOR) * hidden_ns) / self._last.wall_ns

    def learn(self, step: Observation) -> None:
        """Learn from a step's timers and exact ledger about the setting in force."""
        if step.data_wait_ns is not None and not step.profiled:
            self._waits.append((setting_of(step.values), min(1.0, step.data_wait_ns / step.pace_ns)))
        if step.collection_ns is not None and "gc_interval" in step.values:
            whole_ns = step.pace_ns + step.collection_ns  # the guard took them out of the pace
            self._collections[step.values["gc_interval"]] = step.collection_ns / whole_ns
        self._last = self.history.learn(step) or self._last
        self._works, self._pace_ns = step.works, step.pace_ns
        self._shares_used = max(self._shares_used, step.values.get("work_share", 0))

    def forget(self) -> None:
        """Forget paces and ledgers, because conditions changed.  The record of forecasts stays."""
        self.history.forget()
        while len(self._waits) > RECENT_STEPS:  # the last ones came after the change
            self._waits.popleft()
        self._last = None
        self._collections.clear()

    def expect(self, knob: str, values: Mapping[str, int], to_value: int) -> Forecast | None:
        """Return what turning `knob` from `values` to `to_value` should save; None if unknown.

        What trials measured of both settings counts beside the model, each by its precision.
        """
        forecast = self._expect(knob, values, to_value)
        measured = self.history.measured(values, {**values, knob: to_value})
        if forecast is None or forecast.is_floor or forecast.spread_ratio <= 0 or measured is None:
            return forecast
        gain, error = measured
        weight = error**2 / (error**2 + forecast.spread_ratio**2)
        return Forecast(
            weight * forecast.gain_ratio + (1 - weight) * gain,
            math.sqrt(weight) * forecast.spread_ratio,
            f"{forecast.basis}; measured {gain:+.1%} +- {error:.1%}",
        )

    def _expect(self, knob: str, values: Mapping[str, int], to_value: int) -> Forecast | None:
        if knob in BUCKET_KNOBS:
            return self._buckets.expect_buckets(knob, values, to_value)
        if knob == "compression":
            return self._buckets.expect_compression(values, to_value)
        if knob == "micro_batch":
            return self._expect_micro_batch(values, to_value)
        if knob == "checkpointed_blocks":
            return self._expect_checkpointing(values[knob], to_value)
        if knob == "work_share":
            return self._expect_work_share(values[knob], to_value)
        if knob.startswith("fsdp_"):
            return self._expect_gathers(knob, values, to_value)
        if knob.startswith("loader_"):
            return self._expect_loader(knob, values, to_value)
        if knob == "gc_interval":
            return self._expect_collections(values[knob], to_value)
        return None

    # --- several knobs ---

    def expect_jointly(
        self, values: Mapping[str, int], changes: Sequence[tuple[str, int]]
    ) -> tuple[Forecast, tuple[float, ...]] | None:
        """Return what `changes`, each (knob, new value), should save together, and each one's share of it, in order.

        None if one of them is unknown.  Buckets come last, because what they save depends on the others.
        """
        rest, variance, shares, bases = 1.0, 0.0, [], []
        for knob, to_value in changes:
            if knob in BUCKET_KNOBS:
                beside = self._scale(values, changes, 1.0 - rest)
                forecast = None if beside is None else self._buckets.expect_buckets(knob, values, to_value, beside)
            else:
                forecast = self.expect(knob, values, to_value)
            if forecast is None or forecast.is_floor:
                return None
            shares.append(rest * forecast.gain_ratio)
            variance += (rest * forecast.spread_ratio) ** 2
            rest -= shares[-1]
            bases.append(f"{knob} {shares[-1] * 100:+.1f} %: {forecast.basis}")
        error = max(SPREAD_PRIOR, self.history.error_ratio(joint_name(changes)))
        spread = math.sqrt(variance) * error / SPREAD_PRIOR
        return Forecast(1.0 - rest, spread, "; ".join(bases)), tuple(shares)

    def best_bucket_bytes(
        self, values: Mapping[str, int], knob: str, to_value: int, sizes: Sequence[int]
    ) -> int | None:
        """Return the bucket size of `sizes` that suits `knob` at `to_value` best; None if unknown."""
        forecast = self.expect(knob, values, to_value)
        beside = None if forecast is None else self._scale(values, ((knob, to_value),), forecast.gain_ratio)
        return None if beside is None else self._buckets.best_size(values, sizes, beside)

    def _scale(
        self, values: Mapping[str, int], changes: Sequence[tuple[str, int]], gain: float
    ) -> TimelineScale | None:
        """Return what `changes`, which save `gain` without their buckets, do to the timeline; None if unknown."""
        backward_ratio = bytes_ratio = 1.0
        for knob, to_value in changes:
            if knob == "compression":
                old, new = bytes_share(values[knob]), bytes_share(to_value)
                if old is None or new is None:
                    return None
                bytes_ratio = new / old
            elif knob == "micro_batch" and self._facts.batch_samples is not None:
                counts = [math.ceil(self._facts.batch_samples / size) for size in (values[knob], to_value)]
                backward_ratio = (1.0 - gain) * counts[0] / counts[1]
        return TimelineScale(1.0 - gain, backward_ratio, bytes_ratio)

    # --- garbage collections ---

    def _expect_collections(self, here: int, to: int) -> Forecast | None:
        """Forecast from the least that collections cost per step; under an interval not tried yet, nothing.

        Of going back to automatic ones a gain is never expected: they cost more than that least, by an unknown amount.
        """
        if to == AUTOMATIC_GC and self._collections.get(to, 0.0) <= self._collections.get(here, 0.0):
            return Forecast(0.0, 0.0, "automatic collections are not known to cost less")
        present = self._collections.get(here)
        if present is None:
            return Forecast(0.0, 0.0, "the cost of garbage collections is not known yet")
        if here != AUTOMATIC_GC and to not in self._collections:
            return Forecast(0.0, 0.0, "a rarer collection takes as much longer, and keeps more garbage")
        if present < COLLECTION_RATIO_MIN and to not in self._collections:
            return Forecast(0.0, 0.0, f"garbage collections take {present:.1%} of the step for certain, nothing to win")
        gain = present - self._collections.get(to, 0.0)
        basis = f"garbage collections take at least {present:.1%} of the step"
        return Forecast(gain, max(COLLECTION_SPREAD * abs(gain), COLLECTION_RATIO_MIN), basis)

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

    # --- work share ---

    def _expect_work_share(self, here: int, to: int) -> Forecast:
        """Forecast from what a batch costs each rank: the step is as long as the slowest one needs."""
        works = self._works
        if to not in (0, self._shares_used + 1):
            return Forecast(0.0, 0.0, "earlier and later shares are not tried")
        if works is None or self._pace_ns <= 0:
            return Forecast(0.0, 0.0, "the ranks' speeds are not measured yet")
        present = [work.samples for work in works]
        try:
            shares = plan_shares(works) if to else (sum(present) // len(present),) * len(present)
        except ValueError as error:
            return Forecast(0.0, 0.0, str(error))
        now_ns, then_ns = longest_ns(works, present), longest_ns(works, shares)
        gain = (now_ns - then_ns) / max(self._pace_ns, now_ns)
        if abs(gain) < SHARE_GAIN_MIN:
            return Forecast(0.0, 0.0, "the ranks are equally fast, nothing to win")
        return Forecast(gain, self.history.spread("work_share", gain), shares_text(shares))

    # --- activation checkpointing ---

    def _expect_checkpointing(self, here: int, to: int) -> Forecast | None:
        """Forecast from what it takes to run the blocks again in backward, as each that is checkpointed does.

        Under communication a shorter backward may only leave more of it exposed, hence a wide spread.
        """
        blocks = self._facts.blocks
        if blocks is None or blocks.again_ratio is None:
            return None
        each = blocks.again_ratio / blocks.count
        gain = (here - to) * each / (1 + (here - blocks.home) * each)
        basis = f"to compute all {blocks.count} blocks again takes {blocks.again_ratio:.0%} of the step"
        # Running twice is not faster, so that direction is never tried alone.
        spread = self.history.spread("checkpointed_blocks", gain) if gain > 0 else SPREAD_PRIOR * -gain
        return Forecast(gain, spread, basis)

    # --- FSDP2 ---

    def _expect_gathers(self, knob: str, values: Mapping[str, int], to_value: int) -> Forecast | None:
        readings, modules = self.history.readings(values), self._facts.sharded
        seen = typical(readings) if readings else None
        if seen is None or seen.wall_ns == 0:
            return None
        if knob == "fsdp_prefetch":
            return self._widened(knob, expect_prefetch(values[knob], to_value, seen))
        if modules is None:
            return None
        return self._widened(knob, expect_reshard(modules, self._paces_by(knob, values), values[knob], to_value, seen))

    # --- micro-batch ---

    def _expect_micro_batch(self, values: Mapping[str, int], to_value: int) -> Forecast | None:
        batch, readings = self._facts.batch_samples, self.history.readings(values)
        if batch is None:
            return None
        seen = typical(readings) if readings else None
        host_bound_ratio = None if seen is None or seen.wall_ns == 0 else seen.host_bound_ns / seen.wall_ns
        paces = self._paces_by("micro_batch", values)
        forecast = expect_micro_batch(paces, values["micro_batch"], to_value, batch, host_bound_ratio)
        return None if forecast is None else self._widened("micro_batch", forecast)

    def _paces_by(self, knob: str, values: Mapping[str, int]) -> dict[int, TypicalPace]:
        """Return the typical paces of settings that differ in `knob` alone, by its value."""
        beside = self.history.typical_paces_beside(values, frozenset({knob}))
        return {dict(setting)[knob]: pace for setting, pace in beside.items()}

    def _widened(self, knob: str, forecast: Forecast) -> Forecast:
        """Return the forecast with an error as large as earlier ones of the knob turned out to have."""
        return replace(forecast, spread_ratio=forecast.spread_ratio * self.history.error_factor(knob))


def joint_name(changes: Sequence[tuple[str, int]]) -> str:
    """Return the name under which forecasts of these knobs are remembered."""
    return "+".join(knob for knob, _ in changes)


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
