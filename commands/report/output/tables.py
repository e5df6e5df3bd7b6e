"""Makes the tables of a run as text: pace, ledger, decisions and what-if bounds, and the headline.

The content of each cell is decided here; page, markdown and terminal only decide its looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pacecar.formatting.ledger_headings import HEADING_WORDS, SCENARIO_WORDS
from pacecar.formatting.quantities import percent, plural
from pacecar.formatting.tables import Table, table_of_rows
from pacecar.records import LEDGER_HEADINGS

from ..document import Report, ReportChange, RunSide
from ..figures import STABLE_RATIO, Spread
from ..formatting import (  # fmt: skip
    bounds,
    change_words,
    elapsed,
    knob_words,
    milliseconds,
    mostly_unknown,
    number,
    part_of,
    points,
    rate_word,
    relative,
    signed_milliseconds,
    steps_word,
    trial_seconds,
)
from ..sections.hangs import hang_sentences
from .charts import outcome_words

__all__ = [
    "ROWS_MAX", "changes_table", "facts", "headline", "ladder_table", "ledger_table", "line_table", "reasons",
    "sides_of", "stability_table", "stable_word",
]  # fmt: skip

ROWS_MAX = 200
"""Rows of one table: the page shows the last so many, and `--json` has all."""

LINE_ROWS = 40
"""Rows of the time line in figures: a screen of them."""

STABLE_WORD = f"±{STABLE_RATIO * 100:g} %"
"""The limit of a stable pace, as text."""


def sides_of(report: Report) -> list[tuple[str, RunSide]]:
    """Return the stretches shown side by side, with their names."""
    if not report.is_tuned:
        return [("run", report.before)] if report.before is not None else []
    return [(name, side) for name, side in (("before", report.before), ("after", report.after)) if side is not None]


def headline(report: Report) -> str:
    """Return the result of the run in a few sentences: hangs first, then what tuning brought."""
    return " ".join([*hang_sentences(report), _tuning_words(report)])


def _tuning_words(report: Report) -> str:
    kept = [change for change in report.changes if change.outcome == "kept"]
    if report.before is None and report.steps == 0:
        return "No step was recorded: there is nothing to measure."
    if report.before is None:
        return f"The run ended after {plural(report.steps, 'step')}: too early to compare anything."
    if not report.is_tuned:
        rate = report.before.rate
        pace = "" if rate is None else f" Median {number(rate.median)} {rate_word(report)}."
        return f"No knob was turned.{pace}"
    return " ".join([*_kept_words(kept), *_proven_words(report), *_change_words(report)])


def _kept_words(kept: Sequence[ReportChange]) -> Iterator[str]:
    """Yield the kept changes that are still set, then those that are not."""
    ways: dict[tuple[bool, str], list[str]] = {}
    last_life = max((one.life for one in kept), default=0)
    for one in kept:
        if one.life == last_life:
            way = ways.setdefault((one.is_in_force, one.knob), [knob_words(one.knob, one.from_value)])
            way.append(knob_words(one.knob, one.to_value))
    if not ways:
        yield "Nothing proved better than the initial settings."
    for is_in_force, text in ((True, "Kept: {}."), (False, "Kept at first, but no longer set at the end: {}.")):
        said = " and ".join(f"{knob} {' → '.join(way)}" for (now, knob), way in ways.items() if now is is_in_force)
        if said:
            yield text.format(said)


def _proven_words(report: Report) -> Iterator[str]:
    gain, low = report.proven_gain_ratio, report.proven_gain_low
    if gain is None:
        return
    if low is None or low <= 0:
        within = "no bound" if low is None else f"bounds {bounds(low, report.proven_gain_high)}"
        yield f"Interleaved trials measured {percent(gain)} of step time saved, with {within}."
        return
    # The throughput at the bound: that of the measured gain would flatter.
    times = f", {1 / (1 - low):.2f} times the throughput" if low < 1 else ""
    yield f"Interleaved trials prove at least {percent(low)} of step time saved{times} (measured {percent(gain)})."


def _change_words(report: Report) -> Iterator[str]:
    """Yield the change of throughput, and why it shows no more than it does."""
    change, noise = report.change, report.change_noise_ratio
    if change is None:
        return
    yield f"Throughput after against before: {change_words(change)}."
    if report.change_verdict in ("faster", "slower"):
        return
    if noise is not None and noise >= abs(change.change_ratio):
        says = "decides nothing" if report.change_verdict == "not decided" else "shows no difference"
        yield f"That {says}: {_drifter(report)} by {percent(noise)}, so the machine itself changed."
    elif change.low is not None and change.high is not None:
        yield "That interval contains zero: the machine's own noise between these two stretches was as large."
    elif report.before is not None and report.after is not None:
        pair = f"{plural(report.before.windows, 'window')} before and {report.after.windows} after"
        yield f"For an interval {pair} are too few, since neighbouring windows are alike."
    if report.proven_gain_low is not None:
        yield "The proof is the trials, which took turns with the old settings."


def _drifter(report: Report) -> str:
    """Return which stretch drifted the most."""
    drifts = [(abs(side.drift_ratio or 0.0), name) for name, side in sides_of(report)]
    return f"the second half of '{max(drifts)[1]}' differs from its first"


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the facts about the run: name and value."""
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
        ("samples", number(report.samples) + (" (a guess)" if report.samples_guessed else "")),
        ("tokens", number(report.tokens)),
    ]
    losses = report.losses
    if losses is not None:
        rows.append(("loss", f"{number(losses.first)} → {number(losses.last)}"))
        if losses.validation_last is not None:
            ends = f"{number(losses.validation_first)} → {number(losses.validation_last)}"
            rows.append(("held-out text", f"{ends} bits per byte"))
    return rows


def ledger_table(report: Report) -> Table | None:
    """Return a mean step by heading, before and after."""
    sides = sides_of(report)
    if not sides:
        return None
    rows = []
    wholes = [sum(side.ledger_ns.values()) for _, side in sides]
    unknown = [name for name, side in sides if mostly_unknown(side.ledger_ns)]
    are_comparable = not unknown
    for heading in LEDGER_HEADINGS:
        if not any(side.ledger_ns.get(heading) for _, side in sides):
            continue
        cells = [HEADING_WORDS[heading]]
        for _, side in sides:
            total = sum(side.ledger_ns.values())
            cells += [
                milliseconds(part_ns := part_of(side.ledger_ns, heading)),
                percent(part_ns / total if part_ns is not None and total else None),
            ]
        values = [side.ledger_ns.get(heading) if are_comparable else None for _, side in sides]
        rows.append((*cells, *_changed(signed_milliseconds, values)))
    overlaps = [side.overlap_ratio for _, side in sides]
    compared = overlaps if are_comparable else [None] * len(sides)
    for name, pairs, changed in (
        ("whole step", [[milliseconds(whole), ""] for whole in wholes], _changed(signed_milliseconds, wholes)),
        ("communication under compute", [["", percent(one)] for one in overlaps], _changed(points, compared)),
    ):
        rows.append((name, *(cell for pair in pairs for cell in pair), *changed))
    head = ["", *(cell for name, _ in sides for cell in (name, "share")), *_change_head(sides)]
    note = "Mean step of a mean rank; overlap is the share of all communication that compute hides."
    if unknown and len(sides) > 1:
        note += f" Most of the time in '{unknown[0]}' is unknown, so only the whole step can be compared."
    return table_of_rows("A mean step by heading", tuple(head), rows, note=note)


def _change_head(sides: Sequence[object]) -> tuple[str, ...]:
    return ("change",) if len(sides) == 2 else ()


def _changed(words: Callable[[float | None, float | None], str], values: Sequence[float | None]) -> tuple[str, ...]:
    """Return the cell of the change column; empty with one stretch only."""
    return (words(values[0], values[1]),) if len(values) == 2 else ()


def stability_table(report: Report) -> Table | None:
    """Return the pace and its spread."""
    sides = sides_of(report)
    if not sides:
        return None
    unit = rate_word(report)
    each = [side for _, side in sides]
    rates = [side.rate for side in each]
    nothing = tuple("" for _ in _change_head(sides))
    rows: list[tuple[str, ...]] = [
        ("steps compared", *(steps_word(side.first, side.last) for side in each), *nothing),
        ("unprofiled steps among them", *(number(side.steps) for side in each), *nothing),
        (f"median, {unit}", *(number(r.median if r else None) for r in rates),
         *_changed(relative, [r.median if r else None for r in rates])),
        (f"mean ± standard deviation, {unit}", *(_mean_and_sd(r) for r in rates),
         *_changed(relative, [r.mean if r else None for r in rates])),
        ("coefficient of variation", *(percent(r.cv if r else None) for r in rates),
         *_changed(points, [r.cv if r else None for r in rates])),
        (f"stable within {STABLE_WORD}", *(stable_word(r) for r in rates), *nothing),
        ("second half against first", *(percent(side.drift_ratio, signed=True) for side in each), *nothing),
        ("10th to 90th percentile", *(f"{number(r.p10)} to {number(r.p90)}" if r else "-" for r in rates), *nothing),
    ]  # fmt: skip
    for name, words, values in (
        (f"of the whole stretch, {unit}", number, [_mean_rate(report, side) for side in each]),
        ("of the whole stretch, tokens/s", number, [side.tokens_per_second for side in each]),
        ("step, mean", milliseconds, [side.step_mean_ns for side in each]),
        ("step, 50th percentile", milliseconds, [side.step_p50_ns for side in each]),
        ("step, 95th percentile", milliseconds, [side.step_p95_ns for side in each]),
        ("step, 99th percentile", milliseconds, [side.step_p99_ns for side in each]),
        ("longest step", milliseconds, [side.step_max_ns for side in each]),
    ):
        rows.append((name, *map(words, values), *_changed(relative, values)))
    rows = [row for row in rows if any(cell != "-" for cell in row[1 : 1 + len(sides)])]
    note = (
        f"Rates over windows of {each[-1].window_steps} unprofiled steps; a window takes as long as its slowest rank,"
        " samples are those of all ranks. The coefficient of variation is standard deviation over mean: up to"
        f" {STABLE_RATIO * 100:g} % a pace is called stable."
    )
    return table_of_rows(
        "Pace and its stability", ("", *(name for name, _ in sides), *_change_head(sides)), rows, note=note
    )


def _mean_and_sd(rate: Spread | None) -> str:
    if rate is None:
        return "-"
    return number(rate.mean) + ("" if rate.sd is None else f" ± {number(rate.sd)}")


def stable_word(rate: Spread | None) -> str:
    """Return whether a pace stays within STABLE_RATIO, and its variation."""
    if rate is None or rate.cv is None:
        return "-"
    if rate.is_stable is None:
        return "too few windows"
    return f"{'yes' if rate.is_stable else 'no'}: ±{percent(rate.cv)}"


def _mean_rate(report: Report, side: RunSide) -> float | None:
    return side.samples_per_second if report.rate_unit == "samples" else 1e9 / max(1, side.step_mean_ns)


def changes_table(report: Report) -> Table | None:
    """Return every decision with its expected and measured gain."""
    if not report.changes:
        return None
    rows: list[tuple[str, ...]] = []
    for place, one in list(enumerate(report.changes, start=1))[-ROWS_MAX:]:
        way = f"{knob_words(one.knob, one.from_value)} → {knob_words(one.knob, one.to_value)}"
        rows.append((
            str(place), one.knob, way, outcome_words(one), number(one.applied_step or one.step),
            percent(one.expected_gain_ratio), percent(one.measured_gain_ratio), bounds(one.gain_low, one.gain_high),
            trial_seconds(_shown_ns(one)),
        ))  # fmt: skip
    head = ("", "knob", "change", "outcome", "from step", "expected", "measured", "interval", "trial cost")
    left_out = len(report.changes) - len(rows)
    costs = [cost for one in report.changes if (cost := _shown_ns(one)) is not None]
    if len(costs) > 1:
        rows.append(("all", *[""] * (len(head) - 2), trial_seconds(sum(costs))))
    note = (
        "Shares of step time saved, measured in interleaved trials; the interval holds at every look, at the tuner's"
        " rate of false accepts. A trial costs the extra time of its steps compared with the setting before it;"
        " with a negative cost it gained time."
    )
    if left_out:
        note += f" The first {left_out} are left out here."
    return table_of_rows("What changed and what it brought", head, rows, texts=4, note=note)


def _shown_ns(change: ReportChange) -> int | None:
    """Return a trial's cost rounded to a hundredth of a second, as shown, so that the column adds up."""
    return None if change.exploration_ns is None else round(change.exploration_ns / 10_000_000) * 10_000_000


def reasons(report: Report) -> list[tuple[int, str]]:
    """Return the reason for the outcome of each decision, with its number in the table."""
    return list(enumerate((one.reason for one in report.changes), start=1))[-ROWS_MAX:]


def ladder_table(report: Report) -> Table | None:
    """Return the what-if bounds, the largest saving first."""
    ladder = report.ladder
    if ladder is None:
        return None
    rows = [
        (SCENARIO_WORDS.get(rung.name, rung.name), milliseconds(rung.step_ns), percent(rung.gain_ratio),
         f"{ladder.pace_ns / rung.step_ns:.2f} x" if rung.step_ns else "-", rung.bound.value.replace("_", " "))
        for rung in sorted(ladder.rungs, key=lambda rung: -rung.gain_ratio)
    ]  # fmt: skip
    whose = "the job" if ladder.of_rank is None else f"rank {ladder.of_rank}"
    age = (
        f", calibrated by a window {plural(ladder.calibration_age_steps, 'step')} before"
        if ladder.source != "exact"
        else ""
    )
    note = (
        f"Of {whose}, mean of the last {plural(ladder.steps, 'step')} up to step {ladder.step}{age}; today"
        f" {milliseconds(ladder.pace_ns)}. Lower bounds of the step, no promises, and they do not add up."
    )
    return table_of_rows(
        "What would help most",
        ("if only this were gone", "step at least", "saves at most", "faster", "bounded by"),
        rows,
        note=note,
    )


def line_table(report: Report) -> Table | None:
    """Return the time line in figures, in at most LINE_ROWS rows."""
    if not report.line:
        return None
    each = -(-len(report.line) // LINE_ROWS)
    rows = []
    for place in range(0, len(report.line), each):
        pieces = report.line[place : place + each]
        steps = sum(piece.rank_steps for piece in pieces) or 1
        seen = {name for piece in pieces for name in piece.ledger_ns}
        mean = {name: sum(p.ledger_ns.get(name, 0) * p.rank_steps for p in pieces) / steps for name in seen}
        total = sum(mean.values()) or 1
        paces = [piece.pace_ns for piece in pieces if piece.pace_ns is not None]
        shares = [percent(mean[name] / total if name in mean else None) for name in LEDGER_HEADINGS]
        pace = milliseconds(sum(paces) / len(paces) if paces else None)
        rows.append((elapsed(pieces[0].at_ns), pace, *shares))
    head = ("from", "step", *(HEADING_WORDS[name] for name in LEDGER_HEADINGS))
    return table_of_rows("The time line in figures", head, rows)
