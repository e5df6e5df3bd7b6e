"""Detects that training diverges under gradient compression, by a clipped CUSUM of loss and gradient norm.

Every second step has a higher loss than the one before, and a trend is not known: a falling loss flattens, so a line
through the past predicts too low and raises false alarms.  So the loss has to stay above the *lowest level it has had*,
by more than its own noise, for long enough.

    level    median of the last LEVEL_STEPS steps; for the loss the lowest such median so far, so that a slow rise does
             not become normal
    scale    noise between steps by median absolute deviations, enlarged where neighbouring steps are correlated
    score    S = max(0, S + min(z, CLIP) - SLACK),  z = (x - level) / scale       (CUSUM: Page 1954; clipped, so that a
             single wild step cannot raise the alarm: 5 must agree)
    alarm    S > LIMIT: 5 to 10 steps after a jump of 5 scales, some 10 after one of 3, some 25 after one of 2

For positive losses x is the logarithm.  The norm is judged likewise, with a wide floor for its scale, because it
wanders by itself.  top-k and PowerSGD change the norm by design, so its level is learned again under them.  A loss that
is not finite raises the alarm at once, a norm after NONFINITE_MAX steps in a row (a GradScaler makes single ones).

False alarms in 400 simulated runs of 10 000 steps: none with normal noise, 1 with heavy tails (Student's t
with 3 degrees), 12 where neighbouring steps are correlated by 0.3, all of them if the loss stands still.

Left out: a loss that falls more slowly than it would have.  That needs a second run to compare with.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

__all__ = ["LEVEL_STEPS", "NONFINITE_MAX", "Band", "DivergenceAlarm", "DivergenceDetector", "DivergenceSignals"]

LEVEL_STEPS = 64
"""Steps in a level: its error is then 0.16 scales."""

LEVEL_STEPS_MIN = 32
"""With fewer steps before compression began, level and scale are learned under it."""

SLACK = 1.5
"""Well above 0.5 scales, by which the lowest of many medians lies below the level of a constant loss."""

LIMIT = 12.0

CLIP = 4.0

LOSS_SCALE_MIN = 0.01
"""A loss without noise (the same batch again and again) may move by a percent."""

NORM_SCALE_MIN = 0.35
"""Lets a norm drift to 1.5 times its level; twice the level is found in some 20 steps, four times in 4."""

NONFINITE_MAX = 3

CORRELATION_MAX = 0.4
"""A higher correlation between neighbouring steps counts as a trend."""

DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, of normal noise."""


@dataclass(frozen=True, slots=True)
class DivergenceSignals:
    """One step's loss and gradient norm, None if unknown; either may be infinite or not a number.

    `choice` is the compression that the step ran under.
    """

    step: int
    loss: float | None
    norm: float | None
    choice: str = "none"


@dataclass(frozen=True, slots=True)
class DivergenceAlarm:
    """A signal left its band at `step`; `reason` says how, for people."""

    signal: str
    step: int
    reason: str


class Band:
    """The level and scale of one signal, and its CUSUM score.  With `ratchet` the level only falls."""

    def __init__(self, name: str, *, scale_min: float, ratchet: bool) -> None:
        self.name = name
        self.score = 0.0
        self._scale_min = scale_min
        self._ratchet = ratchet
        self._recent: deque[float] = deque(maxlen=LEVEL_STEPS)
        self._is_log = True
        self._level: float | None = None
        self._scale = scale_min
        self._nonfinite = 0
        self._over_steps = 0

    def learn(self, value: float) -> None:
        """Learn from a step that is not judged; the last of these make the band."""
        self._nonfinite = 0
        if math.isfinite(value):
            self._recent.append(value)

    def begin(self, *, restarts: bool = False) -> None:
        """Judge steps from now on, by earlier steps or, if it `restarts`, by the first ones to come."""
        self.score, self._level, self._over_steps = 0.0, None, 0
        if restarts:
            self._recent.clear()
        elif len(self._recent) >= LEVEL_STEPS_MIN:
            self._set_level()

    def end(self) -> None:
        """Stop judging and learn from steps again."""
        if self._level is not None and self._is_log:
            self._recent = deque((math.exp(x) for x in self._recent), maxlen=LEVEL_STEPS)
        self._level, self.score = None, 0.0

    def judge(self, value: float, *, nonfinite_max: int) -> str | None:
        """Take a step; return how the signal has left its band, or None."""
        if not math.isfinite(value):
            self._nonfinite += 1
            return f"{self.name} is {value}" if self._nonfinite >= nonfinite_max else None
        if self._level is None:
            self.learn(value)
            if len(self._recent) >= LEVEL_STEPS_MIN:
                self._set_level()
            return None
        self._nonfinite = 0
        x = (math.log(value) if value > 0 else -math.inf) if self._is_log else value
        z = (x - self._level) / self._scale
        self.score = max(0.0, self.score + min(z, CLIP) - SLACK)
        self._over_steps = self._over_steps + 1 if self.score > 0 else 0
        if self.score > LIMIT:
            level = math.exp(self._level) if self._is_log else self._level
            by = f"by {z:.1f} times its noise, for {self._over_steps} steps"
            return f"{self.name} {value:.4g} is above {level:.4g} {by}"
        if math.isfinite(x):
            self._recent.append(x)
        if len(self._recent) == LEVEL_STEPS:
            now = median(self._recent)
            self._level = min(self._level, now) if self._ratchet else now
        return None

    def _set_level(self) -> None:
        """Set level and scale from the learned steps; `_recent` then holds logarithms if all were positive."""
        self._is_log = min(self._recent) > 0
        if self._is_log:
            self._recent = deque((math.log(value) for value in self._recent), maxlen=LEVEL_STEPS)
        self._level = median(self._recent)
        floor = self._scale_min if self._is_log else self._scale_min * abs(self._level)
        self._scale = max(_noise(tuple(self._recent), self._level), floor, 1e-12)


def _noise(values: Sequence[float], level: float) -> float:
    """Return the noise of a signal with a trend: differences cancel the trend, values show the correlation.

    Var(difference) = 2 Var (1 - r) tells the correlation r of neighbours; sums of correlated noise, which is what a
    CUSUM looks at, deviate by sqrt((1 + r) / (1 - r)) more.  A trend looks like correlation, so r has a bound.
    """
    steps = [abs(b - a) for a, b in pairwise(values)]
    step_spread = DEVIATION * median(steps) / math.sqrt(2)
    spread = DEVIATION * median(abs(x - level) for x in values)
    if step_spread <= 0 or spread <= step_spread:
        return step_spread
    correlation = min(CORRELATION_MAX, 1 - (step_spread / spread) ** 2)
    return step_spread / math.sqrt(1 - correlation) * math.sqrt((1 + correlation) / (1 - correlation))


class DivergenceDetector:
    """Judges loss and norm while a compression is in force, and learns from them while none is."""

    def __init__(self) -> None:
        self._loss = Band("the loss", scale_min=LOSS_SCALE_MIN, ratchet=True)
        self._norm = Band("the gradient norm", scale_min=NORM_SCALE_MIN, ratchet=False)
        self._choice = "none"

    def observe(self, signals: DivergenceSignals) -> DivergenceAlarm | None:
        """Take one step; return an alarm when a signal has left its band."""
        choice = signals.choice
        if choice != self._choice:
            self._change_choice(choice)
        for band, value, nonfinite_max in ((self._loss, signals.loss, 1), (self._norm, signals.norm, NONFINITE_MAX)):
            if value is None:
                continue
            if choice == "none":
                band.learn(value)
                continue
            reason = band.judge(value, nonfinite_max=nonfinite_max)
            if reason is not None:
                return DivergenceAlarm(band.name, signals.step, f"{reason} under {choice}")
        return None

    def _change_choice(self, choice: str) -> None:
        before, self._choice = self._choice, choice
        if choice == "none":
            self._loss.end()
            self._norm.end()
            return
        if before == "none":
            self._loss.begin()
        if before == "none" or choice in ("topk", "powersgd"):
            self._norm.begin(restarts=choice in ("topk", "powersgd"))
