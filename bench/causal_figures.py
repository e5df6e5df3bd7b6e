"""Judges verdicts of `pacecar analyze` on simulated jobs against the truth, and summarizes them.

A planted fault is *right* if a finding names only ranks that have it, with a true cause; *wrong cause* if only the
ranks are right; otherwise *untold* if `analyze` cannot tell, and *missed* if it names no rank or another one.  A
finding without a fault is *false*.  Savings are compared as shares of the true step.

Pure: values in, values and lines of text out.  Tested in `tests/bench`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Case", "ClockError", "Named", "Outcome", "Planted", "falsely_named", "lines", "outcomes"]

NORMAL_95 = 1.96
"""Standard errors to both sides that hold 95 % of a normal distribution."""

CLOCK_TELLS = 1_000_000
"""A standard error in ns beyond which `analyze` says itself that the clocks cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault: its kind, the ranks that the traces can tell (None: no rank can be told), true causes, what it costs."""

    kind: str
    ranks: tuple[int, ...] | None
    causes: tuple[str, ...]
    saved_ratio: float


@dataclass(frozen=True, slots=True)
class Named:
    """A finding; what it would save, and the error stated, as shares of the true wall time."""

    kind: str
    ranks: tuple[int, ...]
    cause: str
    saved_ratio: float
    error_ratio: float


@dataclass(frozen=True, slots=True)
class ClockError:
    """How wrongly a host's clock was estimated against the first's, and the standard error stated (None: unknown)."""

    error_ns: float
    stated_ns: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """One job: which draw it is, what was planted and what was named, and how good clocks and replay were."""

    seed: int
    number: int
    layout: str
    ranks: int
    is_loud: bool
    planted: tuple[Planted, ...]
    named: tuple[Named, ...]
    clocks: tuple[ClockError, ...]
    replay_error_ratio: float | None
    is_told: bool = True
    """Whether `analyze` gives an answer: "no straggler" is one, "cannot tell" is not."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one planted fault: right, wrong cause, missed or untold, and by whom it was found."""

    case: Case
    fault: Planted
    word: str
    found: Named | None


def outcomes(case: Case) -> list[Outcome]:
    """Return what became of each planted fault."""
    return [_outcome(case, fault) for fault in case.planted]


def _outcome(case: Case, fault: Planted) -> Outcome:
    near = [one for one in case.named if _is_of(one, fault)]
    right = [one for one in near if one.cause in fault.causes]
    missed = "missed" if case.is_told else "untold"
    word = "right" if right else "wrong cause" if near else missed
    return Outcome(case, fault, word, (right or near or [None])[0])


def _is_of(one: Named, fault: Planted) -> bool:
    """Return whether a finding names ranks of the fault and no others; of uneven work only the kind counts."""
    if "imbalance" in fault.causes or fault.ranks is None:
        return one.cause in fault.causes
    return bool(one.ranks) and set(one.ranks) <= set(fault.ranks)


def falsely_named(case: Case) -> list[Named]:
    """Return the findings that belong to no planted fault."""
    return [one for one in case.named if not any(_is_of(one, fault) for fault in case.planted)]


def lines(cases: Sequence[Case]) -> list[str]:
    """Return the tables: faults by kind and by layout, savings, healthy jobs, clocks and replay."""
    every = [one for case in cases for one in outcomes(case)]
    found: list[str] = []
    for is_loud in (False, True):
        noise = "loud" if is_loud else "quiet"
        planted = [one for one in every if one.case.is_loud is is_loud]
        if planted:
            found += _faults(planted, noise)
        healthy = [case for case in cases if not case.planted and case.is_loud is is_loud]
        if healthy:
            accused = [case for case in healthy if case.named]
            untold = sum(not case.is_told for case in healthy)
            found.append(
                f"healthy, {noise}: a rank named in {len(accused)} of {len(healthy)} jobs, not told in {untold}"
            )
            found += [f"  draw {case.number}, {case.layout}: {_words(case.named)}" for case in accused]
    return [*found, *_savings(every), *_clocks(cases), *_replays(cases)]


def _faults(some: Sequence[Outcome], noise: str) -> list[str]:
    cases = {id(one.case): one.case for one in some}.values()
    others = sum(bool(falsely_named(case)) for case in cases)
    right = sum(one.word == "right" for one in some)
    found = [
        f"planted, {noise}: rank and cause right in {right} of {len(some)} faults ({right / len(some):.1%});"
        f" others named too in {others} of {len(cases)} jobs"
    ]
    head = f"  {'':24} {'right':>6} {'wrong cause':>12} {'missed':>7} {'untold':>7} {'of':>5}"
    for title, of in (("by fault", lambda one: one.fault.kind), ("by layout", lambda one: one.case.layout)):
        found += [f"  {title}", head, *_table(some, of)]
    return found


def _table(some: Sequence[Outcome], of: Callable[[Outcome], str]) -> Iterable[str]:
    for name in sorted({of(one) for one in some}):
        count = Counter(one.word for one in some if of(one) == name)
        total = sum(count.values())
        words = f"{count['right']:6} {count['wrong cause']:12} {count['missed']:7} {count['untold']:7}"
        yield f"  {name:24} {words} {total:5}"


def _savings(every: Sequence[Outcome]) -> list[str]:
    """Savings of jobs with one fault: with two, mending one while the other stays is another question."""
    pairs = [
        (one.found, one.fault)
        for one in every
        if one.word == "right" and one.found is not None and len(one.case.planted) == 1
    ]
    if not pairs:
        return []
    off = np.array([named.saved_ratio - fault.saved_ratio for named, fault in pairs])
    over = sum(named.saved_ratio - named.error_ratio > fault.saved_ratio for named, fault in pairs)
    median, high, most = np.quantile(np.abs(off), (0.5, 0.95, 1.0)) * 100
    return [
        f"savings of {len(off)} right findings, off by percent of the step: median {median:.2f}, p95 {high:.2f},"
        f" most {most:.2f}; over the truth by more than the stated error: {over}"
    ]


def _clocks(cases: Sequence[Case]) -> list[str]:
    every = [one for case in cases for one in case.clocks]
    told = [one for one in every if one.stated_ns is not None and one.stated_ns <= CLOCK_TELLS]
    if not told:
        return []
    held = sum(abs(one.error_ns) <= NORMAL_95 * one.stated_ns for one in told if one.stated_ns is not None)
    errors = np.quantile([abs(one.error_ns) for one in told], (0.5, 0.95)) / 1e3
    stated = np.median([one.stated_ns for one in told if one.stated_ns is not None]) / 1e3
    return [
        f"clocks: 95 % intervals hold {held} of {len(told)} ({held / len(told):.1%}); error median {errors[0]:.2f} us,"
        f" p95 {errors[1]:.2f}; stated standard error median {stated:.2f}; cannot be told: {len(every) - len(told)}"
    ]


def _replays(cases: Sequence[Case]) -> list[str]:
    errors = [abs(case.replay_error_ratio) for case in cases if case.replay_error_ratio is not None]
    if not errors:
        return []
    median, high, most = np.quantile(errors, (0.5, 0.95, 1.0)) * 100
    return [
        f"fixed-lag replay of {len(errors)} jobs, off by percent: median {median:.2f}, p95 {high:.2f}, most {most:.2f}"
    ]


def _words(named: Sequence[Named]) -> str:
    return ", ".join(f"{one.kind} {list(one.ranks)[:4]} {one.cause} {one.saved_ratio:.1%}" for one in named)
