"""What people see: within 80 x 24 while it runs, and at the end no gain that was not proved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import pytest
from msgspec import structs
from rich.console import Console, RenderableType

from pacecar.commands.demo.closing_tables import closing, within_budget_after_seconds
from pacecar.commands.demo.progress import (
    EVENTS_MAX,
    PLAIN_CELLS_MAX,
    RECENT_STEPS,
    REST_SECONDS,
    DemoSetup,
    Progress,
    RestDetector,
    event_line,
    plain_line,
    screen,
)
from pacecar.commands.report.document import Report, ReportLosses
from pacecar.commands.report.output.tables import changes_table, headline, ledger_table, stability_table
from pacecar.commands.report.output.utilization_tables import trust_table
from pacecar.commands.report.reading.notices import Notice
from pacecar.formatting.ledger_bar import ledger_bar
from pacecar.formatting.quantities import percent
from pacecar.knobs import setting
from pacecar.records import (
    Bound,
    Decision,
    Goodbye,
    JobHello,
    Knobs,
    KnobSwitch,
    Ledger,
    Rung,
    StepRecord,
    TunerStatus,
    Verdict,
    WhatIf,
)
from tests.commands.report.runs import MS, report_of, tuned, untuned
from tests.kit.records import decision, verdict

SETUP = DemoSetup(
    "20261121T000000Z-abcd", "http://127.0.0.1:9850/metrics", "runs/20261121T000000Z-abcd", "200 s",
    overhead_budget=0.01,
)  # fmt: skip
LEDGER = Ledger(
    wall_ns=100_000_000, compute_ns=60_000_000, exposed_communication_ns=20_000_000, exposed_copy_ns=1_000_000,
    data_wait_ns=5_000_000, host_bound_ns=6_000_000, optimizer_host_ns=4_000_000, checkpoint_ns=2_000_000,
    unknown_ns=2_000_000, communication_ns=30_000_000, overlapped_communication_ns=10_000_000,
)  # fmt: skip


def console(*, colour: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, height=24, color_system="truecolor" if colour else None)


def shown(renderable: RenderableType, on: Console) -> str:
    with on.capture() as capture:
        on.print(renderable)
    return capture.get()


def a_step(rank: int, number: int, *, samples: int | None = 16, exact: bool = False) -> StepRecord:
    return StepRecord(
        job="j", rank=rank, step=number, ended_wall_ns=0, wall_ns=(1 + rank) * 10**10 if exact else LEDGER.wall_ns,
        data_wait_ns=None, forward_ns=None, backward_ns=None, optimizer_ns=None, micro_batches=None, samples=samples,
        tokens=None, ledger=Ledger(wall_ns=0) if exact else LEDGER, source="exact" if exact else "estimate",
        calibration_age_steps=None, totals=LEDGER, total_steps=number, total_samples=None, total_tokens=None,
        overhead_ns=0, total_overhead_ns=0, total_windows=0, dropped_records=0,
        knobs=Knobs(epoch=7, values={"bucket_bytes": 25 * 2**20, "micro_batch": 4}),
    )  # fmt: skip


def busy() -> Progress:
    progress = Progress()
    for rank in (0, 1):
        progress.add(
            [
                JobHello(
                    job="j", rank=rank, local_rank=rank, world_size=2, pid=1, host="h", device="cpu", backend="gloo",
                    framework="torch", pacecar_version="0", started_wall_ns=0,
                ),
                *(a_step(rank, n, exact=n == 30) for n in range(1, 200)),
            ]
        )  # fmt: skip
    for number in range(1, 10):
        progress.add(
            [
                decision(number, from_value=2**20 * number, to_value=2**21 * number),
                TunerStatus(
                    job="j", rank=0, state="trial", detail="bucket_bytes 1 MiB -> 2 MiB: " + "pair 2 of 8, " * 5,
                    step=1, wall_ns=0, exploration_ns=0, trials=number,
                ),
                verdict(number, measured_gain_ratio=0.05),
            ]
        )  # fmt: skip
    return progress


@pytest.mark.parametrize("colour", [False, True])
def test_the_busiest_screen_fits_80_by_24(colour: bool) -> None:
    on = console(colour=colour)
    text = shown(screen(busy(), SETUP, 83.0, on), on)
    plain = shown(screen(busy(), SETUP, 83.0, console()), console())
    assert len(text.splitlines()) <= 24
    assert all(len(line) <= 80 for line in plain.splitlines())
    for part in ("199", "320.0 samples/s", "100.0 ms/step", "exposed communication 20.0 %", "micro_batch 4", "trial  "):
        assert part in plain
    assert "http://127.0.0.1:9850/metrics" in plain


def test_before_the_first_step_the_screen_shows_what_it_waits_for() -> None:
    on = console()
    assert "starting" in shown(screen(Progress(), SETUP, 1.0, on), on)
    assert "starting" in plain_line(Progress(), 1.0)


def test_a_display_keeps_no_more_than_the_recent_steps() -> None:
    progress = Progress()
    progress.add(a_step(0, n) for n in range(1, 10_000))
    ledger = progress.ledger()
    assert ledger.wall_ns == RECENT_STEPS * LEDGER.wall_ns


def test_samples_that_are_not_counted_are_not_shown_as_zero() -> None:
    progress = Progress()
    progress.add([a_step(0, 1, samples=None)])
    assert progress.samples_per_second() is None
    assert "samples" not in plain_line(progress, 1.0)


def test_records_that_a_display_does_not_need_do_not_disturb_it() -> None:
    progress = Progress()
    progress.add([Goodbye(job="j", rank=0, reason="x", wall_ns=0)])
    assert progress.last is None


@pytest.mark.parametrize("width", [1, 7, 20, 68, 200])
def test_a_bar_is_always_full(width: int) -> None:
    assert len(ledger_bar(LEDGER, width, console()).plain) == width


def test_a_bar_of_no_time_is_empty() -> None:
    assert ledger_bar(Ledger(wall_ns=0), 40, console()).plain == ""


def test_bytes_are_written_as_people_write_them_and_missing_is_a_dash() -> None:
    assert setting("bucket_bytes", 25 * 2**20) == "25 MiB"
    assert setting("bucket_bytes", 512 * 2**10) == "0.5 MiB"
    assert setting("micro_batch", 8) == "8"
    assert percent(None) == "-"
    assert percent(0.0) == "0.0 %"


@pytest.fixture(scope="module")
def tuned_report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """micro_batch 2 -> 4 was kept, and saves a fifth of the step."""
    return report_of(tuned(tmp_path_factory.mktemp("runs") / "one"))


def closed(report: Report, on: Console | None = None, settled_ratio: float | None = None) -> str:
    on = on or console()
    report = structs.replace(report, losses=ReportLosses(first=5.5, last=2.0))
    return shown(closing(report, settled_ratio, {"report": "runs/x/report.json"}, on), on)


def test_the_closing_fits_80_columns_and_has_the_reports_tables(tuned_report: Report) -> None:
    text = closed(tuned_report)
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    words = " ".join(text.split())
    assert " ".join(headline(tuned_report).split()) in words
    for table in (
        stability_table(tuned_report), ledger_table(tuned_report), changes_table(tuned_report),
        trust_table(tuned_report),
    ):  # fmt: skip
        assert table.name in words
        for row in table.rows:
            assert all(cell in words for cell in row if " " not in cell), row
    for part in ("+25.0 %", "micro_batch: kept", "5.500 -> 2.000 nats", "- -> - bits per byte", "runs/x/report.json"):
        assert part in text


def test_a_change_is_one_line_of_80_cells_with_all_that_is_known_of_it(tuned_report: Report) -> None:
    (row,) = [line for line in closed(tuned_report).splitlines() if "1 micro_batch 2 → 4" in line]
    for part in ("kept", "59", "10.0 %", "20.0 %", "+10.0 .. +30.0 %"):
        assert part in row


@pytest.mark.parametrize("knob", ["bucket_bytes", "first_bucket_bytes"])
def test_the_widest_change_is_folded_and_not_cut(tuned_report: Report, knob: str) -> None:
    wide = structs.replace(
        tuned_report.changes[0], knob=knob, from_value=25 * 2**20, to_value=16 * 2**20, gain_low=-0.302,
        expected_gain_ratio=-0.123, outcome="rolled_back", applied_step=1200,
    )  # fmt: skip
    text = closed(structs.replace(tuned_report, changes=(wide,)))
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    (row,) = [line for line in text.splitlines() if "1 200" in line]
    for part in ("-12.3 %", "20.0 %", "-30.2 .. +30.0 %"):
        assert part in row
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "rolled" in text
    assert "back" in text


def test_a_trial_without_a_verdict_is_open_and_missing_bounds_have_no_table(
    tuned_report: Report,
) -> None:
    trial = structs.replace(
        tuned_report.changes[0], outcome=None, measured_gain_ratio=None, gain_low=None, gain_high=None
    )
    text = closed(structs.replace(tuned_report, changes=(trial,), ladder=None))
    (row,) = [line for line in text.splitlines() if "2 → 4" in line and "still open" in line]
    assert " - " in row
    assert "20.0 %" not in row
    assert "What would help" not in text
    assert "advice" in closed(structs.replace(tuned_report, changes=(structs.replace(trial, kind="advise"),)))


def test_where_the_terminal_has_ascii_only_nothing_else_is_printed(tuned_report: Report) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    on = Console(file=ascii_only, width=80, color_system=None)
    closed(tuned_report, on).encode("ascii")
    on.print(closing(tuned_report, None, {}, on))
    assert "micro_batch 2 -> 4" in closed(tuned_report, on)


@pytest.mark.slow
def test_missing_gains_and_damaged_records_are_stated(tuned_report: Report, tmp_path: Path) -> None:
    lost = structs.replace(tuned_report, notices=(Notice("rank1.jsonl", "line 5: not a record", 2, True),))
    assert "lost: rank1.jsonl: line 5: not a record (2 such)" in closed(lost)
    for kept, steps, words in ((False, 200, "Nothing proved better"), (True, 5, "too early to compare")):
        folder = tuned(tmp_path / str(steps), steps=steps, kept=kept)
        assert words in closed(report_of(folder))
    assert "No knob was turned" in closed(report_of(untuned(tmp_path / "un")))


@pytest.mark.parametrize(
    ("ratio", "settled", "more", "said"),
    [
        (0.0099, None, 0.0, None),
        (0.012, 0.006, 10.0, "within its budget after 10 s more of training"),
        (0.0104, 0.006, 2.0, "within its budget after 2.0 s more of training"),
        (0.013, 0.012, None, "still above its budget: 1.20 % since the last switch"),
        (0.013, None, None, "too early to say"),
        (None, None, None, None),
    ],
)
def test_an_overhead_above_its_budget_stands_with_the_time_until_it_is_within(
    tuned_report: Report, ratio: float | None, settled: float | None, more: float | None, said: str | None
) -> None:
    overhead = structs.replace(tuned_report.overhead, ratio=ratio, budget_ratio=0.01)
    ranks = [structs.replace(rank, steps=200, step_mean_ns=100 * MS) for rank in tuned_report.ranks]  # 20 s
    report = structs.replace(tuned_report, overhead=overhead, ranks=tuple(ranks))
    assert within_budget_after_seconds(report, settled) == (None if more is None else pytest.approx(more))
    text = closed(report, settled_ratio=settled)
    assert said is None or said in text
    assert ("\noverhead  " in text) is (said is not None)


def costly(costs_ns: dict[int, int], switches: tuple[int, ...]) -> Progress:
    """Two ranks of 100 steps of 100 ms; from each key of `costs_ns` on, a step costs that much."""
    progress = Progress()
    for rank in (0, 1):
        total_ns = cost_ns = 0
        for number in range(1, 101):
            cost_ns = costs_ns.get(number, cost_ns)
            total_ns += cost_ns
            totals = Ledger(wall_ns=number * 100 * MS, unknown_ns=number * 100 * MS)
            progress.add([structs.replace(a_step(rank, number), totals=totals, total_overhead_ns=total_ns)])
            if number in switches:
                knobs = Knobs(epoch=number, values={"micro_batch": number})
                progress.add([KnobSwitch(job="j", rank=rank, decision=1, epoch=number, step=number, knobs=knobs,
                                         duration_ns=1)])  # fmt: skip
    return progress


def test_the_overhead_since_the_last_switch_leaves_start_up_and_the_switch_out() -> None:
    progress = costly({1: 20 * MS, 11: MS // 2}, (5, 12))
    assert progress.settled_overhead_ratio() == pytest.approx(0.005)
    assert costly({1: MS}, ()).settled_overhead_ratio() is None, "start-up is still in it"
    assert costly({1: MS}, (12, 90)).settled_overhead_ratio() is None, "0.8 s are too short to tell"


def a_trial(number: int) -> Decision:
    return decision(number, knob="micro_batch")


def a_verdict(number: int, outcome: Literal["kept", "rolled_back"] = "kept") -> Verdict:
    return verdict(number, knob="micro_batch", outcome=outcome, measured_gain_ratio=0.3, gain_low=0.1, gain_high=0.5)


def a_status(state: Literal["watching", "trial", "screening"], detail: str = "so") -> TunerStatus:
    return TunerStatus(job="j", rank=0, state=state, detail=detail, step=250, wall_ns=0, exploration_ns=0, trials=1)


def test_the_trial_under_way_is_on_the_screen_with_its_bounds_and_then_its_verdict() -> None:
    progress, on = Progress(), console()
    progress.add(a_step(0, number) for number in range(1, 40))
    detail = "micro_batch 1 -> 2: trial, pair 3 of at most 48, saves 30.0 % so far (10.0 .. 50.0 %)"
    progress.add([a_trial(1), a_status("trial", detail)])
    text = shown(screen(progress, SETUP, 5.0, on), on)
    assert "trial     micro_batch 1 -> 2: trial, pair 3 of at most 48, saves 30.0 %" in text
    assert "(10.0 .. 50.0 %)" in text
    assert plain_line(progress, 5.0) == f"0:05  step 250  {detail}"
    progress.add([a_verdict(1), a_status("watching")])
    assert progress.trial is None
    text = shown(screen(progress, SETUP, 5.0, on), on)
    assert "kept: micro_batch 1 -> 2, step time saved +30.0 % (10.0 .. 50.0 %)" in text
    assert "1.00 x the start" in text
    assert "overhead  0.00 % of the time so far, 1.0 % allowed" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_screen_may_be_wide_and_what_the_tuner_says_too_long(width: int) -> None:
    progress = busy()
    progress.add([a_status("watching", "nothing near it is better; " * 40)])
    wide = Console(file=io.StringIO(), width=width, height=24, color_system=None)
    lines = shown(screen(progress, SETUP, 5.0, wide), wide).splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= width


def test_lines_of_a_log_are_short_and_events_are_bounded() -> None:
    progress = busy()
    progress.add([a_status("trial", "x" * 300), a_trial(99)])
    assert len(plain_line(progress, 3599.0)) <= PLAIN_CELLS_MAX
    progress.add([a_verdict(99)])
    assert len(plain_line(progress, 3599.0)) <= PLAIN_CELLS_MAX
    assert list(progress.events)[-2:] == [
        "trial: micro_batch 1 -> 2",
        "kept: micro_batch 1 -> 2, step time saved +30.0 % (10.0 .. 50.0 %)",
    ]
    assert event_line(progress.events[-1], 61.0).startswith("1:01  kept: micro_batch 1 -> 2")
    progress.add(a_trial(number) for number in range(1000))
    assert len(progress.events) == EVENTS_MAX


def test_a_ledger_that_waits_for_an_expensive_window_says_so() -> None:
    progress = Progress()
    unknown = Ledger(wall_ns=100_000_000, unknown_ns=99_000_000, host_bound_ns=1_000_000)
    expensive = structs.replace(a_step(0, 1), ledger=unknown, uncalibrated="price", window_price_ns=417_000_000)
    progress.add([expensive])
    said = "a window of 417 ms is not earned yet"
    assert said in plain_line(progress, 9.0)
    assert said in shown(screen(progress, SETUP, 9.0, console()), console())
    progress.add([structs.replace(a_step(0, 2), uncalibrated=None, window_price_ns=None)])
    assert said not in plain_line(progress, 10.0)
    assert said not in shown(screen(progress, SETUP, 10.0, console()), console())


def resting(*, cost_ns: int = 0) -> Progress:
    progress = Progress()
    progress.add([structs.replace(a_step(rank, 1), total_overhead_ns=cost_ns) for rank in (0, 1)])
    progress.add([a_trial(1), a_verdict(1), a_status("watching")])
    return progress


def test_the_demo_ends_when_something_was_kept_and_nothing_is_tried_for_a_while() -> None:
    rest, progress = RestDetector(0.01), resting()
    assert not rest.is_over(progress, 100.0)
    assert not rest.is_over(progress, 99.0 + REST_SECONDS)
    assert rest.is_over(progress, 100.0 + REST_SECONDS)


def test_another_trial_or_search_restarts_the_rest() -> None:
    rest, progress = RestDetector(0.01), resting()
    assert not rest.is_over(progress, 0.0)
    progress.add([a_trial(2), a_status("trial")])
    assert not rest.is_over(progress, REST_SECONDS)
    progress.add([a_verdict(2, "rolled_back"), a_status("screening")])
    assert not rest.is_over(progress, 2 * REST_SECONDS)
    progress.add([a_status("watching")])
    assert not rest.is_over(progress, 3 * REST_SECONDS)
    assert rest.is_over(progress, 4 * REST_SECONDS)


def test_a_tuner_that_found_nothing_or_is_above_its_budget_does_not_rest() -> None:
    nothing = Progress()
    nothing.add([a_step(0, 1), a_trial(1), a_verdict(1, "rolled_back"), a_status("watching")])
    owing = resting(cost_ns=LEDGER.wall_ns // 50)
    for progress in (nothing, owing):
        rest = RestDetector(0.01)
        assert not rest.is_over(progress, 0.0)
        assert not rest.is_over(progress, 100 * REST_SECONDS)
    assert rest.is_over(resting(cost_ns=LEDGER.wall_ns // 200), 101 * REST_SECONDS), "back within the budget"


def test_the_closing_lists_the_what_if_bounds_largest_first_as_no_promises(tuned_report: Report) -> None:
    rungs = (
        Rung("at_most_communication_hidden", 64 * MS, 0.2, Bound.REST),
        Rung("at_most_all", 40 * MS, 0.5, Bound.COMPUTE),
    )
    ladder = WhatIf(
        job="j", of_rank=None, step=9, wall_ns=1, steps=120, pace_ns=80 * MS, source="estimate",
        calibration_age_steps=4, rungs=rungs,
    )  # fmt: skip
    text = closed(structs.replace(tuned_report, ladder=ladder))
    assert "no promises" in " ".join(text.split())
    lines = [line.split() for line in text.splitlines()]
    at = next(n for n, words in enumerate(lines) if words[:3] == ["all", "of", "these"])
    assert lines[at][-7:] == ["40.00", "ms", "50.0", "%", "2.00", "x", "compute"]
    assert lines[at + 1][-7:] == ["64.00", "ms", "20.0", "%", "1.25", "x", "rest"]
    assert "What would help" not in closed(tuned_report)
