"""The aims of tuning, in short, on replayed curves; `make bench-policies` prints the whole table over 100 seeds.

Six thousand steps are a short run: the table's are ten thousand, and what exploring costs weighs more here.  A run is
the same each time, so a seed is a job and not a sample of luck: two of each kind find what a change does to all, and
`full` looks at four.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean, pstdev

import pytest

from tests.controller.curves import MEASURED, load
from tests.controller.replay import POLICIES, SLOW_RATIO, Case, Run, all_cases, cases, noise, run
from tests.kit.selection import decisive

pytestmark = pytest.mark.slow

STEPS = 6000
NEAR, FAR = "1 Gbit/s, 40 layers 42 M", "1 Gbit/s 5 ms, 40 layers 42 M"
CHANGES = f"{NEAR} > {FAR}"
REAL = ("stack10, 2 ranks, 1 Gbit/s", "deep, 2 ranks, 1 Gbit/s, 1 ms")
EMBEDDING = "2.5 Gbit/s, embedding of 48 MB last"
CASES = (
    *REAL,
    NEAR,
    FAR,
    EMBEDDING,
    "1 Gbit/s 5 ms, 300 layers 20 M",
    CHANGES,
    f"{NEAR}, lossy",
    "micro-batch of 2, batch of 32",
)
each_case = pytest.mark.parametrize("case", decisive(CASES, REAL[0], CHANGES, CASES[-1]))

LEVELS = {0.05: 2}
"""Noise, and how many seeds of it."""
LEVELS_FULL = {0.05: 4, 0.10: 4}

each_level = pytest.mark.parametrize(
    ("level", "seeds"),
    [
        *LEVELS.items(),
        *(pytest.param(*one, marks=pytest.mark.full) for one in LEVELS_FULL.items()),
    ],
)
each_depth = pytest.mark.parametrize("seeds", [LEVELS[0.05], pytest.param(LEVELS_FULL[0.05], marks=pytest.mark.full)])


@cache
def _case(name: str) -> Case:
    (found,) = [one for one in (*all_cases(), *cases(load(MEASURED)[1])) if one.name == name]
    return found


@cache
def _run(case: str, name: str, level: float, seed: int) -> Run:
    return run(_case(case), name, noise(level, STEPS, seed), seed=seed)


def _runs(case: str, name: str, seeds: int, level: float = 0.05) -> list[Run]:
    return [_run(case, name, level, seed) for seed in range(seeds)]


@each_level
@each_case
def test_the_end_is_within_three_percent_of_the_oracle(case: str, level: float, seeds: int) -> None:
    assert fmean(one.end_ratio for one in _runs(case, "pacecar", seeds, level)) <= 1.03


@each_level
@each_case
def test_tuning_costs_at_most_one_percent_of_never_tuning(case: str, level: float, seeds: int) -> None:
    runs = _runs(case, "pacecar", seeds, level)
    assert fmean(one.saved_ratio for one in runs) <= 0.01
    assert all(one.saved_ratio <= 0.015 for one in runs)


@each_depth
@pytest.mark.parametrize("other", POLICIES[:-1])
@each_case
def test_no_policy_is_better_beyond_noise(case: str, other: str, seeds: int) -> None:
    pairs = zip(_runs(case, "pacecar", seeds), _runs(case, other, seeds), strict=True)
    gaps = [ours.saved_ratio - theirs.saved_ratio for ours, theirs in pairs]
    assert fmean(gaps) <= 0.003 + 2 * pstdev(gaps) / seeds**0.5


@each_depth
def test_only_ours_recovers_when_the_link_changes(seeds: int) -> None:
    ours = _runs(CHANGES, "pacecar", seeds)
    assert all(one.end_ratio <= 1.01 for one in ours)
    for other in ("gaussian-process", "tpe"):
        theirs = _runs(CHANGES, other, seeds)
        assert fmean(one.end_ratio for one in theirs) > 1.05
        assert fmean(one.saved_ratio for one in theirs) > fmean(one.saved_ratio for one in ours) + 0.03


@each_depth
def test_few_steps_are_over_twenty_percent_slower(seeds: int) -> None:
    slow = {case: fmean(one.slow_steps for one in _runs(case, "pacecar", seeds)) for case in CASES if case != CHANGES}
    assert {case: steps for case, steps in slow.items() if steps > 12} == {}, f"over {SLOW_RATIO}"


@pytest.mark.parametrize(
    ("levels", "judged_min"), [(LEVELS, 25), pytest.param(LEVELS_FULL, 50, marks=pytest.mark.full)]
)
def test_false_accepts_stay_under_the_stated_rate(levels: dict[float, int], judged_min: int) -> None:
    runs = [one for case in CASES for level, seeds in levels.items() for one in _runs(case, "pacecar", seeds, level)]
    judged = sum(one.null_judged for one in runs)
    assert judged > judged_min, "few trials of what is no better are begun; test_sequential_test has thousands"
    assert sum(one.null_kept for one in runs) / judged <= 0.05
