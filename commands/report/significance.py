"""Decides what may be claimed of a difference between two stretches, by its interval and by their own drift.

A difference is claimed when its interval leaves zero out and it is larger than what either stretch differs from itself
between its halves: an interval sees the noise inside a stretch, and a machine that drifted by 40 % proves no 18 %.

Left out: what trials proved (`pacecar.run_statistics`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.formatting.quantities import percent

from .figures import Interval, drift_ratio

__all__ = ["judge", "noise_of"]


def noise_of(*stretches: Sequence[float]) -> float | None:
    """Return the largest drift inside any of the stretches; None where none is long enough."""
    return max((abs(drift) for rates in stretches if (drift := drift_ratio(rates)) is not None), default=None)


def judge(change: Interval | None, noise: float | None, what: str = "run") -> tuple[str, str]:
    """Return what may be claimed, and why no more; `what` names the things compared."""
    if change is None:
        return "not comparable", "one of them has no steps to compare"
    if change.low is None or change.high is None or noise is None:
        return "not decided", "too few windows to know the noise"
    if change.low <= 0 <= change.high:
        return "no difference shown", "the interval holds zero"
    if abs(change.change_ratio) <= noise:
        return "no difference shown", f"a {what} differs from itself by {percent(noise)} between its halves"
    word = "faster" if change.change_ratio > 0 else "slower"
    return word, f"the interval leaves zero out, and no {what} differs from itself by more than {percent(noise)}"
