"""Decides whether two stretches differ: the interval of the difference excludes zero, and it exceeds their drift.

An interval sees only the noise inside a stretch.  A machine that drifted by 40 % cannot show a gain of 18 %, so the
difference must also exceed what either stretch differs between its own halves.

Left out: what trials proved (`pacecar.run_statistics`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.formatting.quantities import percent

from .figures import Interval, drift_ratio

__all__ = ["judge", "noise_of"]


def noise_of(*stretches: Sequence[float]) -> float | None:
    """Return the largest drift inside any of the stretches; None if all are too short."""
    return max((abs(drift) for rates in stretches if (drift := drift_ratio(rates)) is not None), default=None)


def judge(change: Interval | None, noise: float | None, what: str = "run") -> tuple[str, str]:
    """Return the verdict and its reason; `what` names the things compared."""
    if change is None:
        return "not comparable", "one of them has no steps to compare"
    if change.low is None or change.high is None or noise is None:
        return "not decided", "too few windows to know the noise"
    if change.low <= 0 <= change.high:
        return "no difference shown", "the interval contains zero"
    if abs(change.change_ratio) <= noise:
        return "no difference shown", f"a {what} differs from itself by {percent(noise)} between its halves"
    word = "faster" if change.change_ratio > 0 else "slower"
    return word, f"the interval excludes zero, and no {what} differs from itself by more than {percent(noise)}"
