"""Removes samples that cannot be true, and says why.

Kernels and drivers report four things that are not measurements:

    out of range     4294967295 %, 2147483647 degrees, NaN: outside the metric's row in `value_ranges`
    above its whole  more free swap than swap
    a fall           a counter that reads 0 once and then continues
    a double         a second sample of one series, for which Prometheus would refuse the page

Prometheus takes a counter that falls for one that restarted, and adds its whole value to the increase.  So the series
is missing after a fall, until the counter is back at its last value (it never fell) or has confirmed the restart.  The
next reading confirms a fall to less than half.  A smaller fall cannot be a restart, which begins at zero; it is a
correction (a processor went offline), and is accepted after CORRECTION_READINGS.

Most samples equal those of the tick before, in the same order, and many are the same objects.  So samples are compared
place by place with the tick before, and only changed ones are judged; series are looked up only if the order changed.
The same object was not read again, so it confirms nothing.

One thread uses a screen: the one that reads its collector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import is_not
from typing import NamedTuple

from pacecar.metrics.catalog import CATALOG, by_name
from pacecar.metrics.metric import Metric, MetricKind
from pacecar.metrics.value_ranges import ANYTHING, RANGES, WHOLES
from pacecar.records import Sample

__all__ = ["RefusedSample", "SampleScreen", "in_range"]

RESTART_READINGS = 2
"""Consecutive readings that confirm a restart, after a fall to less than half of the last value."""

SMALL = 1000
"""A fall to less than this is always a restart: so small an increase harms nothing, and it is no round of traffic."""

CORRECTION_READINGS = 300
"""Consecutive readings that confirm a smaller fall: five minutes."""

KEPT_SCREENS = 60
"""Ticks for which a missing counter is remembered; after that its next value counts as a first one."""

Series = tuple[str, tuple[str, ...]]


class RefusedSample(NamedTuple):
    """A sample that is left out, and why, with its source and its series."""

    sample: Sample
    reason: str


class _Rule(NamedTuple):
    """The rules for the values of a metric."""

    low: float
    high: float
    is_counter: bool
    whole: str | None


def _rule(metric: Metric) -> _Rule:
    limits = RANGES.get(metric.name, ANYTHING)
    return _Rule(limits.low, limits.high, metric.kind is MetricKind.COUNTER, WHOLES.get(metric.name))


_RULES = {metric.name: _rule(metric) for metric in CATALOG}
_NO_RULE = _Rule(ANYTHING.low, ANYTHING.high, is_counter=False, whole=None)


class _Fall:
    """A counter whose last reading is not served: the last value that was, and the readings below it since."""

    __slots__ = ("fell_to", "held", "last", "readings")

    def __init__(self, last: float) -> None:
        self.last = last
        self.fell_to = self.held = last
        self.readings = 0
        """Consecutive readings from `fell_to` to `held` that did not fall."""

    def holds_back(self, value: float) -> bool:
        """Record a reading; return whether it is an unconfirmed fall."""
        if value >= self.last:
            return False
        if value < self.held:
            self.fell_to, self.readings = value, 0
        self.held, self.readings = value, self.readings + 1
        is_restart = self.fell_to < max(self.last / 2, SMALL)
        return self.readings < (RESTART_READINGS if is_restart else CORRECTION_READINGS)


class SampleScreen:
    """The series of one collector, and what is wrong with them."""

    def __init__(self) -> None:
        self._before: Sequence[Sample] = ()
        self._places: dict[Series, int] = {}
        self._rules: list[_Rule] = []
        self._pairs: list[tuple[int, int]] = []
        """Places of a part and of its whole."""
        self._doubles: dict[int, str] = {}
        self._refused: dict[int, str] = {}
        """Place -> why its value is left out, until it is read again."""
        self._falls: dict[int, _Fall] = {}
        """Counters among the refused."""
        self._gone: dict[Series, tuple[_Fall, int]] = {}
        """Counters that are missing, and the screen that missed them first."""
        self._screens = 0

    def screen(self, samples: tuple[Sample, ...]) -> tuple[tuple[Sample, ...], list[RefusedSample]]:
        """Return the samples of a tick that can be true, and those that are left out."""
        self._screens += 1
        before, rules, refused = self._before, self._rules, self._refused
        doubtful: list[tuple[int, float]] = []
        """Places to judge, with the last value of each."""
        if len(samples) != len(before):
            doubtful = self._lay_out(samples)
        else:
            for place in compress(range(len(samples)), map(is_not, samples, before)):
                new, old = samples[place], before[place]
                if (new.metric is not old.metric and new.metric != old.metric) or new.labels != old.labels:
                    doubtful = self._lay_out(samples)
                    break
                value, last = new.value, old.value
                if value == last:
                    if refused and place in refused:
                        doubtful.append((place, last))
                    continue
                low, high, is_counter, _ = rules[place]
                if not low <= value <= high or (is_counter and value < last) or (refused and place in refused):
                    doubtful.append((place, last))
        self._before = samples
        for place, last in doubtful:
            self._judge(place, samples[place].value, last)
        wrong = self._wrong(samples)
        if not wrong:
            return samples, []
        refusals = [
            RefusedSample(samples[place], _named(samples[place], why)) for place, why in sorted(wrong.items()) if why
        ]
        return tuple(sample for place, sample in enumerate(samples) if place not in wrong), refusals

    def _judge(self, place: int, value: float, last: float) -> None:
        low, high, is_counter, _ = self._rules[place]
        fall = self._falls.get(place)
        if fall is None and is_counter:
            fall = self._falls[place] = _Fall(last)
        if not low <= value <= high:  # NaN is in no range
            self._refused[place] = "{value} is outside {low} to {high}"
        elif fall is not None and fall.holds_back(value):
            self._refused[place] = "a counter fell to {value}, which the next reading has not confirmed"
        else:
            self._refused.pop(place, None)
            self._falls.pop(place, None)

    def _wrong(self, samples: Sequence[Sample]) -> dict[int, str]:
        """Return place -> why its sample is left out; empty for a harmless double with the same meaning."""
        wrong = self._doubles | self._refused if self._doubles or self._refused else {}
        for part, whole in self._pairs:
            if samples[part].value > samples[whole].value and part not in wrong and whole not in wrong:
                wrong[part] = f"{{value}} is above {WHOLES[samples[part].metric]}"
        return wrong

    def _lay_out(self, samples: Sequence[Sample]) -> list[tuple[int, float]]:
        """Find the rule of each place; return the places to judge, with the last value of each."""
        before, places_before = self._before, self._places
        refused, falls = self._refused, self._falls
        places: dict[Series, int] = {}
        self._places, self._rules, self._pairs = places, [], []
        self._doubles, self._refused, self._falls = {}, {}, {}
        doubtful: list[tuple[int, float]] = []
        parts: list[tuple[int, Series]] = []
        for place, sample in enumerate(samples):
            series = (sample.metric, sample.labels)
            if places.setdefault(series, place) != place:
                is_fact = sample.metric.endswith("_info")
                self._doubles[place] = "" if is_fact else "{value} comes from a second source with these labels"
                self._rules.append(_NO_RULE)
                continue
            rule = _RULES.get(sample.metric, _NO_RULE)  # unknown only by a bug of ours, which the exporter contains
            self._rules.append(rule)
            if rule.whole is not None:
                parts.append((place, (rule.whole, sample.labels)))
            old_place = places_before.pop(series, None)
            if old_place is None:
                if series in self._gone:
                    self._falls[place], _ = self._gone.pop(series)
                doubtful.append((place, float("-inf")))
                continue
            if old_place in refused:
                self._refused[place] = refused[old_place]
                if old_place in falls:
                    self._falls[place] = falls[old_place]
            if before[old_place] is not sample:
                doubtful.append((place, before[old_place].value))
        self._pairs = [(part, places[whole]) for part, whole in parts if whole in places]
        self._forget(places_before, falls, before)
        return doubtful

    def _forget(self, gone: dict[Series, int], falls: dict[int, _Fall], before: Sequence[Sample]) -> None:
        """Remember the counters that are `gone`, with their places `before`; drop those missing for too long."""
        for series, place in gone.items():
            if _RULES.get(series[0], _NO_RULE).is_counter:
                self._gone[series] = (falls.get(place) or _Fall(before[place].value), self._screens)
        if self._gone:
            oldest = self._screens - KEPT_SCREENS
            self._gone = {series: kept for series, kept in self._gone.items() if kept[1] >= oldest}


def in_range(samples: Iterable[Sample]) -> tuple[list[Sample], list[RefusedSample]]:
    """Return the samples within their range, and those left out; for gauges that are read alone."""
    sound: list[Sample] = []
    refusals: list[RefusedSample] = []
    for sample in samples:
        limits = RANGES.get(sample.metric, ANYTHING)
        if limits.low <= sample.value <= limits.high:
            sound.append(sample)
        else:
            refusals.append(RefusedSample(sample, _named(sample, "{value} is outside {low} to {high}")))
    return sound, refusals


def _named(sample: Sample, why: str) -> str:
    """Return `why` after the source and the series, with numbers in the unit of the metric's name."""
    metric, limits = by_name(sample.metric), RANGES.get(sample.metric, ANYTHING)
    value, low, high = (f"{metric.unit.convert(number):.12g}" for number in (sample.value, limits.low, limits.high))
    labels = ", ".join(f"{label}={text!r}" for label, text in zip(metric.labels, sample.labels, strict=True))
    series = f"{metric.name} of {labels}" if labels else metric.name
    return f"{limits.source}: {series}: {why.format(value=value, low=low, high=high)}"
