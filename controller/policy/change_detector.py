"""Detects that the job's conditions changed, by its pace (CUSUM) or its all-reduces, or that a rank is failing.

Either change makes what was learned about settings invalid.  Windows since the change are still valid, so the new
search begins with forecasts from them, and more are requested as soon as a change is suspected.  A jump may be certain
before the first of them; trials then wait for it, for AWAIT_STEPS at most.

`LinkChangeDetector` finds a changed link in exact windows.  The pace alone is not enough: if communication lies under
backward, or compression halved it, the pace stays while alpha or beta change by a multiple, and every forecast goes on
with a link that no longer exists.  So windows of one setting are compared: for each bucket its duration over the usual
one, for the window the median of these ratios, weighted by how long the buckets take.  A changed beta then shows in the
large buckets, and a changed alpha in jobs whose buckets cost little else.  The first bucket, which waits for the last
rank, never decides among several.

    before   [1 MiB] 7 ms   [25 MiB] 210 ms   [14 MiB] 120 ms
    now      [1 MiB] 9 ms   [25 MiB]  44 ms   [14 MiB]  25 ms     -> 0.21 of what it was

One window proves nothing: another job's burst or a garbage collection on a sending core looks the same.
CONFIRM_WINDOWS in a row must agree, each by far more than windows differ.

`StallDetector` counts steps that take many times the usual time.  One huge step is a checkpoint or a garbage
collection.  Several in a row are a rank that hangs in its data, a link that flaps, or a machine that swaps.  Tuning
pauses then; `pace_tracker` judges the pace afterwards.

Pure.  Left out: windows that did not record their all-reduces one by one (their sum includes the wait for other ranks,
which `pace_tracker` judges), and slow drift, which the reference follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..forecast.setting_history import Setting, setting_of
from ..observation import Observation
from .pace_tracker import QUARTILE, PaceAlarm, PaceTracker, TrackedPace

__all__ = [
    "CALM_STEPS",
    "CONFIRM_WINDOWS",
    "STALL_RATIO",
    "STALL_STEPS",
    "ChangeDetector",
    "DetectedChange",
    "LinkChangeDetector",
    "StallDetector",
]

CONFIRM_WINDOWS = 3
"""Windows in a row that must agree."""

REFERENCE_MIN = 4

REFERENCE_MAX = 8
"""Windows that define the usual: fewer do not show how windows differ, and with more the oldest are out of date."""

CHANGE_NOISES = 4.0
"""Smaller differences, in standard deviations of a window, are noise."""

NOISE_MIN = 0.1
"""Least noise: a few windows that happen to agree must cause no false alarms (one bucket took 29.7 and 31.7 ms)."""


AWAIT_STEPS = 32
"""Steps since a jump in which a window may come: waiting costs less than a trial without a forecast."""


@dataclass(frozen=True, slots=True)
class DetectedChange:
    """A change of the job's conditions: `what` changed, in words, and the `windows` since.

    `alarm` says how the pace moved; None where only the link changed.
    """

    what: str
    windows: Sequence[Observation]
    alarm: PaceAlarm | None = None


class ChangeDetector:
    """Takes the levels of windows of steps (for `PaceTracker`) and the hook's exact windows."""

    def __init__(self) -> None:
        self._watch = PaceTracker()
        self._link = LinkChangeDetector()
        self._recent: deque[Observation] = deque(maxlen=CONFIRM_WINDOWS)
        self._jumping: PaceAlarm | None = None
        self._awaited_until: int | None = None

    def restart(self) -> None:
        """Start tracking the pace of another setting."""
        self._watch, self._jumping = PaceTracker(), None

    def keep_window(self, step: Observation) -> None:
        """Keep an exact window of any setting."""
        if step.exact:
            self._recent.append(step)
            self._awaited_until = None

    def observe(
        self, kept: Mapping[str, int], level: float | None, pace: TrackedPace, step: Observation
    ) -> DetectedChange | None:
        """Take a step of the kept setting outside trials, and the level of the window that it ended, if any."""
        factor = self._link.observe(kept, step)
        change = None if level is None else self.pace([level], pace.window_noise, step)
        change = change or self.jump(pace, step)
        self._jumping = None if change is not None else pace.jump(step.step, surely=False)
        if change is not None or factor is None:
            return change
        suspicion, windows = self._watch.suspicion or self._jumping, tuple(self._recent)
        if suspicion is not None:
            self.restart()
        return DetectedChange(f"all-reduces take {factor:.2g} times as long as before", windows, suspicion)

    def pace(self, levels: Sequence[float], noise: float, step: Observation) -> DetectedChange | None:
        """Take levels of the kept setting's windows that ended with `step`, also from trials."""
        for level in levels:
            alarm = self._watch.observe(level, noise, step=step.step)
            if alarm is not None:
                return self._moved(alarm)
        return None

    def jump(self, pace: TrackedPace, step: Observation) -> DetectedChange | None:
        """Take a step that `pace` has seen, also in a trial."""
        alarm = pace.jump(step.step)
        return None if alarm is None else self._moved(alarm)

    def _moved(self, alarm: PaceAlarm) -> DetectedChange:
        self.restart()
        self._link = LinkChangeDetector()
        way = "slower" if alarm.change_ratio > 0 else "faster"
        windows = [window for window in self._recent if window.step > alarm.suspected_at]
        if self._recent and not windows:
            self._awaited_until = alarm.suspected_at + AWAIT_STEPS
        return DetectedChange(f"the pace is {abs(alarm.change_ratio):.0%} {way} than before", windows, alarm)

    def awaits_window(self, step: int) -> bool:
        """Return whether no trial should begin at `step`: the first window since the pace moved is still to come."""
        if self._awaited_until is not None and step >= self._awaited_until:
            self._awaited_until = None
        return self._awaited_until is not None

    def wants_window(self) -> bool:
        """Return whether conditions seem to have changed and windows since then are missing."""
        alarm = self._watch.suspicion or self._jumping
        if alarm is None:
            return self._link.is_suspicious or self._awaited_until is not None
        return sum(window.step > alarm.suspected_at for window in self._recent) < CONFIRM_WINDOWS


CHANGE_MIN = math.log(1.5)
"""Logarithm of the smallest factor that counts.  Below it other settings hardly gain more than before: a link's share
of a step is rarely over a half."""


class LinkChangeDetector:
    """Compares the windows of the setting in force, in order."""

    def __init__(self) -> None:
        self._setting: Setting = ()
        self._reference: deque[tuple[float, ...]] = deque(maxlen=REFERENCE_MAX)
        self._suspects: list[tuple[float, tuple[float, ...]]] = []

    @property
    def is_suspicious(self) -> bool:
        """Whether the last window was unlike those before, so that more windows are needed."""
        return bool(self._suspects)

    def observe(self, values: Mapping[str, int], window: Observation) -> float | None:
        """Take a window under `values`; return the factor by which all-reduces take longer, once enough windows agree.

        Other values, or another number of buckets, start a new reference.
        """
        durations = _durations(window)
        if durations is None:
            return None
        setting = setting_of(values)
        if setting != self._setting or (self._reference and len(self._reference[0]) != len(durations)):
            self._setting, self._suspects = setting, []
            self._reference.clear()
        if len(self._reference) < REFERENCE_MIN:
            self._reference.append(durations)
            return None
        usual = tuple(median(column) for column in zip(*self._reference, strict=True))
        change = _change(durations, usual)
        if abs(change) < max(CHANGE_MIN, CHANGE_NOISES * self._noise(usual)):
            self._suspects = []
            self._reference.append(durations)
            return None
        if self._suspects and self._suspects[-1][0] * change < 0:
            self._suspects = []
        self._suspects.append((change, durations))
        if len(self._suspects) < CONFIRM_WINDOWS:
            return None
        factor = math.exp(median(change for change, _ in self._suspects))
        self._reference.clear()
        self._reference.extend(durations for _, durations in self._suspects)
        self._suspects = []
        return factor

    def _noise(self, usual: Sequence[float]) -> float:
        """Return the standard deviation of a window's change, raised by the error of so few windows."""
        spread = median(abs(_change(seen, usual)) for seen in self._reference) / QUARTILE
        return max(NOISE_MIN, spread * (1 + 1 / math.sqrt(len(self._reference))))


def _durations(window: Observation) -> tuple[float, ...] | None:
    if window.backward is None or not window.exact or not window.backward.reduces:
        return None
    durations = tuple(float(end - begin) for begin, end in window.backward.reduces)
    return durations if min(durations) > 0 else None


def _change(durations: Sequence[float], usual: Sequence[float]) -> float:
    """Return the log of how much longer the buckets took than usual: the median, weighted by the usual."""
    ratios = sorted((math.log(now / then), then) for now, then in zip(durations, usual, strict=True))
    half, passed = math.fsum(usual) / 2, 0.0
    for ratio, weight in ratios:
        passed += weight
        if passed >= half:
            return ratio
    return ratios[-1][0]


STALL_RATIO = 20.0
STALL_STEPS = 8
"""A rank is failing when STALL_STEPS steps in a row take over STALL_RATIO times the typical pace."""

CALM_STEPS = 32
"""Steps in a row without a stall after which tuning goes on."""


class StallDetector:
    """Counts stalled steps; `usual_ns` is the typical pace while nothing is wrong, None before it is known."""

    def __init__(self) -> None:
        self.usual_ns: float | None = None
        self._stalled = 0
        self._calm = 0

    def is_stall(self, step: Observation) -> bool:
        """Return whether the step took too long to measure any setting."""
        return self.usual_ns is not None and step.pace_ns > STALL_RATIO * self.usual_ns

    def count(self, step: Observation) -> str | None:
        """Take a step while tuning; return why a rank seems to be failing, or None."""
        self._stalled = self._stalled + 1 if self.is_stall(step) else 0
        if self._stalled < STALL_STEPS:
            return None
        return f"{STALL_STEPS} steps in a row took over {STALL_RATIO:.0f} times the usual: a rank is failing"

    def is_over(self, step: Observation) -> bool:
        """Take a step while tuning waits; return whether the job has been calm for long enough."""
        self._calm = 0 if self.is_stall(step) else self._calm + 1
        return self._calm >= CALM_STEPS

    def restart(self) -> None:
        """Start counting from zero."""
        self._stalled = self._calm = 0
