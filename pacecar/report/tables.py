"""Which tables does a report have?  Titles, heads and cells as text, once, for the page and for markdown.

What stands in a cell is decided here, so that the two cannot say different things; how it looks is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pacecar.records import LEDGER_HEADINGS
from pacecar.report.charts import outcome_words
from pacecar.report.comparison import settled_side
from pacecar.report.document import Comparison, Cost, CostSide, Energy, Report, Side
from pacecar.report.words import (
    amount, bounds, change_words, elapsed, knob_words, milliseconds, money, number, rate_word, reading, steps_word,
)  # fmt: skip
from pacecar.wording import HEADING_WORDS, SCENARIO_WORDS, percent, plural

__all__ = ["Table", "changes_table", "comparison_tables", "cost_table", "energy_table", "facts", "headline", "incidents",
           "ladder_table", "ledger_table", "line_table", "ranks_table", "reasons", "stability_table", "trust_table",
           "usage_table"]  # fmt: skip

ROWS_MAX = 200
"""In one table: of more the page shows the last; `--json` has all."""

LINE_ROWS = 40


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under `head`; the first `texts` columns are words, the others figures.  `note` explains."""

    name: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    texts: int = 1
    note: str = ""
    long: int | None = None


def _sides(report: Report) -> list[tuple[str, Side]]:
    if not report.is_tuned:
        return [("run", report.before)] if report.before is not None else []
    return [(name, side) for name, side in (("before", report.before), ("after", report.after)) if side is not None]


def headline(report: Report) -> str:
    """Return what the run showed, in one or two sentences."""
    kept = [change for change in report.changes if change.outcome == "kept"]
    if report.before is None:
        return f"The run ended after {plural(report.steps, 'step')}: too early to compare anything."
    if not report.is_tuned:
        rate = report.before.rate
        pace = "" if rate is None else f" Median {number(rate.median)} {rate_word(report)}."
        return f"No knob was turned.{pace}"
    parts = []
    if kept:
        ways: dict[str, list[str]] = {}
        for one in kept:
            way = ways.setdefault(one.knob, [knob_words(one.knob, one.from_value)])
            way.append(knob_words(one.knob, one.to_value))
        said = " and ".join(f"{knob} {' → '.join(way)}" for knob, way in ways.items())
        parts.append(f"Kept: {said}.")
        if report.proven_gain_ratio is not None:
            parts.append(f"Interleaved trials prove {percent(report.proven_gain_ratio)} of step time saved.")
    else:
        parts.append("Nothing proved better than the settings that the job came with.")
    change = report.change
    if change is not None:
        parts.append(f"Throughput after against before: {change_words(change)}.")
        if change.low is not None and change.high is not None and change.low <= 0 <= change.high:
            parts.append("That interval holds zero: between these two stretches the machine's own noise was as large.")
    return " ".join(parts)


def facts(report: Report) -> list[tuple[str, str]]:
    """Return what kind of run it was."""
    seen = report.ranks_seen
    ranks = str(seen) if report.world_size in (None, seen) else f"{seen} of {report.world_size}"
    rows = [
        ("job", report.job),
        ("ranks", ranks),
        ("hosts", ", ".join(report.hosts[:8]) + (" …" if len(report.hosts) > 8 else "") or "-"),
        ("device", report.device or "-"),
        ("backend", report.backend or "-"),
        ("framework", report.framework or "-"),
        ("recorded by", f"pacecar {report.recorded_by}" if report.recorded_by else "-"),
        ("lasted", elapsed(report.duration_ns)),
        ("steps", number(report.steps)),
        ("samples", number(report.samples)),
        ("tokens", number(report.tokens)),
    ]
    if report.losses is not None:
        rows.append(("loss", f"{number(report.losses.first)} → {number(report.losses.last)}"))
    return rows


def ledger_table(report: Report) -> Table | None:
    """Return a mean step by heading, before and after."""
    sides = _sides(report)
    if not sides:
        return None
    rows = []
    for heading in LEDGER_HEADINGS:
        if not any(side.ledger_ns[heading] for _, side in sides):
            continue
        cells = [HEADING_WORDS[heading]]
        for _, side in sides:
            total = sum(side.ledger_ns.values())
            cells += [milliseconds(side.ledger_ns[heading]), percent(side.ledger_ns[heading] / total if total else None)]
        rows.append(tuple(cells))
    for name, cells in (
        ("whole step", [[milliseconds(sum(side.ledger_ns.values())), ""] for _, side in sides]),
        ("communication under compute", [["", percent(side.overlap_ratio)] for _, side in sides]),
    ):
        rows.append((name, *(cell for pair in cells for cell in pair)))
    head = ["", *(cell for name, _ in sides for cell in (name, "share"))]
    note = "Mean step of a mean rank; overlap is the share of all communication that compute hides."
    return Table("A mean step by heading", tuple(head), rows, note=note)


def stability_table(report: Report) -> Table | None:
    """Return pace and how it spreads."""
    sides = _sides(report)
    if not sides:
        return None
    unit = rate_word(report)
    rows: list[tuple[str, ...]] = [("steps compared", *(steps_word(side.first, side.last) for _, side in sides))]
    rows.append(("unprofiled steps among them", *(number(side.steps) for _, side in sides)))
    rates = [side.rate for _, side in sides]
    for name, values in (
        (f"median, {unit}", [number(r.median) if r else "-" for r in rates]),
        ("10th to 90th percentile", [f"{number(r.p10)} to {number(r.p90)}" if r else "-" for r in rates]),
        ("coefficient of variation", [percent(r.cv) if r else "-" for r in rates]),
        ("second half against first", [percent(side.drift_ratio, signed=True) for _, side in sides]),
        (f"mean, {unit}", [number(_mean_rate(report, side)) for _, side in sides]),
        ("mean, tokens/s", [number(side.tokens_per_second) for _, side in sides]),
        ("step, mean", [milliseconds(side.step_mean_ns) for _, side in sides]),
        ("step, 50th percentile", [milliseconds(side.step_p50_ns) for _, side in sides]),
        ("step, 95th percentile", [milliseconds(side.step_p95_ns) for _, side in sides]),
        ("step, 99th percentile", [milliseconds(side.step_p99_ns) for _, side in sides]),
        ("longest step", [milliseconds(side.step_max_ns) for _, side in sides]),
    ):
        if any(value != "-" for value in values):
            rows.append((name, *values))
    note = (
        f"Rates over windows of {sides[0][1].window_steps} unprofiled steps; a window takes as long as its slowest rank,"
        " samples are those of all ranks. The coefficient of variation is standard deviation over mean."
    )
    return Table("Pace and its stability", ("", *(name for name, _ in sides)), rows, note=note)


def _mean_rate(report: Report, side: Side) -> float | None:
    return side.samples_per_second if report.rate_unit == "samples" else 1e9 / max(1, side.step_mean_ns)


def changes_table(report: Report) -> Table | None:
    """Return every decision with what it was expected to bring and what it brought."""
    if not report.changes:
        return None
    rows = []
    for place, one in list(enumerate(report.changes, start=1))[-ROWS_MAX:]:
        way = f"{knob_words(one.knob, one.from_value)} → {knob_words(one.knob, one.to_value)}"
        rows.append((
            str(place), one.knob, way, outcome_words(one), number(one.applied_step or one.step),
            percent(one.expected_gain_ratio), percent(one.measured_gain_ratio), bounds(one.gain_low, one.gain_high),
            elapsed(one.exploration_ns),
        ))  # fmt: skip
    head = ("", "knob", "change", "outcome", "from step", "expected", "measured", "interval", "trial cost")
    left_out = len(report.changes) - len(rows)
    note = (
        "Shares of step time saved. Measured in interleaved trials; the interval holds at every look at the tuner's rate"
        " of false accepts. A negative cost is a trial that gained time."
    )
    if left_out:
        note += f" The first {left_out} are left out here."
    return Table("What changed and what it brought", head, rows, texts=4, note=note)


def reasons(report: Report) -> list[tuple[int, str]]:
    """Return why each decision ended as it did, by the number that it has in the table."""
    return list(enumerate((one.reason for one in report.changes), start=1))[-ROWS_MAX:]


def ladder_table(report: Report) -> Table | None:
    """Return the what-if ladder."""
    ladder = report.ladder
    if ladder is None:
        return None
    rows = [
        (SCENARIO_WORDS.get(rung.name, rung.name), milliseconds(rung.step_ns), percent(rung.gain_ratio),
         f"{ladder.pace_ns / rung.step_ns:.2f} x" if rung.step_ns else "-", rung.bound.value.replace("_", " "))
        for rung in sorted(ladder.rungs, key=lambda rung: -rung.gain_ratio)
    ]  # fmt: skip
    whose = "the job" if ladder.of_rank is None else f"rank {ladder.of_rank}"
    age = f", calibrated by a window {plural(ladder.calibration_age_steps, 'step')} before" if ladder.source != "exact" else ""
    note = (
        f"Of {whose}, mean of the last {plural(ladder.steps, 'step')} up to step {ladder.step}{age}; today"
        f" {milliseconds(ladder.pace_ns)}. Lower bounds of the step, no promises, and they do not add up."
    )
    return Table("What would help most", ("if only this were gone", "step", "saves", "faster", "bounded by"), rows, note=note)


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
            cells.append(reading(one.after, one.unit))
        rows.append(tuple(cells))
    head = ("", "source", "before", "after") if has_after else ("", "source", "run")
    note = "Mean ± standard deviation over steps and ranks (ranks, torch) or over seconds and devices (daemon)."
    if not any(one.source == "daemon" for one in report.utilization):
        note += (
            " GPUs, links and hosts as the daemon saw them are not here: no recording of it covers these steps"
            " (pacecar dump makes one; --recording FILE adds it)."
        )
    return Table("Utilization", head, rows, texts=2, note=note)


def energy_table(report: Report) -> Table | None:
    """Return energy per step, sample and token, where GPUs count it."""
    sides = [(name, e) for name, e in (("before", report.energy_before), ("after", report.energy_after)) if e is not None]
    if not sides:
        return None

    def row(name: str, values: list[str]) -> tuple[str, ...]:
        return (name, *values)

    rows = [
        row("power of the job's GPUs", [amount(e.watts, "watts") for _, e in sides]),
        row("a step", [_joules(e.joules_per_step) for _, e in sides]),
        row("a sample", [_joules(e.joules_per_sample) for _, e in sides]),
        row("a token", [_joules(e.joules_per_token) for _, e in sides]),
        row("measured over", [_covered(e) for _, e in sides]),
    ]
    head = ("", *((name if report.is_tuned else "run") for name, _ in sides))
    return Table("Energy", head, rows, note="Of GPUs by their energy counters; processors and memory are not in it.")


def _joules(value: float | None) -> str:
    return "-" if value is None else f"{number(value)} J"


def _covered(energy: Energy) -> str:
    if energy.source == "metrics":
        return "the run's end, by the daemon's last answer"
    return f"{elapsed(energy.covered_ns)} of recording, {plural(energy.gpus or 0, 'GPU')}"


def cost_table(report: Report) -> Table | None:
    """Return what it costs."""
    cost = report.cost
    if cost is None:
        return None
    sides = [(name, side) for name, side in (("before", cost.before), ("after", cost.after)) if side is not None]
    rows = []
    for name, values in _cost_rows(cost, [side for _, side in sides]):
        if any(value != "-" for value in values):
            rows.append((name, *values))
    head = ("", *(name if report.is_tuned else "run" for name, _ in sides))
    note = f"{money(cost.price_per_gpu_hour)} a GPU and hour, one GPU a rank. The whole run, {elapsed(report.duration_ns)}"
    note += f" on {plural(cost.gpus, 'GPU')}, cost {money(cost.run)}."
    if cost.epoch_of is not None and all(side.per_epoch is None for _, side in sides):
        note += f" An epoch of {cost.epoch_of} cannot be priced: the records do not count them."
    return Table("Cost", head, rows, note=note)


def _cost_rows(cost: Cost, sides: list[CostSide]) -> Iterator[tuple[str, list[str]]]:
    yield "an hour of these ranks", [money(side.per_hour) for side in sides]
    yield "a million samples", [money(side.per_million_samples) for side in sides]
    yield "a million tokens", [money(side.per_million_tokens) for side in sides]
    if cost.epoch_of is not None:
        yield f"an epoch of {cost.epoch_of}", [money(side.per_epoch) for side in sides]
        yield "an epoch takes", [elapsed(None if s.epoch_seconds is None else s.epoch_seconds * 1e9) for s in sides]
        if cost.epochs > 1:
            yield f"{cost.epochs} epochs", [money(side.per_epochs) for side in sides]


def ranks_table(report: Report) -> Table:
    """Return what each rank did."""
    rows = []
    for one in report.ranks[:ROWS_MAX]:
        total = sum(one.ledger_ns.values())
        shares = [percent(one.ledger_ns[name] / total if total else None) for name in ("compute", "exposed_communication",
                                                                                       "data_wait", "host_bound")]  # fmt: skip
        rows.append((
            str(one.rank), " ".join(filter(None, (one.host, one.device))) or "-", number(one.steps), milliseconds(one.step_mean_ns), *shares,
            percent(one.slowest_ratio), percent(one.overhead_ratio), number(one.dropped_records), one.last_words or "-",
        ))  # fmt: skip
    head = ("rank", "where", "steps", "mean step", "compute", "exposed comm.", "data wait", "host-bound",
            "slowest in", "overhead", "dropped", "last words")  # fmt: skip
    note = "All steps of the run. Slowest in: share of the steps, of those that all ranks measured, in which it was last."
    if len(report.ranks) > ROWS_MAX:
        note += f" {len(report.ranks) - ROWS_MAX} more ranks are left out here."
    return Table("Ranks", head, rows, texts=2, note=note)


def incidents(report: Report) -> Table | None:
    """Return stragglers and hangs."""
    rows = []
    for late in report.slowdowns[-ROWS_MAX:]:
        who = "no rank in particular" if late.rank is None else f"rank {late.rank}"
        end = "over" if late.is_over else "not over at the last word"
        what = f"{milliseconds(late.excess_ns)} a step, at worst, so at most {elapsed(late.lost_ns)} lost; {end}. {late.evidence}"
        rows.append((f"straggler ({late.cause})", who, f"{late.since_step} to {late.last_step}", what))
    for hang in report.hangs[-ROWS_MAX:]:
        end = "went on" if hang.is_over else "was not seen to go on"
        what = f"silent for {elapsed(hang.silent_ns)} in {hang.phase}; {end}"
        if hang.last_collective is not None:
            what += f"; last collective {hang.last_collective}"
        rows.append(("suspected hang", f"rank {hang.rank}", str(hang.step), what))
    if not rows:
        return None
    return Table("Stragglers and hangs", ("what", "who", "steps", "how"), rows, texts=4, long=3)


def trust_table(report: Report) -> Table:
    """Return how far the figures may be trusted, and what measuring them cost."""
    over, error = report.overhead, report.estimate_error
    within = "-"
    if over.ratio is not None:
        word = "within" if over.ratio <= over.budget_ratio else "over"
        within = f"{over.ratio * 100:.2f} % of wall time, {word} the {over.budget_ratio * 100:.2f} % that it may take"
        if over.worst_ratio is not None:
            within += f"; worst rank {over.worst_rank}, {over.worst_ratio * 100:.2f} %"
    trials = "no trial"
    if over.exploration_ns is not None and report.changes:
        trials = f"{elapsed(over.exploration_ns)} lost to trials, {percent(over.exploration_ratio)} of the run"
        if over.exploration_ns < 0:
            trials = f"none: trials gained {elapsed(-over.exploration_ns)} against the settings before each"
    against = "not checked: it takes two profiled windows on a rank"
    if error is not None:
        against = (
            f"median {percent(error.median_ratio)}, worst {percent(error.worst_ratio)} of the step under a wrong heading,"
            f" against {plural(error.windows, 'profiled step')}"
        )
        if 0 < error.own_setting < error.windows:
            against += f"; settings profiled before ({error.own_setting}): {percent(error.own_setting_median_ratio)}"
    lost = sum(rank.dropped_records for rank in report.ranks)
    records = f"{number(sum(rank.records for rank in report.ranks))} read, {number(lost)} dropped by the hook"
    steps = f"{number(report.compared_steps)} measured by all ranks, {number(report.incomplete_steps)} by some"
    if report.is_sampled:
        steps += "; one step in several was measured where that would have cost more than allowed"
    rows = [
        ("pacecar's overhead", within),
        ("exploration", trials),
        ("error of the ledger's estimate", against),
        ("step records", records),
        ("steps", steps),
        ("tuner at the end", report.tuner or "-"),
    ]
    return Table("How far to trust this", ("", ""), rows, texts=2, long=1)


def line_table(report: Report) -> Table | None:
    """Return the time line as figures, in at most LINE_ROWS rows."""
    if not report.line:
        return None
    each = -(-len(report.line) // LINE_ROWS)
    rows = []
    for place in range(0, len(report.line), each):
        pieces = report.line[place : place + each]
        steps = sum(piece.rank_steps for piece in pieces) or 1
        mean = {name: sum(p.ledger_ns[name] * p.rank_steps for p in pieces) / steps for name in LEDGER_HEADINGS}
        total = sum(mean.values()) or 1
        paces = [piece.pace_ns for piece in pieces if piece.pace_ns is not None]
        shares = [percent(mean[name] / total) for name in LEDGER_HEADINGS]
        pace = milliseconds(sum(paces) / len(paces) if paces else None)
        rows.append((elapsed(pieces[0].at_ns), pace, *shares))
    head = ("from", "step", *(HEADING_WORDS[name] for name in LEDGER_HEADINGS))
    return Table("The time line in figures", head, rows)


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Return the verdicts, and what the runs were."""
    names = [_short(report, place) for place, report in enumerate(comparison.runs)]
    rows = []
    for place, row in enumerate(comparison.rows):
        name = names[place // 2]
        rate = f"{number(row.rate)} {comparison.rate_unit}/s"
        noise = percent(row.noise_ratio)
        rows.append((name, row.stretch, rate, milliseconds(row.step_ns), change_words(row.change), noise,
                     row.verdict or "-", row.why))  # fmt: skip
    note = (
        "Change of the median rate against run A with its 95 % interval: circular block bootstrap over windows of steps"
        " (Politis and Romano 1992), blocks of the cube root of their number (Hall, Horowitz and Jing 1995). Noise is how"
        " much a run differs from itself between its halves. One run is one sample: what differs from day to day is in no"
        " interval."
    )
    head = ("run", "stretch", "median", "mean step", "change", "noise", "verdict", "why")
    verdicts = Table("Which is faster", head, rows, texts=2, note=note, long=7)
    return [verdicts, _quantities(comparison, names)]


def _short(report: Report, place: int) -> str:
    return f"{chr(65 + place % 26)}  {report.run}"


def _quantities(comparison: Comparison, names: list[str]) -> Table:
    sides = [settled_side(report)[1] for report in comparison.runs]
    rows: list[tuple[str, ...]] = [
        ("ranks", *(str(report.world_size or report.ranks_seen) for report in comparison.runs)),
        ("knobs", *("-" if s is None else ", ".join(f"{k} {knob_words(k, v)}" for k, v in s.knobs.items()) or "-" for s in sides)),
        ("coefficient of variation", *(percent(s.rate.cv if s is not None and s.rate is not None else None) for s in sides)),
        ("step, 95th percentile", *(milliseconds(None if s is None else s.step_p95_ns) for s in sides)),
    ]
    for heading in LEDGER_HEADINGS:
        if any(s is not None and s.ledger_ns[heading] for s in sides):
            cells = [milliseconds(None if s is None else s.ledger_ns[heading]) for s in sides]
            rows.append((HEADING_WORDS[heading], *_with_differences(cells, [None if s is None else s.ledger_ns[heading] for s in sides])))
    rows.append(("communication under compute", *(percent(None if s is None else s.overlap_ratio) for s in sides)))
    rows.append(("energy a sample", *(_joules(_settled_energy(report)) for report in comparison.runs)))
    rows.append(("a million tokens", *(money(_settled_cost(report)) for report in comparison.runs)))
    rows.append(("pacecar's overhead", *(percent(report.overhead.ratio) for report in comparison.runs)))
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    return Table("The settled stretch of each", ("", *names), rows, note="Differences in brackets are against run A.")


def _with_differences(cells: list[str], values: list[int | None]) -> list[str]:
    first = values[0]
    said = cells[:1]
    for cell, value in zip(cells[1:], values[1:], strict=True):
        said.append(cell if value is None or first is None else f"{cell} ({(value - first) / 1e6:+.2f})")
    return said


def _settled_energy(report: Report) -> float | None:
    energy = report.energy_after if report.is_tuned else report.energy_before
    return None if energy is None else energy.joules_per_sample


def _settled_cost(report: Report) -> float | None:
    if report.cost is None:
        return None
    side = report.cost.after if report.is_tuned else report.cost.before
    return None if side is None else side.per_million_tokens
