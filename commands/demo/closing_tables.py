"""Draws the Result of a demo as the tables that close it, with rich.

Nothing is computed here.  A number that is missing is a dash, and when no change proved better the table says that
first, because a reader looks for the gain and must not have to infer that there is none.
"""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar
from pacecar.formatting.ledger_headings import HEADING_WORDS, SCENARIO_WORDS
from pacecar.formatting.quantities import percent, plural
from pacecar.knobs import setting
from pacecar.records import LEDGER_HEADINGS
from pacecar.run_statistics import WINDOW_STEPS

from .result import DecisionOutcome, LedgerSum, Result, Throughput

__all__ = ["closing"]

GAIN_RATIO_MIN = 0.005
"""Share of the step; a what-if bound that saves less is not worth a line."""


def closing(result: Result, places: dict[str, str], console: Console) -> Group:
    """Return what is printed at the end; `places` says where to look, in order."""
    parts: list[RenderableType] = [
        Text(),
        Text(_headline(result), style="bold"),
        Text(),
        _comparison(result),
        *_bars(result, console),
        *_decisions(result),
        *_ladder(result),
        *_facts(result),
        _places(places),
    ]
    return Group(*parts)


def _headline(result: Result) -> str:
    if result.throughput_before is None or result.throughput_after is None:
        return f"The run ended after {plural(result.steps, 'step')}: too early to compare before and after."
    if not result.kept:
        trials = [outcome for outcome in result.decisions if outcome.kind == "trial"]
        decided = plural(sum(outcome.verdict is not None for outcome in trials), "trial")
        if len(trials) == 0:
            return "No knob was turned: before and after are the same settings."
        return (
            f"Nothing proved better than the settings that the job came with ({decided} decided)."
            "  Before and after are the same settings, minutes apart."
        )
    ways: dict[str, list[str]] = {}
    for d in result.kept:
        ways.setdefault(d.knob, [setting(d.knob, d.from_value)]).append(setting(d.knob, d.to_value))
    kept = " and ".join(f"{knob} {' -> '.join(way)}" for knob, way in ways.items())
    return f"Kept: {kept}.  Throughput {percent((result.speedup or 1.0) - 1.0, signed=True)}."


def _comparison(result: Result) -> Table:
    table = _table("Before and after")
    table.add_column("")
    for column in ("before", "", "after", ""):
        table.add_column(column, justify="right")
    before, after = result.ledger_before, result.ledger_after
    for heading in LEDGER_HEADINGS:
        table.add_row(HEADING_WORDS[heading], *_share(before, heading), *_share(after, heading))
    table.add_section()
    table.add_row("step (ledger, rank 0)", *_share(before, "wall"), *_share(after, "wall"))
    table.add_row(
        "overlapped communication", *_share(before, "overlapped_communication"),
        *_share(after, "overlapped_communication"),
    )  # fmt: skip
    table.add_section()
    for knob in sorted({*result.knobs_before, *result.knobs_after}):
        values = [knobs.get(knob) for knobs in (result.knobs_before, result.knobs_after)]
        old, new = ("-" if value is None else setting(knob, value) for value in values)
        table.add_row(knob, old, "", Text(new, style="bold green" if old != new else ""), "")
    table.add_section()
    old_rate, new_rate = result.throughput_before, result.throughput_after
    table.add_row("samples/s, all ranks", _rate(old_rate), "", _rate(new_rate), "")
    table.add_row("  low .. high", _spread(old_rate), "", _spread(new_rate), "")
    table.add_row("steps compared", _range(result.steps_before), "", _range(result.steps_after), "")
    return table


def _table(title: str, gap: int = 1) -> Table:
    return Table(
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
    )


def _share(total: LedgerSum | None, heading: str) -> tuple[str, str]:
    """Return a heading's milliseconds for each step, and its share of the wall time."""
    if total is None or total.ledger.wall_ns == 0:
        return "-", ""
    part_ns = getattr(total.ledger, f"{heading}_ns")
    return f"{part_ns / total.steps / 1e6:.2f} ms", percent(part_ns / total.ledger.wall_ns)


def _rate(rate: Throughput | None) -> str:
    return "-" if rate is None else f"{rate.samples_per_second:.1f}"


def _spread(rate: Throughput | None) -> str:
    return "-" if rate is None else f"{rate.low:.1f} .. {rate.high:.1f}"


def _range(steps: tuple[int, int] | None) -> str:
    return "-" if steps is None else f"{steps[0]} .. {steps[1]}"


def _bars(result: Result, console: Console) -> list[RenderableType]:
    width = min(console.width, 88) - 9
    return [
        Text.assemble((f"{name:<8} ", "dim"), ledger_bar(total.ledger, width, console))
        for name, total in (("before", result.ledger_before), ("after", result.ledger_after))
        if total is not None and total.ledger.wall_ns > 0
    ]


def _decisions(result: Result) -> list[RenderableType]:
    if not result.decisions:
        return [Text(), Text("Decisions: none.")]
    table = _table("Decisions (share of step time saved)", gap=0)  # a bucket's row needs all of 80 columns
    for column in ("knob", "change", "step", "expected", "measured", "low .. high", "verdict"):
        # Where there is no room a long knob name is folded and nothing is cut off: half a verdict says nothing.
        justify: JustifyMethod = "left" if column in {"knob", "verdict"} else "right"
        table.add_column(column, justify=justify, no_wrap=column != "knob", overflow="fold")
    for outcome in result.decisions:
        applied = sorted(set(outcome.step_applied.values()))
        bounds = "-"
        if outcome.gain_low is not None and outcome.gain_high is not None:
            bounds = f"{outcome.gain_low * 100:.1f} .. {outcome.gain_high * 100:.1f}"
        table.add_row(
            outcome.knob,
            f"{setting(outcome.knob, outcome.from_value)} -> {setting(outcome.knob, outcome.to_value)}",
            "/".join(str(step) for step in applied) or "-",
            percent(outcome.expected_gain_ratio),
            percent(outcome.measured_gain_ratio),
            bounds,
            Text(
                (outcome.verdict or _pending(outcome)).replace("_", " "),
                style="green" if outcome.verdict == "kept" else "yellow",
            ),
        )
    reasons = [Padding(Text(_reason(o), style="dim"), (0, 0, 0, 2)) for o in result.decisions]
    return [Text(), table, *reasons]


def _ladder(result: Result) -> list[RenderableType]:
    """Return the what-if bounds, the largest saving first, or one line where none saves GAIN_RATIO_MIN."""
    ladder = result.what_if
    if ladder is None:
        return []
    whose = "the job" if ladder.of_rank is None else f"rank {ladder.of_rank}"
    worth = [rung for rung in ladder.rungs if rung.gain_ratio >= GAIN_RATIO_MIN]
    if not worth:
        return [Text(), Text(f"What would help: nothing on the ladder saves {percent(GAIN_RATIO_MIN)} of the step.")]
    table = _table(f"What would help {whose}, at most")
    table.add_column("if only this were gone", no_wrap=True)
    for column in ("step", "saves", ""):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("as it is", f"{ladder.pace_ns / 1e6:.2f} ms", "", "")
    for rung in sorted(worth, key=lambda rung: -rung.gain_ratio):
        faster = f"{ladder.pace_ns / rung.step_ns:.2f} x" if rung.step_ns else "-"
        words = SCENARIO_WORDS.get(rung.name, rung.name)
        if rung.name == "all":
            words = "communication, data and launch gaps"
        table.add_row(words, f"{rung.step_ns / 1e6:.2f} ms", percent(rung.gain_ratio), faster)
    note = f"mean of the last {plural(ladder.steps, 'step')}; bounds, not promises, and they do not add up"
    return [Text(), table, Padding(Text(note, style="dim"), (0, 0, 0, 2))]


def _facts(result: Result) -> list[RenderableType]:
    losses = result.losses
    lost = sum(count.dropped_records or 0 for count in result.ranks)
    lines = [
        *([("proven", _proven(result))] if result.kept else []),
        ("overhead", _overhead(result)),
        ("trials", "-" if result.exploration_ns is None else f"cost {result.exploration_ns / 1e9:.1f} s"),
        ("loss", f"{_number(losses.first)} -> {_number(losses.last)} nats"),
        ("held out", f"{_number(losses.validation_first)} -> {_number(losses.validation_last)} bits per byte"),
        ("estimate", _estimate(result)),
        ("records", f"{sum(count.records for count in result.ranks)} kept, {lost} dropped"),
    ]
    if result.tuner is not None:
        lines.append(("tuner", result.tuner))
    if result.throughput_before is not None and result.throughput_after is not None:
        lines.append(("spread", f"median and 10th .. 90th percentile over windows of {WINDOW_STEPS} unprofiled steps"))
    return [Text(), *(Text.assemble((f"{name:<9} ", "dim"), text) for name, text in lines)]


def _estimate(result: Result) -> str:
    error = result.estimate_error
    if error is None:
        return "not checked: fewer than two exact windows on each rank"
    against = f"against {plural(error.windows, 'window')}"
    said = f"{against}: median {percent(error.median_ratio)}, worst {percent(error.worst_ratio)} of the step"
    if error.own_setting == error.windows:
        return said
    own = f"median {percent(error.own_setting_median_ratio)}" if error.own_setting else "none"
    return f"{said}\n{' ' * 10}of settings that had a window before ({error.own_setting}): {own}"


def _overhead(result: Result) -> str:
    """Return what pacecar cost; where that is over its budget, after how much more training it is within."""
    overhead, budget = result.overhead, result.overhead_budget
    if overhead is None:
        return "-"
    said = f"{overhead.ratio * 100:.2f} % of the run's wall time was pacecar's own, on all ranks"
    if budget is None:
        return said
    indent = f"\n{' ' * 10}"
    if overhead.ratio <= budget:
        return f"{said}{indent}within its budget of {percent(budget)}"
    paid = overhead.paid_by_seconds(budget)
    if paid is not None:
        more = paid - overhead.wall_seconds
        when = f"start and trials are paid back after {more:.{1 if more < 10 else 0}f} s more of training"
    elif overhead.late_ratio is not None:
        when = f"it goes on like that, with {overhead.late_ratio * 100:.2f} % of late"
    else:
        when = "it is too early to say by when that is paid back"
    return f"{said}{indent}over its budget of {percent(budget)}:{indent}{when}"


def _proven(result: Result) -> str:
    ratio, low, _ = result.proven
    if low is None:
        return f"{percent(ratio)} of step time saved, as measured by trials too few to bound it"
    return f"at least {percent(low)} of step time saved; the trials measured {percent(ratio)}"


def _reason(outcome: DecisionOutcome) -> str:
    """Return the reason, with the knob first; reasons of pacecar's own policy begin with it already."""
    if outcome.reason.startswith(outcome.knob):
        return outcome.reason
    return f"{outcome.knob} -> {setting(outcome.knob, outcome.to_value)}: {outcome.reason}"


def _pending(outcome: DecisionOutcome) -> str:
    return "advice" if outcome.kind == "advise" else "still open"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _places(places: dict[str, str]) -> RenderableType:
    # A path that is wrapped cannot be copied.
    return Group(
        *(
            Text.assemble((f"{name:<9} ", "dim"), place, no_wrap=True, overflow="ignore")
            for name, place in places.items()
        )
    )
