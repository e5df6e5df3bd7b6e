"""What did the arms of bench_tuning bring?  Runs in, tables out; nothing here starts a job or reads a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any

__all__ = ["STOLEN_MAX", "Run", "compact", "spread", "summary", "table"]

SLOW_RATIO = 1.2

STOLEN_MAX = 0.03
"""What others may take of the processors in a step: with 10 % a step takes some 5 % longer."""

OURS = ("exact", "lossy")
"""The arms of pacecar's own policy."""

NEIGHBOURS = 4
"""Calm steps whose median stands for a disturbed one."""


@dataclass
class Run:
    """One job under one arm; paces are seconds a step."""

    arm: str
    paces: list[float]
    records: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """The knobs in force in the last step."""
    stolen_ratio: float | None = None
    """Share of the processors' time that the hypervisor gave to others meanwhile."""
    stolen: list[float] = field(default_factory=list)
    """The same of every step; empty in files from before it was kept."""

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """Steps in which others took more than STOLEN_MAX of the processors."""
        return frozenset(step for step, share in enumerate(self.stolen) if share > STOLEN_MAX)

    @cached_property
    def calm_paces(self) -> list[float]:
        """The paces, with the median of the nearest NEIGHBOURS calm steps in place of each disturbed one."""
        calm = [step for step in range(len(self.paces)) if step not in self.disturbed]
        if not calm:
            return self.paces
        return [
            median(self.paces[near] for near in sorted(calm, key=lambda near: abs(near - step))[:NEIGHBOURS])
            if step in self.disturbed
            else pace
            for step, pace in enumerate(self.paces)
        ]

    @property
    def total(self) -> float:
        """Seconds of all steps, as they would have been had others left the processors alone."""
        return sum(self.calm_paces)

    @property
    def final(self) -> float:
        """Typical step of the last fifth."""
        return median(self.calm_paces[-max(1, len(self.paces) // 5) :])

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """Verdicts of trials."""
        return [record for record in self.records if record["type"] == "verdict"]

    @property
    def trial_steps(self) -> int:
        """Steps that ran during trials."""
        return sum(verdict["trial_steps"] for verdict in self.verdicts)

    @property
    def worst_ratio(self) -> float | None:
        """By how much the slowest trial was slower than what it was compared with; None without trials."""
        gains = [verdict["measured_gain_ratio"] or 0.0 for verdict in self.verdicts]
        return max(0.0, -min(gains)) if gains else None

    def slow_steps(self, typical: float) -> int:
        """Return how many steps took over 20 % longer than `typical`."""
        return sum(pace > SLOW_RATIO * typical for pace in self.calm_paces)

    @property
    def forecasts(self) -> list[tuple[float, float]]:
        """Expected and measured gain of every trial that had both."""
        expected = {r["decision"]: r["expected_gain_ratio"] for r in self.records if r["type"] == "decision"}
        pairs = [(expected.get(v["decision"]), v["measured_gain_ratio"]) for v in self.verdicts]
        return [(e, m) for e, m in pairs if e is not None and m is not None]


def table(case: str, arms: Sequence[str], runs: Sequence[Run]) -> str:
    """Return what the arms brought, a line each."""
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    never = by_arm.get("never") or runs
    typical = median(pace for run in never for pace in run.calm_paces)
    never_total = median(run.total for run in never)
    oracle = by_arm.get("oracle") or never
    best_final = median(run.final for run in oracle)
    lines = [
        f"\n{case}",
        f"{'arm':10} {'mean step':>10} {'total against never':>26} {'end against oracle':>26}"
        f" {'trial steps':>11} {'slowest trial':>13} {'>20 % slower':>12} {'expected | measured':>20}",
    ]
    for arm, mine in by_arm.items():
        totals = spread([run.total / never_total - 1 for run in mine])
        finals = spread([run.final / best_final - 1 for run in mine])
        slow = median(run.slow_steps(typical) for run in mine)
        worst = max((run.worst_ratio for run in mine if run.worst_ratio is not None), default=None)
        pairs = [pair for run in mine for pair in run.forecasts]
        told = f"{fmean(e for e, _ in pairs):.1%} | {fmean(m for _, m in pairs):.1%}" if pairs else ""
        lines.append(
            f"{arm:10} {fmean(fmean(run.calm_paces) for run in mine) * 1e3:7.1f} ms {totals:>26} {finals:>26}"
            f" {median(run.trial_steps for run in mine):11.0f}"
            f" {'' if worst is None else f'{worst:.0%}':>13} {slow:12.0f} {told:>20}"
        )
    return "\n".join(lines)


def compact(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case as it is kept in a file: what the tables need, times to a tenth of a millisecond."""
    runs = [
        {
            **run,
            "paces": [round(pace, 4) for pace in run["paces"]],
            "records": [record for record in run["records"] if record["type"] in ("decision", "verdict")],
        }
        for run in case["runs"]
    ]
    curve = {size: [round(pace, 4) for pace in paces] for size, paces in case["curve_seconds"].items()}
    finals = {arm: [[round(pace, 4) for pace in one] for one in rounds] for arm, rounds in case["finals"].items()}
    return {**case, "curve_seconds": curve, "finals": finals, "runs": runs}


def summary(kept: Sequence[dict[str, Any]], *, is_short: bool = False) -> str:
    """Return Markdown tables of cases by arms: total time, where each arm arrived, what trials cost, what was forecast.

    A short one leaves out the last two, and where the policies of others arrived.

    Cases without the arms `never` and `oracle` are left out: there is nothing to compare with.
    """
    kept = [case for case in kept if {"never", "oracle"} <= {run["arm"] for run in case["runs"]}]
    tried = [arm for arm in _arms_of(kept) if arm != "never"]
    arrived = ["default", *(arm for arm in tried if arm in OURS or (arm != "oracle" and not is_short))]
    totals = [
        f"| total against never | steps | stolen | replaced | {' | '.join(tried)} |",
        "|---|" + "---|" * (len(tried) + 3),
    ]
    ends = [f"| end against oracle | {' | '.join(arrived)} |", "|---|" + "---|" * len(arrived)]
    searched = [arm for arm in tried if arm != "oracle"]
    costs = [f"| trial steps, slowest, slow steps | {' | '.join(searched)} |", "|---|" + "---|" * len(searched)]
    told = [f"| expected and measured gain of each trial | {' | '.join(OURS)} |", "|---|---|---|"]
    for case in kept:
        name = case["case"].replace(", 2 ranks", "")
        runs = [Run(**run) for run in case["runs"]]
        by_arm = {arm: [run for run in runs if run.arm == arm] for arm in ("never", *tried)}
        never, best = median(run.total for run in by_arm["never"]), median(run.final for run in by_arm["oracle"])
        saved = [spread([run.total / never - 1 for run in by_arm[arm]]) for arm in tried]
        host = f"{_stolen(runs)} | {_replaced(runs)}"
        totals.append(f"| {name} | {len(runs[0].paces)} | {host} | {' | '.join(saved)} |")
        by_arm["default"] = by_arm["never"]
        off = [_end(case.get("finals", {}), arm, by_arm[arm], best) for arm in arrived]
        ends.append(f"| {name} | {' | '.join(off)} |")
        typical = median(pace for run in by_arm["never"] for pace in run.calm_paces)
        costs.append(f"| {name} | {' | '.join(_cost(by_arm[arm], typical) for arm in searched)} |")
        told.append(f"| {name} | {' | '.join(_told(by_arm.get(arm, [])) for arm in OURS)} |")
    notes = [
        "Stolen: the most that the hypervisor gave to others of any arm's processor time.",
        f"Replaced: the most steps of an arm in which others took over {STOLEN_MAX:.0%}; for each stands the median of"
        f" the nearest {NEIGHBOURS} calm ones.",
        "~ by the typical step of the last fifth, where nothing ran side by side",
    ]
    if not is_short:
        notes.append(
            "Slowest: the worst trial's loss against what it was compared with; slow: 20 % slower than never tuning's."
        )
    trials = [] if is_short else [*costs, "", *told, ""]
    return "\n".join([*totals, "", *ends, "", *trials, *notes])


def _stolen(runs: Sequence[Run]) -> str:
    """Return the largest share of an arm; "" where none was measured."""
    shares = [run.stolen_ratio for run in runs if run.stolen_ratio is not None]
    return f"{max(shares):.1%}" if shares else ""


def _replaced(runs: Sequence[Run]) -> str:
    """Return the most disturbed steps of an arm; "" where they were not kept."""
    counts = [len(run.disturbed) for run in runs if run.stolen]
    return str(max(counts)) if counts else ""


def _cost(runs: Sequence[Run], typical: float) -> str:
    """Return what searching cost: steps in trials, the slowest trial, steps that were slow; "" for an arm not run."""
    if not runs:
        return ""
    worst = max((run.worst_ratio for run in runs if run.worst_ratio is not None), default=None)
    slow = median(run.slow_steps(typical) for run in runs)
    return f"{median(run.trial_steps for run in runs):.0f}, {'none' if worst is None else f'{worst:.0%}'}, {slow:.0f}"


def _told(runs: Sequence[Run]) -> str:
    return ", ".join(f"{expected:.1%} / {measured:.1%}" for run in runs for expected, measured in run.forecasts)


def _arms_of(kept: Sequence[dict[str, Any]]) -> list[str]:
    """Return all arms in the order of the case that has most of them."""
    by_case = sorted(([run["arm"] for run in case["runs"]] for case in kept), key=lambda arms: -len(set(arms)))
    return list(dict.fromkeys(arm for arms in by_case for arm in arms))


def _end(finals: dict[str, list[list[float]]], arm: str, runs: Sequence[Run], best: float) -> str:
    """Return how far off the oracle an arm ended: side by side where that was run, else by its last fifth."""
    by_arm = {arm: paces for arms, paces in finals.items() for arm in arms.split(", ")}
    if arm in by_arm:
        return spread([median(own) / median(its) - 1 for own, its in zip(by_arm[arm], by_arm["oracle"], strict=True)])
    return f"~ {spread([run.final / best - 1 for run in runs])}" if runs else ""


def spread(values: Sequence[float]) -> str:
    """Return the median of some ratios less one, with the lowest and the highest where there are several."""
    if not values:
        return ""
    bounds = "" if len(values) == 1 else f" ({min(values):+.1%} .. {max(values):+.1%})"
    return f"{median(values):+.1%}{bounds}"
