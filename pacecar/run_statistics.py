"""Computes what the kept changes save together, with bounds, for the demo's closing tables and for a report.

The kept changes were picked because they measured well, so the product of what they measured is too good; the product
of their lower bounds is not.  So the lower bound is what counts as proven, and the measured value stands beside it.

Left out: comparing minutes that lie apart (`pacecar.comparing`), where another load on the machine is in the figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

__all__ = ["Proven", "Tried", "proven"]


class Tried(Protocol):
    """A change that went through an interleaved trial: what it saved of step time (0..1), and the bounds of that."""

    @property
    def measured_gain_ratio(self) -> float | None:
        """As measured; None where nothing was."""
        ...

    @property
    def gain_low(self) -> float | None:
        """The lower bound; None where there was too little to bound it."""
        ...

    @property
    def gain_high(self) -> float | None:
        """The upper bound; None where there was too little to bound it."""
        ...


class Proven(NamedTuple):
    """Share of step time (0..1) that changes save together; None where one of them has no such figure, or none is."""

    ratio: float | None
    low: float | None
    high: float | None


def proven(kept: Iterable[Tried]) -> Proven:
    """Return what the changes in force save together, each as its own interleaved trial measured it.

    Each bound is wrong at most at the tuner's rate of false accepts, so those of k changes together at k times that.
    """
    known = list(kept)
    gains = (
        [one.measured_gain_ratio for one in known],
        [one.gain_low for one in known],
        [one.gain_high for one in known],
    )
    return Proven(*map(_together, gains))


def _together(gains: Sequence[float | None]) -> float | None:
    known = [gain for gain in gains if gain is not None]
    return 1 - math.prod(1 - gain for gain in known) if known and len(known) == len(gains) else None
