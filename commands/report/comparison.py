"""Compares each run with the first, and reports a difference only if it exceeds the noise.

Two runs are two samples, and a bootstrap sees only the noise inside each.  So a difference counts if its interval
(`figures`) excludes zero and it is larger than the drift of either run from its first half to its second.  The cause
may still be another day, node, or job on the link; only interleaved trials, as the tuner makes them, prove a cause.

Two stretches are compared: the *settled* one (after the last kept change, or all after warm-up if no knob was turned)
and the *whole* run after warm-up, including trials.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .build import Built
from .document import ComparisonRow, Report, RunComparison, RunSide
from .figures import ratio_interval
from .formatting import number
from .sections.hangs import hang_sentences
from .significance import judge, noise_of

__all__ = ["compare", "settled_side"]


def settled_side(report: Report) -> tuple[str, RunSide | None]:
    """Return the stretch at the settings with which the run ended."""
    return ("after", report.after) if report.is_tuned else ("before", report.before)


def compare(runs: Sequence[Built]) -> RunComparison:
    """Compare each of at least two runs with the first."""
    units = [unit for unit in ("samples", "steps") if all(run.rates.get(("whole", unit)) for run in runs)]
    unit = units[0] if units else "steps"
    base = runs[0]
    stretches = ("settled", "whole")
    rows = [_row(base, run, stretch, unit, is_base=run is base) for run in runs for stretch in stretches]
    return RunComparison(
        rate_unit=unit,
        runs=tuple(run.report for run in runs),
        rows=tuple(rows),
        warnings=tuple(_warnings([run.report for run in runs], unit)),
    )


def _rates(run: Built, stretch: str, unit: str) -> tuple[list[float], RunSide | None]:
    if stretch == "whole":
        return run.rates.get(("whole", unit), []), run.report.whole
    name, side = settled_side(run.report)
    return run.rates.get((name, unit), []), side


def _row(base: Built, run: Built, stretch: str, unit: str, *, is_base: bool) -> ComparisonRow:
    mine, side = _rates(run, stretch, unit)
    theirs, _ = _rates(base, stretch, unit)
    change = None if is_base else ratio_interval(theirs, mine)
    noise = noise_of(mine, theirs)
    verdict, why = ("", "the baseline") if is_base else judge(change, noise)
    middle = statistics.median(mine) if mine else None
    if side is not None and side.rate is not None and unit == run.report.rate_unit:
        middle = side.rate.median
    return ComparisonRow(
        run=run.report.run,
        stretch=stretch,
        rate=middle,
        step_ns=None if side is None else side.step_mean_ns,
        change=change,
        noise_ratio=None if is_base else noise,
        verdict=verdict,
        why=why,
    )


def _shares(reports: Sequence[Report], unit: str) -> str:
    """Return the pace per rank: more ranks give more samples without any setting being better."""
    shares = []
    for report in reports:
        side = settled_side(report)[1]
        pace = None if side is None else side.samples_per_second
        shares.append("-" if pace is None or unit != "samples" else f"{number(pace / report.ranks_seen)} samples/s")
    return f"a rank's share of the mean pace is {'; '.join(shares)}"


def _warnings(reports: Sequence[Report], unit: str) -> list[str]:
    said = []
    for what, values in (
        ("world size", [report.world_size for report in reports]),
        ("device", [report.device for report in reports]),
        ("backend", [report.backend for report in reports]),
        ("framework", [report.framework for report in reports]),
        ("hosts", [", ".join(report.hosts) for report in reports]),
    ):
        if len(set(values)) > 1:
            said.append(f"{what} differs: {'; '.join(str(value) for value in values)}")
            if what == "world size":
                said.append(f"the verdict is of the whole job; {_shares(reports, unit)}")
    if unit == "steps":
        said.append("not all runs have samples: steps per second are compared, whatever a step contains")
    if unit == "samples":
        guessed = [report.run for report in reports if report.samples_guessed]
        said += [f"samples of {run} are a guess: see its report" for run in guessed]
    if len({report.job for report in reports}) < len(reports):
        said.append("the same job appears more than once")
    said += [f"{report.run}: {sentence}" for report in reports for sentence in hang_sentences(report)]
    damaged = [report.run for report in reports if any(notice.is_damage for notice in report.notices)]
    said += [f"parts of {run} could not be read: see its report" for run in damaged]
    return said
