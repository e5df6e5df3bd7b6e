"""Reproduces Horovod's autotuner: Bayesian optimization with a Gaussian process, then stop.

After horovod/common/parameter_manager.cc and horovod/common/optim of 0.28: a sample is the median of five windows of
ten steps; three samples are warm-up; then 4, 32, 16 and 8 MiB, then what maximizes the expected improvement (xi 0.01)
of a process with squared-exponential kernel (one length for all dimensions, MiB as they are, 0 to 64) and noise 0.8 on
standardized scores; 21 samples in all.  Steps after a switch count.  Parameters are chained: all of that is done again
for each value of a choice.  The best single sample wins, however lucky.

It differs only in its own favour: length and height of the kernel are the best of a grid (the original descends from 1
and 1, where the likelihood of samples 4 MiB apart is flat), and expected improvement is evaluated at every existing
setting instead of by descent and rounding.  Scales other than bytes are stretched over the same 0 to 64.
Left out: the cycle time, which DDP does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacecar.controller.observation import KnobSpace
from pacecar.knobs import by_name

__all__ = ["GaussianProcessSampler", "expected_improvement", "fit"]

WARMUP_SAMPLES = 3
SAMPLES_MAX = 20
NOISE = 0.8
XI = 0.01
SPAN = 64.0
FIRST = (4.0, 32.0, 16.0, 8.0)
"""Horovod's defaults; `FIRST` are its test points, on the scale 0 to `SPAN`."""

SETTINGS_MAX = 4096
"""Most settings that the next one is chosen from; of more, an even sample."""

LENGTHS = tuple(2.0**k for k in range(-1, 8))
HEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The grid of kernel lengths and heights; lengths from under a MiB to twice the span."""

MIB = 2**20


class GaussianProcessSampler:
    """See the module's docstring."""

    windows = 5
    window_steps = 10
    settle_steps = 0

    def __init__(self) -> None:
        self._start: dict[str, int] = {}
        self._settings: list[tuple[tuple[float, ...], dict[str, int]]] = []
        self._choices: list[dict[str, int]] = [{}]
        self._next: tuple[tuple[float, ...], dict[str, int]] | None = None
        self._restart()

    def _restart(self) -> None:
        self._scores: list[tuple[tuple[float, ...], float]] = []
        self._warmups = WARMUP_SAMPLES
        self._best: tuple[float, dict[str, int]] | None = None

    def begin(self, spaces: Sequence[KnobSpace]) -> None:
        """Lay out the settings that exist, and start over."""
        self._restart()
        self._start = {space.knob: space.value for space in spaces}
        chosen = [space for space in spaces if _is_choice(space.knob)]
        scales = [space for space in spaces if not _is_choice(space.knob)]
        values = list(product(*(_places(space) for space in scales)))
        values = values[:: -(-len(values) // SETTINGS_MAX)]
        names = [space.knob for space in scales]
        self._settings = [
            (tuple(x for x, _ in places), dict(zip(names, (v for _, v in places), strict=True))) for places in values
        ]
        self._choices = [
            dict(zip([space.knob for space in chosen], picked, strict=True))
            for picked in product(*((space.value, *(v for v in space.domain if v != space.value)) for space in chosen))
        ]
        self._next = self._nearest(FIRST[0])

    @property
    def best(self) -> dict[str, int]:
        """The setting of the best sample."""
        return dict(self._start) if self._best is None else dict(self._best[1])

    def propose(self) -> dict[str, int] | None:
        """Return the next sample's setting."""
        if self._next is None or not self._choices or not self._start:
            return None
        return {**self._next[1], **self._choices[0]}

    def tell(self, values: Mapping[str, int], pace_ns: float) -> bool:
        """Take a sample's score: bytes a second, which is the inverse of the pace."""
        if self._warmups > 0:
            self._warmups -= 1
            return False
        assert self._next is not None
        score = 1e9 / pace_ns
        if self._best is None or score > self._best[0]:
            self._best = (score, {knob: values[knob] for knob in self._start})
        self._scores.append((self._next[0], score))
        count = len(self._scores)
        if count > SAMPLES_MAX or len(self._settings) == 1:
            del self._choices[0]
            self._scores = []
            self._next = self._nearest(FIRST[0])
        elif count < len(FIRST):
            self._next = self._nearest(FIRST[count])
        else:
            self._next = self._settings[self._most_promising()]
        return True

    def _nearest(self, place: float) -> tuple[tuple[float, ...], dict[str, int]]:
        return min(self._settings, key=lambda setting: sum((x - place) ** 2 for x in setting[0]))

    def _most_promising(self) -> int:
        x = np.array([place for place, _ in self._scores])
        y = np.array([score for _, score in self._scores])
        spread = float(y.std())
        y = (y - y.mean()) / (spread if spread > 0 else 1.0)
        length, height = fit(x, y)
        there = np.array([place for place, _ in self._settings])
        return int(np.argmax(expected_improvement(there, x, y, length, height)))


def fit(x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float]:
    """Return the kernel's length and height of highest likelihood on the grid (Rasmussen & Williams 2006, 2.30)."""

    def log_likelihood(length: float, height: float) -> float:
        lower = np.linalg.cholesky(_kernel(x, x, length, height) + NOISE**2 * np.eye(len(x)))
        half = np.linalg.solve(lower, y)
        return float(-0.5 * half @ half - np.log(np.diag(lower)).sum())

    return max(product(LENGTHS, HEIGHTS), key=lambda pair: log_likelihood(*pair))


def expected_improvement(
    there: NDArray[Any], x: NDArray[Any], y: NDArray[Any], length: float, height: float
) -> NDArray[Any]:
    """Return the expected improvement at `there` over the best mean at `x` (Brochu, Cora & de Freitas 2010, 2.4)."""
    inverse = np.linalg.inv(_kernel(x, x, length, height) + NOISE**2 * np.eye(len(x)))
    across = _kernel(there, x, length, height)
    mean = across @ inverse @ y
    variance = height**2 - np.einsum("ij,jk,ik->i", across, inverse, across)
    sigma = np.sqrt(np.maximum(variance, 1e-12))
    gain = mean - (_kernel(x, x, length, height) @ inverse @ y).max() - XI
    z = gain / sigma
    below = np.array([0.5 * math.erfc(-float(value) / math.sqrt(2)) for value in z])
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    result: NDArray[Any] = gain * below + sigma * density
    return result


def _kernel(a: NDArray[Any], b: NDArray[Any], length: float, height: float) -> NDArray[np.float64]:
    squares = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
    result: NDArray[np.float64] = height**2 * np.exp(-0.5 * squares / length**2)
    return result


def _is_choice(knob: str) -> bool:
    known = by_name.get(knob)
    return known is not None and known.kind == "choice"


def _places(space: KnobSpace) -> list[tuple[float, int]]:
    """Return where each value of a scale stands between 0 and `SPAN`, those beyond left out."""
    if space.knob.endswith("_bytes"):
        return [(value / MIB, value) for value in space.domain if value <= SPAN * MIB or value == space.domain[0]]
    low, high = space.domain[0], space.domain[-1]
    return [(SPAN * (value - low) / max(1, high - low), value) for value in space.domain]
