"""The document: runs with known numbers come out with these numbers, whatever order, restarts and gaps they have."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pacecar.commands.report.comparison import compare
from pacecar.commands.report.document import Report
from pacecar.commands.report.figures import Interval
from pacecar.commands.report.formatting import rate_word
from pacecar.commands.report.output.tables import (
    Table,
    changes_table,
    headline,
    ledger_table,
    line_table,
    stability_table,
)
from pacecar.commands.report.output.utilization_tables import cost_table, ranks_table, trust_table, usage_table
from pacecar.commands.report.reading.notices import ReportError
from pacecar.commands.report.reading.step_sums import BINS_MAX
from pacecar.commands.report.sections.costs import Prices
from pacecar.commands.report.significance import judge
from pacecar.records import (
    LEDGER_HEADINGS,
    EstimateCheck,
    Goodbye,
    HangSuspicion,
    JobRecord,
    Ledger,
    Straggler,
    TunerOrder,
    TunerStatus,
    WhatIf,
)
from pacecar.run_statistics import WARMUP_STEPS
from tests.commands.report.runs import (
    MS,
    START_NS,
    append,
    built,
    decision,
    hello,
    lines,
    report_of,
    steady,
    step,
    switch,
    tuned,
    untuned,
    verdict,
)


def test_a_steady_run_has_the_numbers_that_it_was_made_of(tmp_path: Path) -> None:
    report = report_of(untuned(tmp_path / "run"))
    assert (report.job, report.world_size, report.ranks_seen, report.lives) == ("j", 2, 2, 1)
    assert (report.steps, report.samples, report.tokens) == (200, 2 * 16 * 200, 2 * 512 * 200)
    assert report.duration_ns == 200 * 100 * MS
    assert not report.is_tuned
    assert report.after is None
    side = report.before
    assert side.steps == 200 - WARMUP_STEPS
    assert side.rate.median == pytest.approx(2 * 16 / 0.1)
    assert side.rate.cv == pytest.approx(0.0)
    assert side.tokens_per_second == pytest.approx(2 * 512 / 0.1)
    assert side.step_mean_ns == 100 * MS
    assert side.step_p99_ns == pytest.approx(100 * MS, rel=0.003)
    assert side.ledger_ns["compute"] == 80 * MS
    assert side.ledger_ns["exposed_communication"] == 15 * MS
    assert side.ledger_ns["host_bound"] == 5 * MS
    assert sum(side.ledger_ns.values()) == side.step_mean_ns
    assert side.overlap_ratio == pytest.approx(0.5)
    assert report.overhead.ratio == pytest.approx(0.005)
    assert report.overhead.worst_rank is not None
    assert [rank.dropped_records for rank in report.ranks] == [0, 1]
    assert report.notices == ()


def test_unmeasured_values_are_missing_and_guesses_are_marked(tmp_path: Path) -> None:
    """One rank without a loader: no wait for data of 0 %, no "slowest in 100 %", and samples by a tensor's shape."""
    folder = untuned(tmp_path / "run", ranks=1, steps=0)
    for number in range(100):
        one = step(0, number)
        unseen = [structs.replace(ledger, data_wait_ns=None) for ledger in (one.ledger, one.totals)]
        one = structs.replace(one, ledger=unseen[0], totals=unseen[1], samples_guessed=number % 10 > 0)
        append(folder, 0, one)
    report = report_of(folder)
    assert "data_wait" not in report.before.ledger_ns
    assert all("data_wait" not in piece.ledger_ns for piece in report.line)
    assert report.ranks[0].slowest_ratio is None
    assert report.samples_guessed
    table = ranks_table(report)
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert (row["data wait"], row["slowest in"]) == ("-", "-")
    assert rate_word(report) == "samples/s (a guess)"
    assert [notice.text.split(":")[0] for notice in report.notices] == ["samples are a guess"]
    line = line_table(report)
    assert line.rows[0][2 + LEDGER_HEADINGS.index("data_wait")] == "-"


def test_a_wait_for_data_is_in_the_mean_step_of_the_whole_run_too(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    report = report_of(folder)
    assert not report.is_tuned
    assert report.before.ledger_ns["data_wait"] == 0, "measured, and nothing waited"
    waited = structs.replace(step(0, 60).ledger, compute_ns=50 * MS, data_wait_ns=30 * MS)
    for rank in range(2):
        append(folder, rank, *(structs.replace(step(rank, number), ledger=waited) for number in range(60, 120)))
    report = report_of(folder)
    assert sum(report.before.ledger_ns.values()) == pytest.approx(100 * MS, abs=9)
    row = cells(ledger_table(report))["data wait"]
    assert row[1].endswith("%")
    assert float(row[1].removesuffix(" %")) == pytest.approx(100 * 60 / 110 * 0.3, abs=0.1)


def test_what_is_mostly_unknown_is_shown_as_that_and_compared_as_a_whole_only(tmp_path: Path) -> None:
    report = report_of(tuned(tmp_path / "run"))
    mostly = {"compute": 0, "host_bound": 10 * MS, "data_wait": 0, "unknown": 90 * MS}
    first, second = report.ranks
    table = ranks_table(structs.replace(report, ranks=(structs.replace(first, ledger_ns=mostly), second)))
    rows = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    assert [(row["compute"], row["unknown"]) for row in rows] == [("-", "90.0 %"), ("100.0 %", "0.0 %")]
    assert rows[0]["data wait"] == "0.0 %", "the timers measure that"
    side = report.before
    assert side is not None
    ledger = ledger_table(structs.replace(report, before=structs.replace(side, ledger_ns=mostly)))
    assert ledger.note.endswith("so only the whole step can be compared.")
    assert cells(ledger)["compute"][:2] == ("-", "-")
    changed = {row[0]: row[-1] for row in ledger.rows}
    assert [name for name, change in changed.items() if change != "-"] == ["whole step"]


def test_before_after_and_what_a_change_brought(tmp_path: Path) -> None:
    report = report_of(tuned(tmp_path / "run"))
    assert report.is_tuned
    assert report.after is not None
    assert (report.before.first, report.before.last) == ((0, WARMUP_STEPS), (0, 59))
    # The switch at 99 settles for two steps.
    assert (report.after.first, report.after.last) == ((0, 102), (0, 199))
    assert report.after.step_mean_ns == 80 * MS
    assert report.change.change_ratio == pytest.approx(0.25)
    assert report.proven_gain_ratio == pytest.approx(0.2)
    (change,) = report.changes
    assert (change.knob, change.from_value, change.to_value, change.outcome) == ("micro_batch", 2, 4, "kept")
    assert (change.expected_gain_ratio, change.measured_gain_ratio) == (0.1, 0.2)
    assert (change.gain_low, change.gain_high, change.applied_step, change.verdict_step) == (0.1, 0.3, 59, 99)
    assert report.after.knobs == {"micro_batch": 4}
    assert report.before.knobs == {"micro_batch": 2}


def test_what_is_said_to_be_proven_is_the_lower_bound_of_the_trials(tmp_path: Path) -> None:
    report = report_of(tuned(tmp_path / "run"))
    assert (report.proven_gain_low, report.proven_gain_high) == (pytest.approx(0.1), pytest.approx(0.3))
    assert "prove at least 10.0 % of step time saved, 1.11 times the throughput (measured 20.0 %)" in headline(report)


def test_a_change_that_is_proven_again_after_a_restart_counts_once(tmp_path: Path) -> None:
    folder = tuned(tmp_path / "run")
    for rank in (0, 1):
        path = folder / f"rank{rank}.jsonl"
        path.write_bytes(path.read_bytes() * 2)
    report = report_of(folder)
    assert report.lives == 2
    assert [change.is_in_force for change in report.changes] == [False, True]
    assert report.proven_gain_ratio == pytest.approx(0.2)
    assert headline(report).startswith("Kept: micro_batch 2 → 4. ")


def test_a_kept_change_that_was_undone_later_saves_nothing(tmp_path: Path) -> None:
    folder = tuned(tmp_path / "run")
    for rank in (0, 1):
        more = [step(rank, number, micro_batch=2, epoch=4) for number in range(200, 260)]
        append(folder, rank, switch(2, 199, 2, 4, rank=rank), *more)
    report = report_of(folder)
    assert report.proven_gain_ratio is None
    assert headline(report).startswith("Kept at first, but no longer set at the end: micro_batch 2 → 4. Throughput")


@pytest.mark.slow
def test_before_and_after_of_a_machine_that_wandered_claim_nothing(tmp_path: Path) -> None:
    """The settings bring nothing; another job takes half the machine in the middle of `after`."""
    folder = tuned(tmp_path / "run", steps=100)
    generator = random.Random(4)
    walls = [round((70 if number < 400 else 140) * MS * generator.uniform(0.99, 1.01)) for number in range(700)]
    for rank in (0, 1):
        append(folder, rank, *(step(rank, 100 + n, wall, micro_batch=4, epoch=3) for n, wall in enumerate(walls)))
    report = report_of(folder)
    assert report.change.change_ratio > 0.2
    assert report.change_verdict not in ("faster", "slower")
    assert "the second half of 'after' differs from its first by" in headline(report)


def test_what_was_rolled_back_is_not_after(tmp_path: Path) -> None:
    report = report_of(tuned(tmp_path / "run", kept=False))
    assert report.after.step_mean_ns == 100 * MS
    assert report.after.knobs == {"micro_batch": 2}
    assert report.proven_gain_ratio is None


@pytest.mark.parametrize(
    ("said", "budget"), [(0.005, "over the 0.50 % that the job allows"), (None, "within the 3.00 %")]
)
def test_the_overhead_stands_beside_what_the_job_allowed_and_else_what_is_allowed_here(
    tmp_path: Path, said: float | None, budget: str
) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    path = folder / "rank0.jsonl"
    rest = path.read_bytes().partition(b"\n")[2]
    path.write_bytes(lines([structs.replace(hello(0), overhead_budget=said)]) + rest)
    report = report_of(folder, budget_ratio=0.03)
    text = trust_table(structs.replace(report, overhead=structs.replace(report.overhead, ratio=0.0051))).rows[0][1]
    assert budget in text
    assert ("configuration here" in text) is (said is None)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0.0103, "1.03 % of wall time, over the 1.00 % that"), (0.01003, "1.003 % of wall time, over the 1.000 % that"),
        (0.010001, "1.0001 % of wall time, over the 1.0000 % that"), (0.01, "1.00 % of wall time, within the 1.00 %"),
        (0.0098, "0.98 % of wall time, within the 1.00 %"),
    ],
)  # fmt: skip
def test_an_overhead_and_what_it_is_over_never_read_the_same(tmp_path: Path, ratio: float, said: str) -> None:
    report = report_of(untuned(tmp_path / "run", steps=60), budget_ratio=0.01)
    text = trust_table(structs.replace(report, overhead=structs.replace(report.overhead, ratio=ratio))).rows[0][1]
    assert text.startswith(said)


def test_profiled_and_disturbed_steps_say_nothing_about_the_pace(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    for rank in (0, 1):
        append(folder, rank, step(rank, 60, 900 * MS, exact=rank == 1), step(rank, 61, 900 * MS, disturbed=rank == 0))
    side = report_of(folder).before
    assert side.step_max_ns == 100 * MS


def test_zero_samples_are_a_measurement_and_none_is_missing(tmp_path: Path) -> None:
    for name, samples in (("zero", 0), ("none", None)):
        folder = tmp_path / name
        folder.mkdir()
        for rank in (0, 1):
            records = [hello(rank), *(step(rank, n, samples=samples, tokens=None) for n in range(60))]
            (folder / f"rank{rank}.jsonl").write_bytes(lines(records))
    zero, none = report_of(tmp_path / "zero"), report_of(tmp_path / "none")
    assert (zero.rate_unit, zero.samples) == ("samples", 0)
    assert (none.rate_unit, none.samples, none.tokens) == ("steps", None, None)
    assert none.before.rate.median == pytest.approx(10.0)
    assert none.before.samples_per_second is None


def test_a_run_that_ends_in_its_warm_up_says_so_and_has_what_there_is(tmp_path: Path) -> None:
    report = report_of(untuned(tmp_path / "run", steps=5))
    assert report.before is None
    assert report.steps == 5
    assert len(report.line) > 0
    assert any("warm-up" in notice.text for notice in report.notices)
    assert not any(notice.is_damage for notice in report.notices)


def test_a_job_that_was_started_again_has_two_lives_and_all_its_steps(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    for rank in (0, 1):
        again = [step(rank, n, total_wall_ns=(n + 1) * 100 * MS, ended_ns=START_NS + 10**11 + n) for n in range(40)]
        append(folder, rank, hello(rank), *again)
    report = report_of(folder)
    assert (report.lives, report.steps, report.samples) == (2, 100, 2 * 16 * 100)
    assert report.compared_steps == 100
    # Both lives warm up.
    assert report.before.steps == 100 - 2 * WARMUP_STEPS
    assert report.before.last == (1, 39)
    assert any("attached 2 times" in notice.text for notice in report.notices)


@pytest.mark.parametrize("jump_ns", [365 * 86400 * 10**9, -3600 * 10**9])
def test_a_change_of_the_clock_does_not_make_a_run_of_a_year(tmp_path: Path, jump_ns: int) -> None:
    folder = untuned(tmp_path / "run", steps=100)
    for rank in (0, 1):
        late = [step(rank, n, ended_ns=START_NS + (n + 1) * 100 * MS + jump_ns) for n in range(100, 200)]
        append(folder, rank, *late)
    report = report_of(folder, prices=Prices(per_gpu_hour=3.6))
    assert report.duration_ns == 200 * 100 * MS
    assert report.cost.run == pytest.approx(2 * 20 * 3.6 / 3600)
    assert any("the clock was set by" in notice.text for notice in report.notices)


def test_a_job_that_went_on_with_fewer_ranks_is_measured_to_its_end(tmp_path: Path) -> None:
    """As torchrun restarts an elastic job: four ranks, then two at half the pace."""
    folder = untuned(tmp_path / "run", ranks=4, steps=60)
    for rank in (0, 1):
        append(folder, rank, hello(rank, 2), *(step(rank, number, 200 * MS) for number in range(200)))
    report = report_of(folder)
    assert (report.compared_steps, report.incomplete_steps) == (260, 0)
    assert report.before.last == (1, 199)
    assert any("2 and 4 ranks in turn" in notice.text for notice in report.notices)


def test_steps_that_only_some_ranks_measured_are_counted_and_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank, every in ((0, 1), (1, 2)):
        records = [hello(rank), *(step(rank, n) for n in range(0, 80, every))]
        (folder / f"rank{rank}.jsonl").write_bytes(lines(records))
    report = report_of(folder)
    assert (report.compared_steps, report.incomplete_steps) == (40, 40)


@pytest.mark.slow
def test_the_time_line_is_bounded_and_loses_no_step(tmp_path: Path) -> None:
    report = report_of(untuned(tmp_path / "run", steps=2000, pace=steady(1000 * MS)))
    assert 10 < len(report.line) <= BINS_MAX
    assert sum(piece.rank_steps for piece in report.line) == 4000
    assert all(piece.ledger_ns["compute"] == 800 * MS for piece in report.line)


def test_cost_is_price_times_gpus_times_hours(tmp_path: Path) -> None:
    prices = Prices(per_gpu_hour=3.6, tokens_per_epoch=10_240_000, epochs=100)
    cost = report_of(untuned(tmp_path / "run"), prices=prices).cost
    # 2 GPUs for 20 s at 3.6 an hour, which is 0.001 a second.
    assert cost.run == pytest.approx(2 * 20 * 0.001)
    assert cost.before.per_hour == pytest.approx(7.2)
    # 10 240 tokens a second: an epoch takes 1000 s.
    assert cost.before.epoch_seconds == pytest.approx(1000.0)
    assert cost.before.per_epoch == pytest.approx(2.0)
    assert cost.before.per_epochs == pytest.approx(200.0)
    assert cost.before.per_million_tokens == pytest.approx(0.002 / 10_240 * 1e6)
    assert cost.before.per_million_samples == pytest.approx(0.002 / 320 * 1e6)
    free = report_of(untuned(tmp_path / "free"), prices=Prices(per_gpu_hour=0.0)).cost
    assert free.run == 0.0


def cells(table: Table | None) -> dict[str, tuple[str, ...]]:
    """First cell of each row -> the others."""
    assert all(len(row) == len(table.head) for row in table.rows)
    return {row[0]: row[1:] for row in table.rows}


def test_tables_of_before_and_after_have_a_column_of_the_change(tmp_path: Path) -> None:
    prices = Prices(per_gpu_hour=3.6, samples_per_epoch=320_000, epochs=100)
    report = report_of(tuned(tmp_path / "run"), prices=prices)
    pace = cells(stability_table(report))
    # 32 samples in 100 ms and in 80 ms.
    assert pace["median, samples/s"] == ("320", "400", "+25.0 %")
    assert pace["mean ± standard deviation, samples/s"] == ("320 ± 0", "400 ± 0", "+25.0 %")
    assert pace["step, mean"] == ("100.00 ms", "80.00 ms", "-20.0 %")
    assert pace["steps compared"][-1] == ""
    ledger = cells(ledger_table(report))
    assert ledger["compute"] == ("80.00 ms", "80.0 %", "64.00 ms", "80.0 %", "-16.00 ms")
    assert ledger["whole step"] == ("100.00 ms", "", "80.00 ms", "", "-20.00 ms")
    assert ledger["communication under compute"] == ("", "50.0 %", "", "50.0 %", "+0.0 points")
    cost = cells(cost_table(structs.replace(report, change_verdict="faster")))
    # 1000 s an epoch before, on 2 GPUs at 0.001 a second each; 800 s after.
    assert cost["100 epochs"] == ("200.00", "160.00", "-20.0 %")
    assert cost["saved on 100 epochs"] == ("", "40.00", "20.0 %")
    assert cost["an hour of these ranks"] == ("7.20", "7.20", "+0.0 %")
    used = cells(usage_table(report))
    assert used["device computes"][-1] == "+0.0 points"


def test_nothing_is_said_to_be_saved_where_no_difference_is_shown(tmp_path: Path) -> None:
    report = report_of(tuned(tmp_path / "run", gain=0.0), prices=Prices(per_gpu_hour=3.6))
    noisy = structs.replace(report, change_verdict="no difference shown", proven_gain_low=None)
    assert cells(cost_table(noisy))["saved"] == ("", "none is shown (no difference shown)", "")
    proven = structs.replace(report, change_verdict="not decided", proven_gain_low=0.1)
    assert cells(cost_table(proven))["saved at least, from the trials"] == ("", "", "10.0 %")
    assert not any(name.startswith("saved") for name in cells(cost_table(report_of(
        untuned(tmp_path / "one"), prices=Prices(per_gpu_hour=1.0)))))  # fmt: skip


@pytest.mark.parametrize(
    ("noise", "steps", "word"), [(0.005, 200, "yes: ±"), (0.2, 200, "no: ±"), (0.005, 50, "too few")]
)
def test_a_pace_is_stable_where_its_windows_keep_within_two_percent(
    tmp_path: Path, noise: float, steps: int, word: str
) -> None:
    report = report_of(untuned(tmp_path / "run", steps=steps, pace=steady(100 * MS, noise, 7)))
    assert report.before.is_stable is {"yes: ±": True, "no: ±": False, "too few": None}[word]
    (shown,) = cells(stability_table(report))["stable within ±2 %"]
    assert shown.startswith(word)


def test_what_trials_cost_adds_up_to_the_total_that_is_shown(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run")
    costs = (1_234_567_890, -420_218_194, -244_869_928)
    for number, cost in enumerate(costs):
        append(folder, 0, decision(number, 50, 2, 4),
               structs.replace(verdict(number, 60, "rolled_back"), exploration_ns=cost))  # fmt: skip
    append(folder, 0, TunerStatus(job="j", rank=0, state="watching", detail="", step=90, wall_ns=9,
                                  exploration_ns=1_300_000_000, trials=3))  # fmt: skip
    report = report_of(folder)
    assert report.overhead.trials_ns == sum(costs)
    table = changes_table(report)
    assert [row[-1] for row in table.rows] == ["1.23 s", "-0.42 s", "-0.24 s", "0.57 s"]
    assert table.rows[-1][:3] == ("all", "", "")
    exploration = cells(trust_table(report))["exploration"][0]
    assert exploration.startswith("all trials together cost 0.6 s, losses and gains")
    assert "charged to the exploration budget: 1.3 s, 6.5 % of the run" in exploration


def test_stragglers_and_hangs_are_told_once_each(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)

    def late(at: int, excess: int, *, ended: bool = False) -> Straggler:
        return Straggler(job="j", late_rank=1, cause="data_wait", phase="data_wait", since_step=20, step=at,
                         wall_ns=START_NS, excess_ns=excess * MS, evidence="waits for data", ended=ended)  # fmt: skip

    def hang(silent: int, *, ended: bool = False) -> HangSuspicion:
        return HangSuspicion(job="j", rank=0, step=59, phase="backward", wall_ns=START_NS, silent_ns=silent * 10**9,
                             last_collective="all_reduce", collectives=7, stack=None, ended=ended)  # fmt: skip

    append(folder, 0, late(30, 10), late(40, 30), late(45, 5, ended=True), hang(60), hang(120), hang(130, ended=True))
    report = report_of(folder)
    (slowdown,) = report.slowdowns
    assert (slowdown.since_step, slowdown.last_step, slowdown.excess_ns, slowdown.is_over) == (20, 45, 30 * MS, True)
    assert slowdown.lost_ns == 30 * MS * 26
    (suspicion,) = report.hangs
    assert (suspicion.rank, suspicion.silent_ns, suspicion.phase, suspicion.is_over) == (
        0,
        130 * 10**9,
        "backward",
        True,
    )


def test_errors_of_the_estimate_the_tuners_last_word_and_peoples_orders(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    exact = Ledger(wall_ns=100, compute_ns=80, unknown_ns=20)
    for rank, moved in ((0, 10), (1, 30)):
        estimate = Ledger(wall_ns=100, compute_ns=80 - moved, unknown_ns=20 + moved)
        append(folder, rank, EstimateCheck(job="j", rank=rank, step=50, ended_wall_ns=1, exact=exact, estimate=estimate,
                                           calibration_age_steps=9, is_own_setting=rank == 0, windows=1))  # fmt: skip
    order = TunerOrder(job="j", action="set", outcome="done", uid=1000, values={"bucket_bytes": 2**20}, step=55,
                       wall_ns=5, detail="by hand")  # fmt: skip
    first = TunerStatus(job="j", rank=0, state="frozen", detail="why", step=58, wall_ns=9, exploration_ns=4, trials=1)
    other = TunerStatus(job="j", rank=1, state="warming", detail="", step=0, wall_ns=1, exploration_ns=0, trials=0)
    append(folder, 0, order, first, Goodbye(job="j", rank=0, reason="finished", wall_ns=1))
    append(folder, 1, other)
    report = report_of(folder)
    error = report.estimate_error
    assert (error.windows, error.median_ratio, error.worst_ratio) == (2, pytest.approx(0.2), pytest.approx(0.3))
    assert (error.own_setting, error.own_setting_median_ratio) == (1, pytest.approx(0.1))
    assert report.tuner == "frozen: why"
    assert report.overhead.exploration_ns == 4
    assert report.orders == ("step 55: uid 1000 ordered set bucket_bytes 1 MiB: done: by hand",)
    assert [rank.last_words for rank in report.ranks] == ["finished", None]


def test_steps_after_the_last_record_count_where_the_goodbye_has_them(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    before = report_of(folder)
    totals = Ledger(wall_ns=75 * 100 * MS, compute_ns=75 * 100 * MS)
    append(folder, 0, Goodbye(job="j", rank=0, reason="finished", wall_ns=1))  # as older hooks say it
    append(folder, 1, Goodbye(job="j", rank=1, reason="finished", wall_ns=1, totals=totals, total_steps=75,
                              total_samples=75 * 16, total_tokens=75 * 512, total_overhead_ns=5 * MS))  # fmt: skip
    report = report_of(folder)
    assert (before.steps, report.steps) == (60, 75)
    assert [rank.steps for rank in report.ranks] == [60, 75]
    assert report.ranks[1].step_mean_ns == 100 * MS
    assert report.ranks[1].overhead_ratio == pytest.approx(5 / 7500)
    assert report.samples == (60 + 75) * 16
    assert report.tokens == (60 + 75) * 512
    assert report.duration_ns == before.duration_ns + 15 * 100 * MS
    assert report.before == before.before, "what is judged was measured"


def test_a_goodbye_ends_its_own_start_of_the_job_and_no_other(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", ranks=1, steps=60)
    totals = Ledger(wall_ns=45 * 100 * MS, compute_ns=45 * 100 * MS)
    bye = Goodbye(job="j", rank=0, reason="finished", wall_ns=1, totals=totals, total_steps=45)
    append(folder, 0, hello(0, 1), *(step(0, number) for number in range(40)), bye)
    assert [rank.steps for rank in report_of(folder).ranks] == [60 + 45]


def test_two_jobs_in_a_folder_are_named_and_one_can_be_chosen(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    for rank in (0, 1):
        other = [step(rank, n, 50 * MS, job="other", total_wall_ns=(n + 1) * 50 * MS) for n in range(60)]
        append(folder, rank, hello(rank, job="other"), *other)
    with pytest.raises(ReportError, match=r"holds 2 jobs: j .*, other .*--job"):
        report_of(folder)
    mine, other_report = report_of(folder, job="j"), report_of(folder, job="other")
    assert mine.notices == other_report.notices == ()
    assert (mine.before.step_mean_ns, other_report.before.step_mean_ns) == (100 * MS, 50 * MS)
    with pytest.raises(ReportError, match="no record of job 'third'; there are j, other"):
        report_of(folder, job="third")


def test_a_run_that_ended_inside_a_trial_is_judged_at_the_settings_before_it(tmp_path: Path) -> None:
    folder = tuned(tmp_path / "run")
    for rank in (0, 1):
        total = 200 * 100 * MS
        append(folder, rank, switch(2, 199, 8, 4, rank=rank))
        append(folder, rank, *(step(rank, n, 70 * MS, micro_batch=8, epoch=4, total_wall_ns=total + n * MS)
                               for n in range(200, 240)))  # fmt: skip
    # Decision 2 began at 4; no verdict came.
    append(folder, 0, decision(2, 195, 4, 8))
    report = report_of(folder)
    assert report.after.knobs == {"micro_batch": 4}
    assert report.after.step_mean_ns == 80 * MS


def test_where_nothing_was_kept_all_steps_at_the_old_setting_are_after(tmp_path: Path) -> None:
    """The job ends with the candidate set: the windows of the incumbent inside the trial are what it was left at."""
    walls = [(300 if 21 <= n <= 30 or n > 50 else 100) * MS for n in range(61)]
    records = [step(0, n, wall, micro_batch=4 if wall == 300 * MS else 2) for n, wall in enumerate(walls)]
    folder = untuned(tmp_path / "run", ranks=1, steps=0)
    append(folder, 0, decision(1, 20, 2, 4), *records, switch(1, 20, 4, 1), switch(1, 30, 2, 2), switch(1, 50, 4, 3))
    after = report_of(folder).after
    assert (after.first, after.last, after.knobs) == ((0, 33), (0, 50), {"micro_batch": 2})
    assert after.step_mean_ns == 100 * MS


def test_the_overhead_is_that_of_all_ranks_over_the_wall_time_of_all(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=0)
    for rank, (wall_ns, cost_ns) in enumerate(((1000, 10), (3000, 60))):
        append(folder, rank, structs.replace(step(rank, 5, total_wall_ns=wall_ns), total_overhead_ns=cost_ns))
    overhead = report_of(folder).overhead
    assert (overhead.ratio, overhead.worst_ratio, overhead.worst_rank) == (70 / 4000, 60 / 3000, 1)


def test_the_what_if_bounds_are_the_jobs_last_or_else_those_of_the_lowest_rank(tmp_path: Path) -> None:
    def bounds(of_rank: int | None, at: int) -> WhatIf:
        return WhatIf(job="j", of_rank=of_rank, step=at, wall_ns=1, steps=10, pace_ns=1, source="estimate",
                      calibration_age_steps=1, rungs=())  # fmt: skip

    folder = untuned(tmp_path / "run", steps=12)
    assert report_of(folder).ladder is None
    append(folder, 1, bounds(1, 90))
    append(folder, 0, bounds(0, 40), bounds(0, 80))
    assert report_of(folder).ladder == bounds(0, 80)
    append(folder, 0, bounds(None, 20), bounds(None, 10))
    assert report_of(folder).ladder == bounds(None, 10)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(0, 10**9), st.booleans(), st.sampled_from([2, 4])),
        max_size=120,
    ),
    st.lists(st.tuples(st.integers(1, 80), st.integers(1, 3)), max_size=6),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["kept", "rolled_back", "abandoned"])), max_size=4),
)
def test_whatever_was_recorded_there_is_a_report_and_its_claims_hold(
    steps: list[tuple[int, int, int, bool, int]], switches: list[tuple[int, int]], verdicts: list[tuple[int, str]]
) -> None:
    records: list[list[JobRecord]] = [[hello(rank, 3)] for rank in range(3)]
    for rank, number, wall_ns, exact, micro_batch in sorted(steps):
        records[rank].append(step(rank, number, wall_ns, exact=exact, micro_batch=micro_batch))
    records[0] += [switch(number, at, 2, epoch) for epoch, (at, number) in enumerate(switches)]
    for number, outcome in verdicts:
        records[0] += [decision(number, 10, 2, 4), verdict(number, 20, outcome)]
    with tempfile.TemporaryDirectory() as folder:
        for rank, its_own in enumerate(records):
            Path(folder, f"rank{rank}.jsonl").write_bytes(lines(its_own))
        report = report_of(Path(folder))
    for side in (report.before, report.after, report.whole):
        if side is not None and side.rate is not None:
            assert side.rate.p10 <= side.rate.median <= side.rate.p90
        if side is not None:
            assert sum(side.ledger_ns.values()) <= side.step_max_ns
    if report.before is not None and switches:
        assert report.before.last[1] <= min(at for at, _ in switches)
    json.loads(msgspec.json.encode(report))


def test_the_document_is_json_with_a_version_and_round_trips(tmp_path: Path) -> None:
    report = report_of(tuned(tmp_path / "run"), prices=Prices(per_gpu_hour=2.0))
    text = msgspec.json.encode(report)
    assert json.loads(text)["schema_version"] == 1
    assert msgspec.json.decode(text, type=Report) == report


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.1, -0.1])
def test_a_run_that_is_ten_percent_off_is_faster_or_slower(tmp_path: Path, gain: float) -> None:
    runs = [
        untuned(tmp_path / "a", steps=400, pace=steady(100 * MS, 0.02, seed=1)),
        untuned(tmp_path / "b", steps=400, pace=steady(round(100 * MS * (1 - gain)), 0.02, seed=2)),
    ]
    rows = [row for row in compare([built(run) for run in runs]).rows if row.run == "b"]
    assert [row.verdict for row in rows] == ["faster" if gain > 0 else "slower"] * 2
    assert all(row.change is not None and abs(row.change.change_ratio) > 0.05 for row in rows)


@pytest.mark.slow
def test_no_difference_is_claimed_inside_the_noise(tmp_path: Path) -> None:
    runs = [untuned(tmp_path / name, steps=400, pace=steady(100 * MS, 0.05, seed=n)) for n, name in enumerate("abc")]
    rows = compare([built(run) for run in runs]).rows
    assert {row.verdict for row in rows if row.run != "a"} == {"no difference shown"}


@pytest.mark.slow
def test_a_run_that_drifts_proves_no_difference_as_large_as_its_drift(tmp_path: Path) -> None:
    """Each half is so steady that the interval is narrow; the halves differ by more than the runs do."""

    def drifting(_: int, number: int) -> int:
        return (90 if number < 210 else 99) * MS

    runs = [untuned(tmp_path / "a", steps=410), untuned(tmp_path / "b", steps=410, pace=drifting)]
    row = next(row for row in compare([built(run) for run in runs]).rows if row.run == "b")
    assert row.verdict == "not decided", "its windows are two blocks of neighbours"
    assert row.noise_ratio > 0.08
    assert judge(Interval(0.05, 0.03, 0.07), 0.08)[0] == "no difference shown"
    assert judge(Interval(0.05, 0.03, 0.07), 0.04)[0] == "faster"
    assert judge(Interval(-0.05, -0.07, -0.03), 0.04)[0] == "slower"
    assert judge(Interval(0.05, -0.01, 0.07), 0.0)[0] == "no difference shown"
    assert judge(Interval(0.05, 0.0, 0.07), 0.0)[0] == "no difference shown"
    assert judge(Interval(-0.05, -0.07, 0.0), 0.0)[0] == "no difference shown"
    assert judge(Interval(0.05, None, None), 0.0)[0] == "not decided"
    assert judge(None, 0.0)[0] == "not comparable"


@pytest.mark.slow
def test_what_makes_runs_hard_to_compare_is_said(tmp_path: Path) -> None:
    runs = [built(untuned(tmp_path / "a")), built(untuned(tmp_path / "b", ranks=1))]
    comparison = compare(runs)
    assert any("world size differs: 2; 1" in text for text in comparison.warnings)
    assert any("same job" in text for text in comparison.warnings)


@pytest.mark.slow
def test_twice_the_ranks_are_no_faster_rank(tmp_path: Path) -> None:
    pair = [built(untuned(tmp_path / str(ranks), ranks=ranks)) for ranks in (2, 4)]
    comparison = compare(pair)
    assert "world size differs: 2; 4" in comparison.warnings
    assert any("share of the mean pace is 160 samples/s; 160 samples/s" in text for text in comparison.warnings)


def test_a_verdict_of_a_forgotten_decision_does_no_harm(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    append(folder, 0, verdict(9, 50))
    assert report_of(folder).changes == ()


def test_a_run_whose_ledger_was_never_calibrated_says_so_and_why(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", steps=60)
    assert [rank.uncalibrated for rank in report_of(folder).ranks] == [None, None]
    last = step(0, 60, 50 * MS)
    append(folder, 0, msgspec.structs.replace(last, uncalibrated="price", calibration_age_steps=None))
    report = report_of(folder)
    assert [rank.uncalibrated for rank in report.ranks] == ["price", None]
    (said,) = [row for row in trust_table(report).rows if row[0] == "what the ledger rests on"]
    assert said[1].startswith("not calibrated on 1 of 2 ranks")
