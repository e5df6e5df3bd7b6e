"""Has the link changed under a job whose pace does not show it?  All-reduces of exact windows, beside earlier ones.

The obvious sign is the pace, and where communication lies under backward, or half of it was rounded away, it stays
where it is while alpha or beta change by a multiple: every forecast goes on resting on a link that is no more, and on a
mixture of both once new windows come in.  So windows of one setting are compared: of each bucket the duration over
what it was (median), of the buckets the middle one, weighed by how long they take.  Weighed so, a beta is told by the
large ones and an alpha by jobs that consist of it, and the first one, which waits for the last rank, never decides
among several.

    before   [1 MiB] 7 ms   [25 MiB] 210 ms   [14 MiB] 120 ms
    now      [1 MiB] 9 ms   [25 MiB]  44 ms   [14 MiB]  25 ms     -> 0.21 of what it was

One window is anything: another job's burst, a garbage collection on a core that sends.  CONFIRM_WINDOWS on end must say
the same, each by far more than windows differ; whoever takes windows is asked for the next ones soon (`is_suspicious`).

Pure.  Left out: windows that did not tell their all-reduces one by one (a sum of communication includes the wait for
other ranks, which is the pace's to judge), and slow drift, which the reference follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from ..forecast.setting_history import Setting, setting_of
from ..observation import Observation

__all__ = ["CONFIRM_WINDOWS", "LinkChangeDetector"]

CONFIRM_WINDOWS = 3
"""Windows on end that must agree."""

REFERENCE_MIN = 4
REFERENCE_MAX = 8
"""Windows that say what is usual: with fewer nobody knows how much they differ, of more the oldest are of old."""

CHANGE_MIN = math.log(1.5)
"""Below, other settings are hardly worth more than before: a link's share of a step is seldom over a half."""

CHANGE_NOISES = 4.0
"""Nor is a change what windows do by themselves, in standard deviations of one."""

NOISE_MIN = 0.1
"""A few windows that happen to agree do not make the watch touchy (a bucket in two windows: 29.7 and 31.7 ms)."""

QUARTILE = 0.6745
"""The median deviation of Gaussian noise, in standard deviations."""


class LinkChangeDetector:
    """Takes the windows of the setting in force, in order."""

    def __init__(self) -> None:
        self._setting: Setting = ()
        self._reference: deque[tuple[float, ...]] = deque(maxlen=REFERENCE_MAX)
        self._suspects: list[tuple[float, tuple[float, ...]]] = []

    @property
    def is_suspicious(self) -> bool:
        """Whether the last window was unlike those before: more of them would tell."""
        return bool(self._suspects)

    def observe(self, values: Mapping[str, int], window: Observation) -> float | None:
        """Take a window under `values`; return by what factor all-reduces take longer now, where the last ones agree.

        Other values, or another number of buckets, are another reference: the watch begins anew.
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
        """Return the standard deviation of a window's change, raised by what so few windows may be off by."""
        spread = median(abs(_change(seen, usual)) for seen in self._reference) / QUARTILE
        return max(NOISE_MIN, spread * (1 + 1 / math.sqrt(len(self._reference))))


def _durations(window: Observation) -> tuple[float, ...] | None:
    if window.backward is None or not window.exact or not window.backward.reduces:
        return None
    durations = tuple(float(end - begin) for begin, end in window.backward.reduces)
    return durations if min(durations) > 0 else None


def _change(durations: Sequence[float], usual: Sequence[float]) -> float:
    """Return the logarithm of how much longer the buckets took than usual: the median, weighed by the usual."""
    ratios = sorted((math.log(now / then), then) for now, then in zip(durations, usual, strict=True))
    half, passed = math.fsum(usual) / 2, 0.0
    for ratio, weight in ratios:
        passed += weight
        if passed >= half:
            return ratio
    return ratios[-1][0]
