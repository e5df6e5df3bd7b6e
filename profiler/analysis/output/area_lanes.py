"""Draws lanes in which area is time: cut into columns, each filled as high as the work in it lasted.

A step of a language model has a million kernels, and a lane a thousand pixels.  Bars one kernel wide would overlap or
vanish; a column that is filled by the share of its time stays true at any density.

Pure: unions of intervals in, numbers and path data of SVG out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...ledger.intervals import Intervals

__all__ = ["area_path", "coverage"]


def coverage(rows: Intervals, window: tuple[int, int], columns: int) -> NDArray[np.float64]:
    """Return how much of each column a union covers, 0..1."""
    # Relative to the window's start: floats of nanoseconds since the epoch would be too coarse.
    edges = np.linspace(0, window[1] - window[0], columns + 1)
    if len(rows) == 0:
        return np.zeros(columns)
    # The time covered up to an instant is piecewise linear, with its corners at the edges of the rows.
    lengths = np.concatenate(([0], np.cumsum(rows[:, 1] - rows[:, 0])))
    corners = np.stack((lengths[:-1], lengths[1:]), axis=1).ravel()
    covered = np.interp(edges, (rows - window[0]).ravel(), corners, left=0, right=float(lengths[-1]))
    filled: NDArray[np.float64] = np.clip(np.diff(covered) / np.diff(edges), 0, 1)
    return filled


def area_path(
    below: NDArray[np.float64], filled: NDArray[np.float64], top: float, height: float, left: float, wide: float = 1
) -> str:
    """Return the path data that fills each column, `wide` units each, from `below` on by `filled`, 0..1 of the lane."""
    low = np.round(top + height * (1 - below), 2)
    high = np.round(top + height * (1 - below - filled), 2)
    pieces = []
    at = 0
    while at < len(filled):
        end = at + 1
        while end < len(filled) and low[end] == low[at] and high[end] == high[at]:
            end += 1
        if low[at] > high[at]:
            x, to = round(left + at * wide, 1), round(left + end * wide, 1)
            pieces.append(f"M{x:g} {low[at]:g}H{to:g}V{high[at]:g}H{x:g}Z")
        at = end
    return "".join(pieces)
