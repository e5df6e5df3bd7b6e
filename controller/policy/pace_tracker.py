"""Tracks the job's pace and noise while nothing is tried, and raises an alarm when the pace has moved (CUSUM).

Tuners that search once lose what they won when the network changes (no peer recovers; horovod#2133, open since 2020),
and re-tuning on a timer pays forever.  So: tune, then track the pace, and begin again when it has moved.

An alarm on one slow step fires at every garbage collection.  Here the unit is the window of `ab_trial`.  Its deviation
from the reference is measured in the noise of windows, clipped so that no single window can raise the alarm, and summed
in both directions (CUSUM: Page 1954), because a faster job is a changed job too.

Where steps are long, windows take half a minute to tell.  A jump that nearly all of eleven steps show is certain
without them (`TrackedPace.jump`), also in a trial and right after one.

Left out: slow drift, which the reference follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..experiment.ab_trial import DROP_RATIO, QUIET_WINDOW_STEPS, SETTLE_STEPS, WINDOW_STEPS, IncumbentPace
from ..experiment.sequential_test import location

__all__ = ["NULL_PAIRS_MIN", "QUARTILE", "PaceAlarm", "PaceTracker", "TrackedPace"]

NULL_PAIRS_MIN = 2
"""Null pairs before the first trial: 36 steps, 20 with short windows.  With two the false accept rate holds; more add
little power."""

NULL_PAIRS_MAX = 8
"""Null pairs that a trial is weighed with: older noise may differ."""

WATCH_PAIRS_MAX = 32
"""Null pairs for the alarm's noise: with eight it would be off by a quarter and cause false alarms."""

QUIET_SPREAD = 0.06
"""Largest spread in log pace among the first window's steps at which windows are short.  Null pairs of the same length
then measure the noise of short windows."""

RECENT_STEPS_MAX = 64
"""Steps that the typical pace is taken from."""


NOISE_MIN = 0.005
"""Least window noise, 0.5 %: two quiet null pairs must not cause false alarms."""

QUARTILE = 0.6745
"""The median deviation of Gaussian noise, in standard deviations."""

CLIP = 4.0
"""Most standard deviations that one window counts for: below `ALARM` + `SLACK`, so an alarm takes two."""

SLACK = 1.0
ALARM = 5.0
"""CUSUM allowance and threshold in standard deviations: on Gaussian windows a false alarm in thousands of windows."""

SHIFT_MIN = 0.04
"""A change in pace below 4 % is not worth a new search."""

SHIFT_NOISES = 2.0
"""Nor is one below this many standard deviations of a window."""

CONFIRM_WINDOWS = 5
"""Windows whose median must confirm a suspicion.  Another job that uses the link for twenty steps looks like a change
in two windows, and each false alarm costs a search (without this: one in 500 steps at 5 % correlated noise)."""

CONFIRM_STEPS = CONFIRM_WINDOWS * WINDOW_STEPS
"""Steps that a change must last.  In a trial fewer windows span them, because every other stretch is the
candidate's."""

JUMP_MIN = 0.2
"""A change (in log pace) this large is confirmed sooner, because waiting costs more."""

CONFIRM_WINDOWS_MIN = 2
"""Fewest windows that confirm any change: one alone proves nothing."""

JUMP_STEPS = 11
JUMP_NS = 5_000_000_000
"""A jump has lasted if nearly all of this many steps show it, and as many as take this long: where steps are long,
windows would take half a minute to tell.  Bursts of another job last seconds, not steps."""

JUMP_SHARE = 0.9
"""The share of those steps that are beyond half of the jump."""

JUMP_SPREADS, JUMP_NOISES = 3.0, 5.0
"""Least jump, in standard deviations of the steps before it, and of windows: those are larger if slow steps follow slow
ones."""

BEFORE_STEPS_MIN = 16
"""Steps that a jump is compared with."""

FOLLOW = 0.05
"""Share of a window's (clipped) deviation that the reference takes over: it follows drift but not a jump."""

RUN_MAX = 8
"""Windows of a suspected change that are remembered."""


class TrackedPace:
    """The pace under the setting in force, outside trials.  Takes settled and unsettled steps, in order."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS_MAX)
        self._sum_ns = 0.0  # of the recent steps; used at every one of them
        self._expected: deque[float] = deque(maxlen=RECENT_STEPS_MAX)  # as recent, and those before the last change
        self._filling: list[float] = []
        self._half: float | None = None
        self._since_switch = 0
        self._is_sized = False
        self.window_steps = WINDOW_STEPS
        """Judged steps of one window, here and in trials; fixed with the first window, so that all null pairs are
        alike."""
        self._noise: deque[float] = deque(maxlen=WATCH_PAIRS_MAX)

    def restart(self, gain_ratio: float | None = None) -> None:
        """Start over under a new setting, which saves `gain_ratio`, or new conditions; keep the learned noise."""
        faster = [] if gain_ratio is None else [pace + math.log1p(-gain_ratio) for pace in self._expected]
        self._expected.clear()
        self._expected.extend(faster)
        self._recent.clear()
        self._sum_ns = 0.0
        self.interrupt()

    def interrupt(self) -> None:
        """Let the next steps settle: another setting was in force for a while."""
        self._filling, self._half = [], None
        self._since_switch = 0

    def resume(self, log_paces: list[float]) -> None:
        """Start over with these steps, which came after conditions changed."""
        self.restart()
        self._recent.extend(log_paces)
        self._expected.extend(log_paces)
        self._sum_ns = math.fsum(math.exp(x) for x in self._recent)
        self._since_switch = SETTLE_STEPS

    def drop_nulls(self, windows: int) -> None:
        """Drop the null pairs of the last windows: a change lies within them, so they are not noise."""
        for _ in range(min(len(self._noise), windows // 2 + 1)):
            self._noise.pop()

    def add_nulls(self, pairs: Sequence[float]) -> None:
        """Add null pairs from the longer stretches of a trial."""
        self._noise.extend(pairs)

    def follow(self, log_pace: float) -> None:
        """Take a judged step of a trial that had this setting in force."""
        if len(self._recent) == RECENT_STEPS_MAX:
            self._sum_ns -= math.exp(self._recent[0])
        self._recent.append(log_pace)
        self._expected.append(log_pace)
        self._sum_ns += math.exp(log_pace)

    def observe(self, pace_ns: int, *, profiled: bool) -> float | None:
        """Take one step; return the level of the window (log pace) that it completes, if it does."""
        self._since_switch += 1
        if self._since_switch <= SETTLE_STEPS or profiled:
            return None
        log_pace = math.log(pace_ns)
        self.follow(log_pace)
        self._filling.append(log_pace)
        pause = 0 if self._half is None else SETTLE_STEPS  # as between the windows of a trial
        end = pause + self.window_steps
        if len(self._filling) < end:
            return None
        if not self._is_sized:
            self._is_sized = True
            if max(self._filling) - min(self._filling) <= QUIET_SPREAD:
                end = self.window_steps = QUIET_WINDOW_STEPS
        level, self._filling = location(self._filling[pause:end]), self._filling[end:]
        if self._half is None:
            self._half = level
        else:
            self._noise.append(self._half - level)
            self._half = None
        return level

    @property
    def nulls(self) -> tuple[float, ...]:
        """The last null pairs, for weighing a trial."""
        return tuple(self._noise)[-NULL_PAIRS_MAX:]

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
        """The last window's worth of settled steps without a break, or all if there are fewer."""
        count = min(self.window_steps, self.settled_steps, len(self._recent))
        return list(self._recent)[len(self._recent) - count :]

    def last(self, steps: int) -> list[float]:
        """Return the last steps, at most those of two windows."""
        return list(self._recent)[-min(steps, 2 * self.window_steps) :]

    def jump(self, step: int, *, surely: bool = True) -> PaceAlarm | None:
        """Return how far the pace has jumped, as the steps up to `step` show; else None.

        Not `surely`: half as many steps suffice, to suspect it.
        """
        paces, last = self._expected, len(self._expected) - 1
        if last < BEFORE_STEPS_MIN or abs(paces[last] - paces[last - BEFORE_STEPS_MIN]) < JUMP_MIN / 2:
            return None  # cheap: asked at every step
        count = max(JUMP_STEPS, math.ceil(JUMP_NS / math.exp(paces[last]))) if surely else JUMP_STEPS // 2
        if last < BEFORE_STEPS_MIN + count:
            return None
        all_paces = list(paces)
        before, after = all_paces[:-count], all_paces[-count:]
        usual = median(before)
        shift = median(after) - usual
        spread = median(abs(pace - usual) for pace in before) / QUARTILE * (1 + 1 / math.sqrt(len(before)))
        if abs(shift) < max(JUMP_MIN, JUMP_SPREADS * spread, JUMP_NOISES * self.window_noise):
            return None
        if sum((pace - usual) / shift > 1 / 2 for pace in after) < JUMP_SHARE * count:
            return None
        return PaceAlarm(math.expm1(shift), math.ceil(count / self.window_steps), step - count)

    @property
    def typical(self) -> float:
        """Median log pace; raises ValueError before the first settled step."""
        if not self._recent:
            raise ValueError("no step was judged yet")
        return median(self._recent)

    @property
    def typical_ns(self) -> float:
        """Median pace; raises ValueError before the first settled step."""
        return math.exp(self.typical)

    def of_incumbent(self) -> IncumbentPace:
        """Return what a trial is compared with; raises ValueError before the first settled step."""
        typical = self.typical
        slow = sum(log_pace > typical + math.log(DROP_RATIO) for log_pace in self._recent)
        # Right after a change only few steps are known, but windows from before it, too.
        noise = max(self.window_noise, median(abs(log_pace - typical) for log_pace in self._recent) / QUARTILE)
        return IncumbentPace(
            opening=self.opening, nulls=self.nulls, typical=typical, slow_ratio=slow / len(self._recent),
            step_noise=noise, window_steps=self.window_steps,
        )  # fmt: skip

    @property
    def mean_ns(self) -> float:
        """Mean pace with rare slow steps: what the setting really costs."""
        if not self._recent:
            raise ValueError("no step was judged yet")
        return self._sum_ns / len(self._recent)

    @property
    def window_noise(self) -> float:
        """Standard deviation of a window's level, from null pairs (a pair varies by the root of two more)."""
        if not self._noise:
            return NOISE_MIN
        # With few pairs the estimate may be low by half, so raise it by its own error.
        margin = 1 + 1 / math.sqrt(len(self._noise))
        # The median, because one window full of spikes must not raise the noise and hide a change.
        return max(NOISE_MIN, margin * median(abs(x) for x in self._noise) / (QUARTILE * math.sqrt(2)))


@dataclass(frozen=True, slots=True)
class PaceAlarm:
    """The pace moved; `change_ratio` is the new pace over the reference, less one (positive: slower).

    It was suspected at step `suspected_at`; later steps belong to the new conditions.
    """

    change_ratio: float
    windows: int
    suspected_at: int


class PaceTracker:
    """Raises an alarm when window levels leave their reference for good."""

    def __init__(self) -> None:
        self._reference: float | None = None
        self._seen = 0
        self._slower = self._faster = 0.0
        self._run: list[float] = []
        self._confirming: list[float] | None = None
        self._suspected = 0.0
        self._suspected_at = 0

    @property
    def suspicion(self) -> PaceAlarm | None:
        """The change that is being confirmed, or None."""
        if self._confirming is None:
            return None
        windows = len(self._run) + len(self._confirming)
        return PaceAlarm(math.expm1(self._suspected), windows, self._suspected_at)

    def observe(self, level: float, noise: float, *, step: int) -> PaceAlarm | None:
        """Take the level of the window that `step` ended; return an alarm at most once: then make a new PaceTracker."""
        self._seen += 1
        if self._reference is None:
            self._reference = level
            return None
        if self._confirming is not None:
            return self._confirm(level, self._reference, noise, step)
        # The reference is a mean of windows too, with an error of its own.
        score = (level - self._reference) / (noise * math.sqrt(1 + 1 / self._seen))
        score = max(-CLIP, min(CLIP, score))
        self._slower = max(0.0, self._slower + score - SLACK)
        self._faster = max(0.0, self._faster - score - SLACK)
        self._run = [*self._run[1 - RUN_MAX :], level] if max(self._slower, self._faster) > 0 else []
        if max(self._slower, self._faster) >= ALARM:
            shift = median(self._run[-3:]) - self._reference
            if abs(shift) >= max(SHIFT_MIN, SHIFT_NOISES * noise):
                self._confirming, self._suspected, self._suspected_at = [], shift, step
                return None
        self._reference += max(FOLLOW, 1 / self._seen) * score * noise
        return None

    def _confirm(self, level: float, reference: float, noise: float, step: int) -> PaceAlarm | None:
        """Check whether a suspected change has lasted; if not, the sums begin again."""
        assert self._confirming is not None
        self._confirming.append(level)
        is_jump = abs(self._suspected) >= JUMP_MIN
        has_lasted = is_jump or step - self._suspected_at >= CONFIRM_STEPS
        if len(self._confirming) < CONFIRM_WINDOWS_MIN or not has_lasted:
            return None
        shift = median(self._confirming) - reference
        windows = len(self._run) + len(self._confirming)
        self._confirming, self._run = None, []
        self._slower = self._faster = 0.0
        if abs(shift) >= max(SHIFT_MIN, SHIFT_NOISES * noise) and shift * self._suspected > 0:
            return PaceAlarm(math.expm1(shift), windows, self._suspected_at)
        return None
