"""Detects that the job's conditions changed, by its pace (CUSUM) or its all-reduces, and keeps the windows since then.

A job's pace shows most changes, its all-reduces those that the pace does not show.  Either means that what was learnt
about settings no longer holds.  What was seen since the change does hold: forecasts for the new search begin with those
windows.  More of them are asked for as soon as a change is suspected, not once it is certain.

Left out: what follows from a change (the policy).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..observation import Observation
from .link_watch import CONFIRM_WINDOWS, LinkChangeDetector
from .pace_tracker import PaceAlarm, PaceTracker

__all__ = ["ChangeDetector", "DetectedChange"]


@dataclass(frozen=True, slots=True)
class DetectedChange:
    """A change of the job's conditions: `what` changed, in words, and the `windows` since.

    `alarm` says how the pace moved; None where only the link changed.
    """

    what: str
    windows: Sequence[Observation]
    alarm: PaceAlarm | None = None


class ChangeDetector:
    """Takes the levels of windows of steps (for a `PaceTracker`) and the hook's exact windows."""

    def __init__(self) -> None:
        self._watch = PaceTracker()
        self._link = LinkChangeDetector()
        self._recent: deque[Observation] = deque(maxlen=CONFIRM_WINDOWS)

    def restart(self) -> None:
        """Track the pace anew: another setting is in force, with a pace of its own."""
        self._watch = PaceTracker()

    def take(self, step: Observation) -> None:
        """Keep an exact window, of whatever setting."""
        if step.exact:
            self._recent.append(step)

    def observe(
        self, kept: Mapping[str, int], level: float | None, noise: float, step: Observation
    ) -> DetectedChange | None:
        """Take a step of the kept setting outside trials, with the level of the window that it ended, if it did."""
        factor = self._link.observe(kept, step)
        change = None if level is None else self.pace([level], noise, step)
        if change is not None or factor is None:
            return change
        suspicion, windows = self._watch.suspicion, tuple(self._recent)
        if suspicion is not None:
            self._watch = PaceTracker()
        return DetectedChange(f"all-reduces take {factor:.2g} times as long as before", windows, suspicion)

    def pace(self, levels: Sequence[float], noise: float, step: Observation) -> DetectedChange | None:
        """Take levels of windows that ended with `step`; in trials they are the kept setting's, interleaved."""
        for level in levels:
            alarm = self._watch.observe(level, noise, step=step.step)
            if alarm is not None:
                self._watch, self._link = PaceTracker(), LinkChangeDetector()
                way = "slower" if alarm.change_ratio > 0 else "faster"
                return DetectedChange(
                    f"the pace is {abs(alarm.change_ratio):.0%} {way} than before",
                    [window for window in self._recent if window.step > alarm.suspected_at],
                    alarm,
                )
        return None

    def wants_window(self) -> bool:
        """Return whether something seems to have changed, and windows of it are missing."""
        alarm = self._watch.suspicion
        if alarm is None:
            return self._link.is_suspicious
        return sum(window.step > alarm.suspected_at for window in self._recent) < CONFIRM_WINDOWS
