"""Replays every policy on every curve, with noise, over many seeds; `make bench-policies`.

Each policy and the untuned job see the same steps with the same noise (`tests/controller/replay.py`).  One table is for
curves that `make bench-tuning` measured (`tests/controller/measured_curves.py`), one for simulated curves
(`tests/controller/curves.py`), which also have compression and changing links.  Figures are means over seeds, the
spread is one standard deviation, `worst` the worst seed:

    total        time of the whole run against the same job never tuned
    end          pace of the setting that is kept at the end against the best one
    trials       steps in other than the kept setting; slowest: the slowest of them against the present one;
                 slow: steps over 20 % slower than never tuned
    forecast     mean distance of expected from true gain, in points of the step, and how many of the true gains lie
                 within the 90 % interval of their forecast

With `--told`, pacecar is offered the best setting and the present one, no other: it has nothing to find and still has
to prove the change within its budget.  A case that it loses so cannot be won by a better search.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds its own folder only
from tests.controller.curves import FILE, MEASURED, load
from tests.controller.replay import POLICIES, Case, Run, cases, noise, run

Key = tuple[float, str, str]


def play(job: tuple[float, int, int, str, str, bool]) -> list[tuple[Key, Run]]:
    """Run every policy on every case with one noise."""
    level, seed, steps, path, only, is_told = job
    factors = noise(level, steps, seed)
    return [
        ((level, case.name, name), run(told(case) if is_told and name == "pacecar" else case, name, factors, seed=seed))
        for case in cases(load(Path(path))[1])
        if only in case.name
        for name in POLICIES
    ]


def told(case: Case) -> Case:
    """Return `case` with two settings: that of the start and the best one, of each curve."""
    kept = {min(curve.points, key=lambda setting: curve.points[setting].step_ns) for curve in case.curves}
    kept.add(tuple(sorted(case.curves[0].start.items())))
    return replace(case, curves=tuple(replace(c, points={s: c.points[s] for s in kept}) for c in case.curves))


def oracle_ratio(case: Case) -> float:
    """The total of a job that always has the best setting, against never tuning (without noise)."""
    best = sum(curve.oracle_ns for curve in case.curves)
    return best / sum(curve.at(case.curves[0].start).step_ns for curve in case.curves) - 1


def coverage(runs: Iterable[Run]) -> str:
    """Return which share of the true gains lies within the 90 % interval of its forecast, out of how many."""
    inside = [
        abs(expected - truth) <= NormalDist().inv_cdf(0.95) * error
        for one in runs
        for expected, error, truth in one.forecasts
        if error is not None
    ]
    return f"{fmean(inside):.0%} of {len(inside)}" if inside else "-"


def row(name: str, runs: list[Run]) -> str:
    """One policy's line of the table."""
    totals = [one.saved_ratio for one in runs]
    ends = [one.end_ratio - 1 for one in runs]
    errors = [abs(expected - truth) for one in runs for expected, _, truth in one.forecasts]
    told = f"{fmean(errors) * 100:6.1f} {coverage(runs)}" if errors else "     -"
    return (
        f"  {name:20} {fmean(totals) * 100:+7.2f} +- {pstdev(totals) * 100:4.2f} {max(totals) * 100:+7.2f}"
        f" {fmean(ends) * 100:+7.1f} {max(ends) * 100:+7.1f} {fmean(one.trial_steps for one in runs):7.0f}"
        f" {max(one.slowest_ratio for one in runs):8.2f} {fmean(one.slow_steps for one in runs):6.0f} {told}"
    )


def aims(table: dict[Key, list[Run]], seeds: int) -> list[str]:
    """Say where ours misses what it is to reach; a difference counts if it is over two standard errors."""
    missed = []
    for level, case in sorted({key[:2] for key in table}):
        ours = table[level, case, "pacecar"]
        end, total = fmean(one.end_ratio for one in ours) - 1, fmean(one.saved_ratio for one in ours)
        if end > 0.03:
            missed.append(f"noise {level:.0%}, {case}: ends {end:.1%} off the best")
        if total > 0.01:
            missed.append(f"noise {level:.0%}, {case}: {total:+.1%} against never tuning")
        for name in POLICIES[:-1]:
            gaps = [a.saved_ratio - b.saved_ratio for a, b in zip(ours, table[level, case, name], strict=True)]
            if fmean(gaps) > 2 * pstdev(gaps) / math.sqrt(seeds) and fmean(gaps) > 0.001:
                missed.append(f"noise {level:.0%}, {case}: {name} is {fmean(gaps) * 100:.2f} points better")
    return missed


def report(table: dict[Key, list[Run]], every: Iterable[Case], source: str, steps: int, seeds: int) -> str:
    """Return the whole table."""
    lines = [
        f"{source} curves, {steps} steps, {seeds} seeds; percent",
        f"  {'':20} {'total':>15} {'worst':>7} {'end':>7} {'worst':>7} {'trials':>7} {'slowest':>8} {'slow':>6}"
        " forecast",
    ]
    by_name = {case.name: case for case in every}
    for level, case in sorted({key[:2] for key in table}, key=lambda k: (k[0], list(by_name).index(k[1]))):
        lines.append(f"noise {level:.0%}, {case} (oracle {oracle_ratio(by_name[case]) * 100:+.2f})")
        lines += [row(name, table[level, case, name]) for name in POLICIES]
    ours = [one for key, runs in table.items() if key[2] == "pacecar" for one in runs]
    null, kept = sum(one.null_judged for one in ours), sum(one.null_kept for one in ours)
    lines.append(f"false accepts: {kept} of {null} trials of a change that saves nothing ({kept / max(1, null):.1%})")
    lines.append(f"gains within the 90 % interval of their forecast: {coverage(ours)}")
    missed = aims(table, seeds)
    others = len({key[:2] for key in table}) * (len(POLICIES) - 1)
    lines.append(f"comparisons lost: {sum('points better' in line for line in missed)} of {others}")
    return "\n".join([*lines, "aims missed:" if missed else "no aim missed", *(f"  {line}" for line in missed)])


def markdown(table: dict[Key, list[Run]], every: Iterable[Case]) -> str:
    """Return the totals as docs/measurements/policies.md shows them: a line for each case."""
    levels = sorted({level for level, _, _ in table})
    lines = [
        "| total (worst seed), % | oracle |"
        + "".join(f" {name}, {level:.0%} noise |" for level in levels for name in POLICIES),
        "|---|---|" + "---|" * len(levels) * len(POLICIES),
    ]
    for case in every:
        totals = [[one.saved_ratio * 100 for one in table[lv, case.name, name]] for lv in levels for name in POLICIES]
        cells = [f"{oracle_ratio(case) * 100:+.2f}", *(f"{fmean(seeds):+.2f} ({max(seeds):+.2f})" for seeds in totals)]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def play_all(
    file: Path, levels: Iterable[float], seeds: int, steps: int, only: str, *, is_told: bool, processes: int
) -> dict[Key, list[Run]]:
    """Run every policy on every case of a file with all noises; say on stderr how far it is."""
    begun = time.monotonic()
    jobs = [(level, seed, steps, str(file), only, is_told) for level in levels for seed in range(seeds)]
    table: dict[Key, list[Run]] = defaultdict(list)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, played in enumerate(pool.imap(play, jobs), start=1):
            for key, one in played:
                table[key].append(one)
            sys.stderr.write(f"\r{file.name}: {done} of {len(jobs)} jobs, {time.monotonic() - begun:.0f} s")
    sys.stderr.write("\n")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.10])
    parser.add_argument("--curves", type=Path, nargs="+", default=[MEASURED, FILE])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--told", action="store_true", help="offer pacecar the present and the best setting only")
    parser.add_argument("--processes", type=int, default=max(1, multiprocessing.cpu_count() // 2))
    parser.add_argument("--json", type=Path, help="keep every run here")
    parser.add_argument("--markdown", action="store_true", help="print the totals as a Markdown table, too")
    args = parser.parse_args()
    kept = []
    for file in args.curves:
        source, curves = load(file)
        every = [case for case in cases(curves) if args.only in case.name]
        table = play_all(
            file, args.noise, args.seeds, args.steps, args.only, is_told=args.told, processes=args.processes
        )
        sys.stdout.write(report(table, every, source, args.steps, args.seeds) + "\n\n")
        if args.markdown:
            sys.stdout.write(markdown(table, every) + "\n\n")
        sys.stdout.flush()
        kept += [{"source": source, "key": key, "runs": [asdict(one) for one in r]} for key, r in table.items()]
    if args.json is not None:
        args.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
