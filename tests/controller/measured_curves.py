"""Real jobs to replay policies on: the sweeps that `make bench-tuning` measured, as curves.

The step times are measured (medians over the steps of a sweep, of all files of a case).  The sweeps did not keep what a
window would show of a setting, so that comes from a fit: DDP's timeline (`bucket_model`) with the five constants
nearest to all settings of the sweep, given with their mean distance in percent of the step.  Policies are judged by the
measured steps; the fit only feeds their forecasts.

Left out: compression, which has no sweep; a link that changes (its first half is a sweep like any other).

`python -m tests.controller.measured_curves` writes docs/measurements/tuning-curves.json anew and prints the fits as
Markdown; a test compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, median

from bench.tuning_job import SHAPES, make_model
from pacecar.controller.forecast.bucket_model import pack_buckets, play
from tests.controller.curves import DEFAULT, MEASURED, MIB, Curve, Point, dump

SWEEPS = MEASURED.parent / "tuning"
CHANGE = ", then "

DISTURBED = 1.1
"""A sweep whose median is over so many times another's of that case and size; calm ones are up to 7 % apart."""

MODELS = ("stack10", "deep", "wide", "gpt")
SPREADS = (0.5, 1.0, 2.0)
ALPHAS_MS = (0.2, 2.0, 20.0)
STEP_MIN = 0.001
"""Where the search of a constant ends: a tenth of a percent."""


@dataclass(frozen=True)
class Fit:
    """What DDP's timeline makes of a sweep: times in ns, and the mean distance from the measured steps (a ratio)."""

    fixed_ns: float
    backward_ns: float
    alpha_ns: float
    ns_per_byte: float
    hidden_ratio: float
    """What a nanosecond of all-reduce under backward adds to the step."""
    error_ratio: float = 0.0

    def point(self, buckets: Sequence[int], step_ns: float | None = None) -> Point:
        """Return what a window would show; the step's time is the fitted one unless it was measured."""
        timeline = play(buckets, self.backward_ns, self.alpha_ns, self.ns_per_byte)
        fitted = self.fixed_ns + self.backward_ns + timeline.exposed_ns + self.hidden_ratio * timeline.overlapped_ns
        return Point(
            round(fitted if step_ns is None else step_ns),
            round(timeline.exposed_ns),
            round(timeline.communication_ns),
            round(self.alpha_ns),
            round(self.ns_per_byte, 4),
        )


@cache
def gradient_bytes(model: str) -> tuple[int, ...]:
    """Return the model's gradients in the order in which backward has them: the last layer's first."""
    if model in SHAPES:
        shape = SHAPES[model]
        return tuple(4 * parameters for parameters in reversed(shape.parameters))
    network, _, _ = make_model(model)
    return tuple(parameter.numel() * parameter.element_size() for parameter in reversed(list(network.parameters())))


def sweeps(folder: Path = SWEEPS) -> dict[str, dict[int, list[float]]]:
    """Return case -> bucket bytes (0: DDP's default) -> seconds of its steps, of every file in the folder.

    Others who take the processors only ever lengthen steps: a size that another sweep of the case found over DISTURBED
    times as fast was disturbed in this one, and its steps here are left out.
    """
    found: dict[str, dict[int, list[list[float]]]] = {}
    for file in sorted(folder.glob("*.json")):
        for case in json.loads(file.read_text()):
            levels = found.setdefault(case["case"].partition(CHANGE)[0], {})
            for size, seconds in case["curve_seconds"].items():
                levels.setdefault(int(size), []).append(seconds)
    return {name: {size: _undisturbed(taken) for size, taken in levels.items()} for name, levels in found.items()}


def _undisturbed(taken: Sequence[Sequence[float]]) -> list[float]:
    fastest = min(map(median, taken))
    return [one for seconds in taken if median(seconds) <= DISTURBED * fastest for one in seconds]


def buckets_of(gradients: Sequence[int], size: int) -> list[int]:
    """Return the buckets that DDP makes with the setting of a sweep."""
    return pack_buckets(gradients, size, None) if size else pack_buckets(gradients, DEFAULT, MIB)


def pooled(gradients: Sequence[int], taken: dict[int, list[float]]) -> dict[int, list[float]]:
    """Return each size's steps with those of the sizes that make the same buckets: one setting, swept several times."""
    made = {size: buckets_of(gradients, size) for size in taken}
    return {size: [one for other in taken if made[other] == made[size] for one in taken[other]] for size in taken}


def fit(gradients: Sequence[int], levels: dict[int, float]) -> Fit:
    """Return the constants that come nearest to `levels` (bucket bytes, 0 for the default -> ns)."""
    made = {size: tuple(buckets_of(gradients, size)) for size in levels}
    least = min(levels.values())

    def constants(logs: Sequence[float]) -> Fit:
        return Fit(*(math.exp(log) for log in logs))

    def distance(logs: Sequence[float]) -> float:
        fitted = constants(logs)
        played = {buckets: fitted.point(buckets).step_ns for buckets in set(made.values())}  # most sizes make the same
        return fmean(math.log(played[made[size]] / level) ** 2 for size, level in levels.items())

    starts = [
        (0.2 * least, 0.4 * least, alpha_ms * 1e6, spread * least / sum(gradients), 0.05)
        for alpha_ms, spread in product(ALPHAS_MS, SPREADS)
    ]
    best = min((_descend([math.log(x) for x in start], distance) for start in starts), key=distance)
    fitted = constants(best)
    error = fmean(abs(fitted.point(made[size]).step_ns / level - 1) for size, level in levels.items())
    return Fit(*(getattr(fitted, name) for name in Fit.__dataclass_fields__ if name != "error_ratio"), error)


def _descend(at: list[float], distance: Callable[[Sequence[float]], float]) -> list[float]:
    """Search by turns along each axis, with steps that halve where none helps (Hooke and Jeeves 1961)."""
    here, step = distance(at), 0.5
    while step > STEP_MIN:
        has_moved = False
        for axis in range(len(at)):
            for move in (step, -step):
                tried = [*at[:axis], at[axis] + move, *at[axis + 1 :]]
                there = distance(tried)
                if there < here:
                    at, here, has_moved = tried, there, True
                    break
        if not has_moved:
            step /= 2
    return at


def measured(folder: Path = SWEEPS) -> Iterable[tuple[Curve, Fit]]:
    """Yield the curve of every case that was swept, with its fit."""
    for name, taken in sweeps(folder).items():
        yield fitted_curve(name, taken)


def fitted_curve(name: str, taken: dict[int, list[float]]) -> tuple[Curve, Fit]:
    """Return the curve of the case `name` with its fit; `taken` is what `sweeps` returns of it."""
    gradients = gradient_bytes(next(model for model in MODELS if name.startswith(model)))
    levels = {size: median(seconds) * 1e9 for size, seconds in pooled(gradients, taken).items()}
    fitted = fit(gradients, levels)
    points = {
        (("bucket_bytes", size or DEFAULT),): fitted.point(buckets_of(gradients, size), level)
        for size, level in sorted(levels.items(), key=lambda pair: pair[0] or DEFAULT)
    }
    start, backward_ns = {"bucket_bytes": DEFAULT}, round(fitted.backward_ns)
    return Curve(name, start, points, gradients, first_bucket_bytes=MIB, backward_ns=backward_ns), fitted


if __name__ == "__main__":
    MEASURED.write_text(dump((curve for curve, _ in measured()), source="measured"))
