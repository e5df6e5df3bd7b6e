"""Fits the alpha-beta model, t = alpha + bytes * beta, to a table of median times by size.

Ordinary least squares is decided by the largest size: an error of 1 % there exceeds the times of all small sizes, and
alpha may even be negative.  So relative errors are squared, and each size counts the same.  A size that was timed while
the machine was busy must not move the line: outliers count less (Huber's weights, by iteration).

    t = alpha + bytes * beta      R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994)
    half of the bandwidth is reached at alpha / beta bytes, his n_1/2
    weights                       P. Huber, "Robust estimation of a location parameter" (1964), k = 1.345

The line is only a model: NCCL changes protocol and algorithm with the size, a token bucket lets a burst pass, a cache
overflows.  The residual tells how far off it is, and at which size.

Pure.  Left out: a break where the protocol changes, which nine sizes cannot distinguish from noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["METHOD", "SIZES_MIN", "Fit", "fit_line"]

METHOD = "least squares of relative errors with Huber's weights, none of both negative"

SIZES_MIN = 3
"""A line through two sizes has no residual."""

ROUNDS = 20
"""Rounds of reweighting; it settles in five."""

HUBER_K = 1.345
"""95 % of the efficiency of least squares where errors are normal."""

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation of a normal distribution."""

SIGMA_MIN = 0.01
"""No timing is better than 1 %.  Without this bound, a perfect fit except for one size would divide by zero."""

DISTINCT_MIN = 1e-6
"""1 - cos^2 of the two columns; below this, the sizes are too similar to separate alpha from beta."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The line and its residuals, as shares of the measured time."""

    alpha_ns: float
    ns_per_byte: float
    residual_ratio: float
    worst_residual_ratio: float
    worst_bytes: int

    @property
    def bytes_per_second(self) -> float | None:
        """Algorithm bandwidth for very large sizes; None if the time does not grow with the size."""
        return 1e9 / self.ns_per_byte if self.ns_per_byte > 0 else None

    @property
    def half_bytes(self) -> float | None:
        """The size that reaches half of that bandwidth; None if the time does not grow with the size."""
        return self.alpha_ns / self.ns_per_byte if self.ns_per_byte > 0 else None


def fit_line(sizes: Sequence[int], times_ns: Sequence[float]) -> Fit | None:
    """Fit the table; None with fewer than SIZES_MIN distinct sizes."""
    table = [(size, time) for size, time in zip(sizes, times_ns, strict=True) if time > 0]
    if len({size for size, _ in table}) < SIZES_MIN:
        return None
    weights = [1.0] * len(table)
    line = _line(table, weights)
    for _ in range(ROUNDS):
        if line is None:
            return None
        residuals = _residuals(table, line)
        bound = HUBER_K * max(SIGMA_MIN, MAD_TO_SIGMA * median(abs(residual) for residual in residuals))
        weights = [1.0 if abs(residual) <= bound else bound / abs(residual) for residual in residuals]
        line = _line(table, weights)
    if line is None:
        return None
    residuals = _residuals(table, line)
    worst = max(range(len(table)), key=lambda i: abs(residuals[i]))
    mean_square = math.fsum(residual * residual for residual in residuals) / len(residuals)
    return Fit(line[0], line[1], math.sqrt(mean_square), residuals[worst], table[worst][0])


def _residuals(table: Sequence[tuple[int, float]], line: tuple[float, float]) -> list[float]:
    alpha, beta = line
    return [(time - alpha - size * beta) / time for size, time in table]


def _line(table: Sequence[tuple[int, float]], weights: Sequence[float]) -> tuple[float, float] | None:
    """Solve the normal equations of sum of w ((t - alpha - s beta) / t)^2; None if they are singular."""
    rows = [(weight, 1 / time, size / time) for (size, time), weight in zip(table, weights, strict=True)]
    aa, bb = math.fsum(w * a * a for w, a, _ in rows), math.fsum(w * b * b for w, _, b in rows)
    ab = math.fsum(w * a * b for w, a, b in rows)
    determinant = aa * bb - ab * ab
    if determinant <= DISTINCT_MIN * aa * bb:
        return None
    a_sum, b_sum = math.fsum(w * a for w, a, _ in rows), math.fsum(w * b for w, _, b in rows)
    alpha, beta = (a_sum * bb - b_sum * ab) / determinant, (b_sum * aa - a_sum * ab) / determinant
    if alpha < 0:
        return 0.0, b_sum / bb
    if beta < 0:
        return a_sum / aa, 0.0
    return alpha, beta
