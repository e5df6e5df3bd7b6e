"""How fast is the job with nothing being tried, and is it still?  The present pace, its noise, and an alarm.

Tuners that search once and stop lose what they won when the network changes (no peer recovers; horovod#2133 asks since
2020).  Re-tuning on a timer pays for ever.  So: tune, then watch the pace, and begin again when it has moved.

The obvious alarm, "slower than x % for one step", fires at every garbage collection.  Here the unit is the window of
`trial`, its deviation from the reference is measured in the noise of windows, clipped so that no single window
can raise the alarm, and summed in both directions (CUSUM: Page 1954).  A faster job is a changed job too.

Left out: slow drift.  The reference follows it, because there is no moment at which to ask again.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from pacecar.controller.evidence import gain_ratio, location
from pacecar.controller.trial import SETTLE_STEPS, WINDOW_STEPS

__all__ = ["NULL_PAIRS_MIN", "Alarm", "Pace", "Watch"]

NULL_PAIRS_MIN = 2
"""Null pairs before the first trial: 32 steps.  With two the false accept rate holds; more add little power."""

NULL_PAIRS_MAX = 6
"""Null pairs that are kept: old noise is other noise."""

RECENT_STEPS_MAX = 64
"""Steps that the typical pace is taken from."""


class Pace:
    """The pace under the setting in force, outside trials.  Feed it settled and unsettled steps alike, in order."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS_MAX)
        self._filling: list[float] = []
        self._half: float | None = None
        self._since_switch = 0
        self.nulls: deque[float] = deque(maxlen=NULL_PAIRS_MAX)

    def restart(self) -> None:
        """Begin anew under a new setting or in a new world.  The noise that was learnt is kept."""
        self._recent.clear()
        self.interrupt()

    def interrupt(self) -> None:
        """The setting was not in force for a while: its next steps settle first."""
        self._filling, self._half = [], None
        self._since_switch = 0

    def resume(self, log_paces: list[float]) -> None:
        """Take these steps as the recent ones (the world changed, and they are of the new one)."""
        self.restart()
        self._recent.extend(log_paces)
        self._since_switch = SETTLE_STEPS

    def drop_nulls(self, windows: int) -> None:
        """Forget the null pairs of the last windows: the change lies within them, they are not noise."""
        for _ in range(min(len(self.nulls), windows // 2 + 1)):
            self.nulls.pop()

    def observe(self, pace_ns: int, *, profiled: bool) -> float | None:
        """Take one step; return the level of the window (log pace) that it completes, if it does."""
        self._since_switch += 1
        if self._since_switch <= SETTLE_STEPS or profiled:
            return None
        log_pace = math.log(pace_ns)
        self._recent.append(log_pace)
        self._filling.append(log_pace)
        if len(self._filling) < WINDOW_STEPS:
            return None
        level, self._filling = location(self._filling), []
        if self._half is None:
            self._half = level
        else:
            self.nulls.append(self._half - level)
            self._half = None
        return level

    @property
    def settled_steps(self) -> int:
        """Steps under this setting since it came into force, settling left out."""
        return max(0, self._since_switch - SETTLE_STEPS)

    @property
    def recent_steps(self) -> int:
        """How many steps the typical pace rests on."""
        return len(self._recent)

    @property
    def opening(self) -> list[float]:
        """The last window's worth of settled steps without a break, fewer if there are not so many."""
        count = min(WINDOW_STEPS, self.settled_steps, len(self._recent))
        return list(self._recent)[len(self._recent) - count :]

    @property
    def last_windows(self) -> list[float]:
        """The steps of the last two windows."""
        return list(self._recent)[-2 * WINDOW_STEPS :]

    @property
    def typical(self) -> float:
        """Median log pace; raises ValueError before the first settled step."""
        if not self._recent:
            raise ValueError("no step was judged yet")
        return median(self._recent)

    @property
    def mean_ns(self) -> float:
        """Mean pace, rare slow steps included: what the setting really costs a step."""
        if not self._recent:
            raise ValueError("no step was judged yet")
        return fmean(math.exp(x) for x in self._recent)

    @property
    def window_noise(self) -> float:
        """Standard deviation of a window's level, from null pairs (a pair varies by the root of two more)."""
        if not self.nulls:
            return NOISE_MIN
        return max(NOISE_MIN, math.sqrt(fmean(x * x for x in self.nulls) / 2))


NOISE_MIN = 0.005
"""Window noise is not taken for less than 0.5 %: two quiet null pairs must not make the alarm touchy."""

REFERENCE_WINDOWS = 3
"""Windows whose median is the reference."""

CLIP = 4.0
"""A window's deviation counts for at most this many standard deviations: under `ALARM` + `SLACK`, so it takes two."""

SLACK = 1.0
ALARM = 5.0
"""CUSUM allowance and threshold in standard deviations: on Gaussian windows a false alarm in thousands of windows."""

SHIFT_MIN = 0.03
"""A change in pace below 3 % is not worth a new search."""

FOLLOW = 0.05
"""Share of a window's deviation that the reference takes over: slow drift is followed, a jump is not."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """The pace moved; `change_ratio` is the new pace over the reference, less one (positive: slower)."""

    change_ratio: float
    windows: int


class Watch:
    """Raises an alarm when window levels leave their reference for good."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._reference: float | None = None
        self._slower = self._faster = 0.0
        self._run: list[float] = []

    def observe(self, level: float, noise: float) -> Alarm | None:
        """Take a window's level; return an alarm at most once, after which a new Watch must be made."""
        if self._reference is None:
            self._first.append(level)
            if len(self._first) == REFERENCE_WINDOWS:
                self._reference = median(self._first)
            return None
        deviation = level - self._reference
        score = max(-CLIP, min(CLIP, deviation / noise))
        self._slower = max(0.0, self._slower + score - SLACK)
        self._faster = max(0.0, self._faster - score - SLACK)
        if self._slower == 0.0 and self._faster == 0.0:
            self._run.clear()
            self._reference += FOLLOW * deviation
            return None
        self._run = [*self._run[-_RUN_MAX:], level]
        shift = median(self._run[-2:]) - self._reference
        if max(self._slower, self._faster) < ALARM or abs(shift) < SHIFT_MIN:
            return None
        return Alarm(change_ratio=-gain_ratio(-shift), windows=len(self._run))


_RUN_MAX = 7
