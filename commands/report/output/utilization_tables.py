"""Makes the tables of utilization, energy, cost, incidents, ranks, and how far to trust the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pacecar.formatting.ledger_headings import CAUSE_WORDS, UNCALIBRATED_WORDS
from pacecar.formatting.quantities import DASH, percent, plural
from pacecar.formatting.tables import Table, table_of_rows

from ..document import Cost, CostSide, Energy, PowerPoint, Report
from ..figures import Interval
from ..formatting import amount, difference, elapsed, joules, milliseconds, money, number, part_of, reading, relative
from ..sections.hangs import STOP_WORDS, phase_words, ranks_word
from .tables import ROWS_MAX

__all__ = ["cost_table", "energy_table", "incidents", "power_table", "ranks_table", "trust_table", "usage_table"]

RANK_HEADINGS = {
    "compute": "compute", "exposed_communication": "exposed comm.", "data_wait": "data wait",
    "host_bound": "host-bound", "unknown": "unknown",
}  # fmt: skip
"""Short names of the headings that distinguish ranks; the others are small, and in the JSON."""


def usage_table(report: Report) -> Table | None:
    """Return utilization before and after."""
    if not report.utilization:
        return None
    has_after = report.is_tuned
    rows = []
    for one in report.utilization:
        cells = [one.label, {"ledger": "ranks", "torch": "torch", "daemon": "daemon"}[one.source]]
        cells.append(reading(one.before, one.unit))
        if has_after:
            was, now = (None if stat is None else stat.mean for stat in (one.before, one.after))
            cells += [reading(one.after, one.unit), difference(was, now, one.unit)]
        rows.append(tuple(cells))
    head = ("", "source", "before", "after", "change") if has_after else ("", "source", "run")
    note = "Mean ± standard deviation over steps (ranks) and readings (torch) or over seconds and devices (daemon)."
    if not any(one.source == "daemon" for one in report.utilization):
        note += (
            " The daemon's view of GPUs, links and hosts is missing: no recording covers these steps"
            " (pacecar dump makes one; --recording FILE adds it)."
        )
    return table_of_rows("Utilization", head, rows, texts=2, note=note)


def energy_table(report: Report) -> Table | None:
    """Return energy per step, sample and token, where GPUs count it."""
    sides = [
        (name, e) for name, e in (("before", report.energy_before), ("after", report.energy_after)) if e is not None
    ]
    if not sides:
        return None

    has_both = len(sides) == 2

    def row(name: str, cells: list[str], values: list[float | None]) -> tuple[str, ...]:
        return (name, *cells, *([relative(values[0], values[1])] if has_both else ()))

    rows = [
        row("power of the job's GPUs", [amount(e.watts, "watts") for _, e in sides], [e.watts for _, e in sides]),
        *(row(name, [joules(value) for value in values], values) for name, values in (
            ("a step", [e.joules_per_step for _, e in sides]),
            ("a sample", [e.joules_per_sample for _, e in sides]),
            ("a token", [e.joules_per_token for _, e in sides]),
        )),
        ("measured over", *(_covered(e) for _, e in sides), *([""] if has_both else ())),
    ]  # fmt: skip
    head = ("", *((name if report.is_tuned else "run") for name, _ in sides), *(["change"] if has_both else ()))
    return table_of_rows(
        "Energy", head, rows, note="From the energy counters of the GPUs, without processors and memory."
    )


def power_table(report: Report) -> Table | None:
    """Return time and energy of a step by the GPUs' power limit, and what a lower one is worth."""
    points = report.power
    if not points:
        return None
    rows = [
        (
            amount(one.limit_watts, "watts"),
            str(one.steps),
            milliseconds(one.step_ns),
            _between(one.step_change),
            joules(one.joules_per_step),
            _between(one.energy_change),
            DASH if one.capped_ratio is None else percent(one.capped_ratio),
        )
        for one in points
    ]
    head = ("limit of a GPU", "steps", "a step", "change", "energy a step", "change", "clocks held down by it")
    return table_of_rows("Power limit", head, rows, note=" ".join(_power_advice(points)))


def _power_advice(points: Sequence[PowerPoint]) -> Iterator[str]:
    first = points[0]
    if len(points) == 1:
        yield "Measured under one limit: what another one would gain or save cannot be told."
    for one in points[1:]:
        limit, step, energy = f"{one.limit_watts:g} W", one.step_change, one.energy_change
        if step is None or energy is None or step.low is None or step.high is None or energy.high is None:
            yield f"{limit} was in force too briefly to be told from {first.limit_watts:g} W."
        elif energy.high >= 0:
            yield f"{limit} saves no energy for certain."
        else:
            time = f"{percent(step.change_ratio, signed=True)} time"
            time = time if step.low > 0 or step.high < 0 else "no certain change of its time"
            command = f"sudo nvidia-smi -i {','.join(one.gpus)} -pl {one.limit_watts:.0f}"
            yield f"{limit} saves {percent(-energy.change_ratio)} of a step's energy, with {time}: {command}"


def _between(change: Interval | None) -> str:
    if change is None:
        return DASH
    if change.low is None or change.high is None:
        return percent(change.change_ratio, signed=True)
    ends = f"{percent(change.low, signed=True)} .. {percent(change.high, signed=True)}"
    return f"{percent(change.change_ratio, signed=True)} ({ends})"


def _covered(energy: Energy) -> str:
    if energy.source == "metrics":
        return "the end of the run, from the daemon's last metrics"
    return f"{elapsed(energy.covered_ns)} of recording, {plural(energy.gpus or 0, 'GPU')}"


def cost_table(report: Report) -> Table | None:
    """Return the costs; None without a price."""
    cost = report.cost
    if cost is None:
        return None
    sides = [(name, side) for name, side in (("before", cost.before), ("after", cost.after)) if side is not None]
    has_both = len(sides) == 2
    rows = []
    for name, words, values in _cost_rows(cost, [side for _, side in sides]):
        if any(value is not None for value in values):
            rows.append((name, *map(words, values), *([relative(*values)] if has_both else ())))
    rows += _saving_rows(report, cost)
    head = ("", *(name if report.is_tuned else "run" for name, _ in sides), *(["change"] if has_both else ()))
    what = "one GPU a rank" if report.device != "cpu" else "each rank charged as one, though they ran on processors"
    note = f"{money(cost.price_per_gpu_hour)} a GPU and hour, {what}. The whole run, {elapsed(report.duration_ns)}"
    note += f" on {plural(cost.gpus, 'GPU')}, cost {money(cost.run)}."
    if cost.epoch_of is not None and all(side.per_epoch is None for _, side in sides):
        note += f" An epoch of {cost.epoch_of} cannot be priced: the records do not count them."
    return table_of_rows("Cost", head, rows, note=note)


def _cost_rows(
    cost: Cost, sides: list[CostSide]
) -> Iterator[tuple[str, Callable[[float | None], str], list[float | None]]]:
    yield "an hour of these ranks", money, [side.per_hour for side in sides]
    yield "a million samples", money, [side.per_million_samples for side in sides]
    yield "a million tokens", money, [side.per_million_tokens for side in sides]
    if cost.epoch_of is not None:
        yield f"an epoch of {cost.epoch_of}", money, [side.per_epoch for side in sides]
        yield "an epoch takes", _seconds, [side.epoch_seconds for side in sides]
        if cost.epochs > 1:
            yield f"{cost.epochs} epochs", money, [side.per_epochs for side in sides]


def _seconds(value: float | None) -> str:
    return elapsed(None if value is None else value * 1e9)


def _saving_rows(report: Report, cost: Cost) -> Iterator[tuple[str, ...]]:
    """Yield what the final settings save on the largest priced amount, or that no saving is shown.

    If before and after do not decide it, the saving is at least what the trials proved: GPUs are paid by the hour.
    """
    before, after = cost.before, cost.after
    if before is None or after is None or cost.saved_ratio is None:
        return
    low = report.proven_gain_low
    if report.change_verdict not in ("faster", "slower"):
        if low is not None and low > 0:
            yield "saved at least, from the trials", "", "", percent(low)
        else:
            yield "saved", "", f"none is shown ({report.change_verdict})", ""
        return
    for name, was, now in (
        (f"saved on {cost.epochs} epochs", before.per_epochs, after.per_epochs),
        ("saved on a million samples", before.per_million_samples, after.per_million_samples),
        ("saved on a million tokens", before.per_million_tokens, after.per_million_tokens),
    ):
        if was is not None and now is not None:
            yield name, "", money(was - now), percent(cost.saved_ratio)
            return
    yield "saved on a step", "", "", percent(cost.saved_ratio)


def ranks_table(report: Report) -> Table:
    """Return a row for each rank."""
    rows = []
    for one in report.ranks[:ROWS_MAX]:
        total = sum(one.ledger_ns.values())
        where = " ".join(filter(None, (one.host, one.device))) or "-"
        parts = [part_of(one.ledger_ns, name) for name in RANK_HEADINGS]
        shares = [percent(part / total if part is not None and total else None) for part in parts]
        rows.append((
            str(one.rank), where, number(one.steps), milliseconds(one.step_mean_ns), *shares,
            percent(one.slowest_ratio), percent(one.overhead_ratio), number(one.dropped_records), one.last_words or "-",
        ))  # fmt: skip
    head = ("rank", "where", "steps", "mean step", *RANK_HEADINGS.values(), "slowest in", "overhead", "dropped",
            "last words")  # fmt: skip
    note = "All steps of the run. Slowest in: share of the steps measured by all ranks in which it finished last."
    if len(report.ranks) > ROWS_MAX:
        note += f" {len(report.ranks) - ROWS_MAX} more ranks are left out here."
    return table_of_rows("Ranks", head, rows, texts=2, note=note)


def incidents(report: Report) -> Table | None:
    """Return stragglers and hangs."""
    rows = []
    for late in report.slowdowns[-ROWS_MAX:]:
        who = "no rank in particular" if late.rank is None else f"rank {late.rank}"
        end = "over" if late.is_over else "not over at the last word"
        worst = f"{milliseconds(late.excess_ns)} a step, at worst, so at most {elapsed(late.lost_ns)} lost"
        what = f"{worst}; {end}. {late.evidence}"
        rows.append((f"straggler ({CAUSE_WORDS[late.cause]})", who, f"{late.since_step} to {late.last_step}", what))
    for stop in report.stops[-ROWS_MAX:]:
        how = f"{STOP_WORDS[stop.cause]} for {elapsed(stop.stopped_ns)} in {phase_words(stop.phase)}"
        rows.append(("process stopped", f"rank {stop.rank}", str(stop.step), how))
    for verdict in report.hang_verdicts[-ROWS_MAX:]:
        end = "went on" if verdict.is_over else "was not seen to go on"
        who = ranks_word(verdict.culprits) if verdict.culprits else "no rank in particular"
        what = f"for {elapsed(verdict.waited_ns)}; {end}. {verdict.summary}"
        rows.append((f"hang ({verdict.kind.replace('_', ' ')})", who, number(verdict.step), what))
    for hang in report.hangs[-ROWS_MAX:]:
        end = "went on" if hang.is_over else "was not seen to go on"
        what = f"silent for {elapsed(hang.silent_ns)} in {phase_words(hang.phase)}; {end}"
        if hang.last_collective is not None:
            what += f"; last collective {hang.last_collective}"
        rows.append(("suspected hang", f"rank {hang.rank}", str(hang.step), what))
    if not rows:
        return None
    return table_of_rows("Stragglers and hangs", ("what", "who", "steps", "how"), rows, texts=4, long=3)


def trust_table(report: Report) -> Table:
    """Return how far to trust the figures, and what measuring them cost."""
    over, error = report.overhead, report.estimate_error
    within = "-"
    if over.ratio is not None:
        word = "within" if over.ratio <= over.budget_ratio else "over"
        digits = _digits_apart(over.ratio, over.budget_ratio)
        within = percent(over.ratio, digits=digits) + f" of wall time, {word} the "
        within += percent(over.budget_ratio, digits=digits) + " that the"
        within += (
            " job allows" if over.is_jobs_budget else " configuration here allows (the job's is not in its records)"
        )
        if over.worst_ratio is not None:
            within += f"; worst rank {over.worst_rank}, {percent(over.worst_ratio, digits=digits)}"
    trials = "no trial"
    if over.trials_ns is not None:
        trials = f"all trials together cost {elapsed(over.trials_ns)}"
        if over.trials_ns < 0:
            trials = f"all trials together gained {elapsed(-over.trials_ns)}"
        trials += ", losses and gains, against the settings before each"
        if over.exploration_ns is not None and over.exploration_ns >= 0:
            trials += (
                f"; charged to the exploration budget: {elapsed(over.exploration_ns)},"
                f" {percent(over.exploration_ratio)} of the run: the losses of losing stretches, and the steps that"
                " settle after a verdict"
            )
    against = "not checked: it takes two profiled windows on a rank"
    if error is not None:
        against = (
            f"median {percent(error.median_ratio)}, worst {percent(error.worst_ratio)} of the step under a wrong"
            f" heading, against {plural(error.windows, 'profiled step')}"
        )
        if 0 < error.own_setting < error.windows:
            against += f"; settings profiled before ({error.own_setting}): {percent(error.own_setting_median_ratio)}"
    lost = sum(rank.dropped_records for rank in report.ranks)
    records = f"{number(sum(rank.records for rank in report.ranks))} read, {number(lost)} dropped by the hook"
    steps = f"{number(report.compared_steps)} measured by all ranks, {number(report.incomplete_steps)} by some"
    if report.is_sampled:
        steps += "; not every step was measured, to stay within the budget"
    reasons = [rank.uncalibrated for rank in report.ranks if rank.uncalibrated is not None]
    behind = f"{plural(sum(rank.windows for rank in report.ranks), 'profiled step')}"
    if reasons:
        words = "; ".join(UNCALIBRATED_WORDS.get(reason, reason) for reason in dict.fromkeys(reasons))
        behind = (
            f"not calibrated on {len(reasons)} of {plural(len(report.ranks), 'rank')}, mostly unknown there: {words}"
        )
    rows = [
        ("pacecar's overhead", within),
        ("what the ledger rests on", behind),
        ("exploration", trials),
        ("error of the ledger's estimate", against),
        ("step records", records),
        ("steps", steps),
        ("tuner at the end", report.tuner or "-"),
    ]
    return table_of_rows("How far to trust this", ("", ""), rows, texts=2, long=1)


def _digits_apart(ratio: float, limit: float) -> int:
    """Return how many decimals of a percent distinguish the two: "1.00 %, over the 1.00 %" makes no sense."""
    return next((n for n in (2, 3) if percent(ratio, digits=n) != percent(limit, digits=n)), 4 if ratio != limit else 2)
