"""From records to the result: it is the report's before and after, and says what is missing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pacecar.commands.demo.result import DemoLosses, Result, as_document
from pacecar.commands.demo.summary import summarize as summarize_folder
from pacecar.commands.report.build import BuildOptions, build_report
from pacecar.commands.report.reading.inputs import find_inputs
from pacecar.records import (
    LEDGER_HEADINGS,
    Decision,
    EstimateCheck,
    Goodbye,
    JobHello,
    JobRecord,
    Knobs,
    KnobSwitch,
    Ledger,
    StepRecord,
    TunerStatus,
    Verdict,
    WhatIf,
)
from pacecar.run_statistics import WARMUP_STEPS
from tests.commands.report import runs

MS = 1_000_000

Outcome = Literal["kept", "rolled_back", "abandoned"]


def folder_of(records: Iterable[JobRecord], folder: Path) -> Path:
    """Write `records` as the hooks of all ranks would, each in the order of steps."""
    files: dict[int, list[JobRecord]] = {}
    for record in records:
        rank = record.of_rank if isinstance(record, WhatIf) else getattr(record, "rank", 0)
        files.setdefault(0 if rank is None else rank, []).append(record)
    for rank, its_own in files.items():
        its_own.sort(key=lambda record: -1 if isinstance(record, JobHello) else getattr(record, "step", 1 << 60))
        (folder / f"rank{rank}.jsonl").write_bytes(runs.lines(its_own))
    return folder


def summarize(
    records: Iterable[JobRecord], losses: DemoLosses | None = None, *, overhead_budget: float | None = None
) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return summarize_folder(folder_of(records, Path(folder)), losses, overhead_budget=overhead_budget)


def throughput(result: Result, phase: str = "before") -> dict[str, float] | None:
    found: dict[str, float] | None = as_document(result)[f"throughput_{phase}"]
    return found


def hello(rank: int, world_size: int = 2) -> JobHello:
    return JobHello(
        job="j", rank=rank, local_rank=rank, world_size=world_size, pid=100 + rank, host="h", device="cpu",
        backend="gloo", framework="torch 2", pacecar_version="0", started_wall_ns=0,
    )  # fmt: skip


def step(
    rank: int,
    number: int,
    wall_ns: int = 100 * MS,
    *,
    samples: int | None = 16,
    exact: bool = False,
    micro_batch: int = 2,
    total_wall_ns: int | None = None,
) -> StepRecord:
    ledger = Ledger(wall_ns=wall_ns, compute_ns=wall_ns // 3, unknown_ns=wall_ns - wall_ns // 3)
    total_ns = total_wall_ns if total_wall_ns is not None else number * wall_ns
    return StepRecord(
        job="j", rank=rank, step=number, ended_wall_ns=0, wall_ns=wall_ns, data_wait_ns=None, forward_ns=None,
        backward_ns=None, optimizer_ns=None, micro_batches=None, samples=samples, tokens=None, ledger=ledger,
        source="exact" if exact else "estimate", calibration_age_steps=None,
        totals=Ledger(wall_ns=total_ns, compute_ns=total_ns), total_steps=number, total_samples=None, total_tokens=None,
        overhead_ns=0, total_overhead_ns=total_ns // 100, total_windows=0, dropped_records=rank,
        knobs=Knobs(epoch=0, values={"micro_batch": micro_batch}),
    )  # fmt: skip


def switch(rank: int, number: int, decision: int, epoch: int, value: int = 2) -> KnobSwitch:
    knobs = Knobs(epoch=epoch, values={"micro_batch": value})
    return KnobSwitch(job="j", rank=rank, decision=decision, epoch=epoch, step=number, knobs=knobs, duration_ns=1)


def decision(number: int, old: int, new: int, at: int) -> Decision:
    return Decision(
        job="j", decision=number, kind="trial", knob="micro_batch",
        from_value=old, to_value=new, step=at, wall_ns=0, reason="why", expected_gain_ratio=0.1,
    )  # fmt: skip


def verdict(number: int, at: int, outcome: Outcome = "kept") -> Verdict:
    return Verdict(
        job="j", decision=number, knob="micro_batch", outcome=outcome, step=at, wall_ns=0,
        measured_gain_ratio=0.2, gain_low=0.1, gain_high=0.3, evidence=20.0, trial_steps=32, exploration_ns=5,
        reason="because",
    )  # fmt: skip


def run_with_a_kept_trial() -> list[JobRecord]:
    """Steps 1-40 at 2 (100 ms), a trial to and fro between 40 and 70, then 4 (80 ms) to step 120."""
    records: list[JobRecord] = [hello(0), hello(1), decision(1, 2, 4, 39), verdict(1, 70)]
    at = {41: 4, 51: 2, 61: 4}
    micro_batch = 2
    for number in range(1, 121):
        micro_batch = at.get(number, micro_batch)
        wall_ns = 80 * MS if micro_batch == 4 else 100 * MS
        # Rank 1 is the slower one by a tenth: the job's pace is its.
        records += [step(0, number, wall_ns, micro_batch=micro_batch), step(1, number, wall_ns * 11 // 10)]
    for epoch, number in enumerate((40, 50, 60), start=1):
        records += [switch(rank, number, 1, epoch, at[number + 1]) for rank in (0, 1)]
    return records


def test_before_ends_with_the_first_switch_and_after_begins_when_the_last_has_settled() -> None:
    result = summarize(run_with_a_kept_trial())
    document = as_document(result)
    assert document["steps_before"] == (1 + WARMUP_STEPS, 40)
    assert document["steps_after"] == (63, 120)
    assert result.knobs_before == {"micro_batch": 2}
    assert result.knobs_after == {"micro_batch": 4}


def test_throughput_is_that_of_the_slowest_rank_and_of_all_samples() -> None:
    result = summarize(run_with_a_kept_trial())
    before, after = throughput(result, "before"), throughput(result, "after")
    assert before is not None
    assert after is not None
    assert before["samples_per_second"] == pytest.approx(32 / 0.110)
    assert after["samples_per_second"] == pytest.approx(32 / 0.088)
    assert result.speedup == pytest.approx(1.25)


def test_a_decision_carries_the_step_at_which_each_rank_first_applied_it() -> None:
    result = summarize(run_with_a_kept_trial())
    (change,) = result.changes
    assert result.applied == {(0, 1): {0: 40, 1: 40}}
    assert (change.from_value, change.to_value, change.outcome) == (2, 4, "kept")
    assert (change.expected_gain_ratio, change.measured_gain_ratio) == (0.1, 0.2)
    assert (change.gain_low, change.gain_high, change.reason) == (0.1, 0.3, "because")


def test_the_result_says_what_the_report_says_of_the_same_folder(tmp_path: Path) -> None:
    folder = folder_of(run_with_a_kept_trial(), tmp_path)
    report = build_report(find_inputs(folder), BuildOptions()).report
    result = summarize_folder(folder)
    assert result.report == report
    document = as_document(result)
    for phase, side in (("before", report.before), ("after", report.after)):
        assert side is not None
        assert side.rate is not None
        rate = document[f"throughput_{phase}"]
        assert (rate["samples_per_second"], rate["low"], rate["high"]) == (
            side.rate.median,
            side.rate.p10,
            side.rate.p90,
        )
        assert document[f"steps_{phase}"] == (side.first[1], side.last[1])
        assert document[f"ledger_{phase}"]["steps"] == side.steps
        assert document[f"knobs_{phase}"] == side.knobs
    assert report.change is not None
    assert document["speedup"] == 1 + report.change.change_ratio
    assert document["proven_gain_low"] == report.proven_gain_low


def test_profiled_steps_are_not_judged_but_kept_as_exact_ledgers() -> None:
    records = [hello(0), hello(1)]
    steps = [step(rank, n, 10**10 if n == 30 else 100 * MS, exact=n == 30) for n in range(1, 60) for rank in (0, 1)]
    result = summarize([*records, *steps])
    rate = throughput(result)
    assert rate is not None
    assert rate["low"] == rate["high"] == pytest.approx(320.0)
    assert result.ledger_before is not None
    assert (result.ledger_before.estimate, result.ledger_before.exact) == (48, 0)
    assert result.exact_before is not None
    assert (result.exact_before.steps, result.exact_before.exact) == (1, 1)


def test_a_step_profiled_on_one_rank_only_is_not_judged() -> None:
    records: list[JobRecord] = [hello(0), hello(1)]
    records += [step(0, n) for n in range(1, 30)] + [step(1, n, exact=n == 20) for n in range(1, 30)]
    result = summarize(records)
    assert result.ledger_before is not None
    assert result.ledger_before.steps == 29 - WARMUP_STEPS - 1


def test_nothing_at_all_gives_a_result_that_says_so() -> None:
    result = summarize([])
    assert result.steps == 0
    assert result.world_size is None
    assert throughput(result) is None
    assert result.overhead_ratio is None
    document = as_document(result)
    assert document["ledger_before"] is None
    assert document["decisions"] == []
    json.dumps(document, allow_nan=False)


def test_a_run_that_ends_in_its_warm_up_has_steps_but_no_comparison() -> None:
    result = summarize([hello(0, 1), *(step(0, n) for n in range(1, WARMUP_STEPS + 1))])
    assert result.steps == WARMUP_STEPS
    assert throughput(result) is None
    assert result.ledger_after is None


def test_a_silent_rank_is_named_and_the_pace_is_that_of_the_others() -> None:
    result = summarize([hello(0), *(step(0, n) for n in range(1, 60))])
    assert result.report is not None
    assert "ranks 1 of 2 left no step here" in result.report.notices[0].text
    assert throughput(result) is not None
    assert result.steps == 59
    assert [count.rank for count in result.ranks] == [0]


def test_samples_that_were_not_counted_give_no_throughput_and_zero_is_one() -> None:
    uncounted = [hello(0, 1), *(step(0, n, samples=None) for n in range(1, 40))]
    assert throughput(summarize(uncounted)) is None
    assert summarize(uncounted).speedup is None
    assert summarize(uncounted).ledger_before is not None
    zero = throughput(summarize([hello(0, 1), *(step(0, n, samples=0) for n in range(1, 40))]))
    assert zero is not None
    assert zero["samples_per_second"] == 0.0


def test_without_a_switch_before_and_after_are_the_same_steps() -> None:
    result = summarize([hello(0, 1), *(step(0, n) for n in range(1, 40))])
    document = as_document(result)
    assert document["steps_before"] == document["steps_after"] == (11, 39)
    assert document["ledger_before"] == document["ledger_after"]
    assert result.speedup == 1.0
    assert result.changes == ()


def test_a_run_that_ends_inside_a_trial_is_judged_at_the_kept_settings() -> None:
    """The last switch brought the candidate; the windows of the incumbent before it are what is kept."""
    records: list[JobRecord] = [hello(0, 1), decision(1, 2, 4, 20)]
    for number in range(1, 61):
        micro_batch = 4 if 21 <= number <= 30 or number > 50 else 2
        records.append(step(0, number, 300 * MS if micro_batch == 4 else 100 * MS, micro_batch=micro_batch))
    records += [switch(0, at, 1, epoch, value) for epoch, (at, value) in enumerate(((20, 4), (30, 2), (50, 4)), 1)]
    result = summarize(records)
    assert result.knobs_after == {"micro_batch": 2}
    assert as_document(result)["steps_after"] == (33, 50)
    rate = throughput(result, "after")
    assert rate is not None
    assert rate["samples_per_second"] == pytest.approx(160.0)
    (change,) = result.changes
    assert change.outcome is None
    assert change.measured_gain_ratio is None


def test_what_was_rolled_back_is_not_in_the_knobs_after() -> None:
    records = run_with_a_kept_trial()
    records += [decision(2, 4, 8, 80), verdict(2, 100, "rolled_back")]
    result = summarize(records)
    assert result.knobs_after == {"micro_batch": 4}
    assert [change.outcome for change in result.changes] == ["kept", "rolled_back"]


def test_overhead_is_all_ranks_own_time_over_all_ranks_wall_time() -> None:
    ranks = [step(0, 5, total_wall_ns=1000), step(1, 5, total_wall_ns=3000)]
    assert summarize(ranks).overhead_ratio == pytest.approx(40 / 4000)


def test_steps_that_were_only_counted_at_the_end_are_in_the_goodbyes() -> None:
    records: list[JobRecord] = [step(0, 5, total_wall_ns=1000), step(1, 5, total_wall_ns=3000)]
    totals = Ledger(wall_ns=6000, compute_ns=6000)
    told = Goodbye(job="j", rank=1, reason="", wall_ns=0, totals=totals, total_steps=9, total_overhead_ns=90)
    old = Goodbye(job="j", rank=0, reason="", wall_ns=0)
    result = summarize([*records, told, old])
    assert result.steps == 9
    assert result.overhead is not None
    assert result.overhead.wall_seconds == 6000 / 1e9
    assert result.overhead_ratio == pytest.approx((10 + 90) / (1000 + 6000))


def test_a_run_without_steps_can_still_say_what_the_tuner_did() -> None:
    status = TunerStatus(
        job="j", rank=0, state="frozen", detail="rank 1 left", step=3, wall_ns=1, exploration_ns=7, trials=0
    )
    result = summarize([hello(0), Goodbye(job="j", rank=0, reason="failed: ValueError", wall_ns=0), status])
    assert result.tuner == "frozen: rank 1 left"
    assert result.exploration_ns == 7
    assert result.ranks[0].last_words == "failed: ValueError"


def test_a_loss_that_is_not_a_number_is_missing_in_the_document() -> None:
    document = as_document(summarize([], DemoLosses(first=2.0, last=float("nan"))))
    assert document["losses"]["first"] == 2.0
    assert document["losses"]["last"] is None


def test_the_document_has_the_keys_and_its_headings_sum_to_the_wall_time() -> None:
    document = as_document(summarize(run_with_a_kept_trial()))
    assert document["world_size"] == 2
    assert document["steps"] == 120
    for key in ("ledger_before", "ledger_after"):
        ledger = document[key]
        assert sum(ledger[f"{heading}_ns"] for heading in LEDGER_HEADINGS) == ledger["wall_ns"]
        assert ledger["steps"] == ledger["source"]["estimate"] + ledger["source"]["exact"]
        assert {"communication_ns", "overlapped_communication_ns"} <= ledger.keys()
    for key in ("throughput_before", "throughput_after"):
        assert {"samples_per_second", "low", "high", "unit", "method"} <= document[key].keys()
    (entry,) = document["decisions"]
    assert entry["step_applied"] == {"0": 40, "1": 40}
    assert {"knob", "from", "to", "expected_gain_ratio", "measured_gain_ratio", "verdict"} <= entry.keys()
    json.dumps(document, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(0, 10**9), st.booleans(), st.sampled_from([2, 4])),
        max_size=120,
    ),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(1, 3)), max_size=6),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["kept", "rolled_back", "abandoned"])), max_size=4),
)
def test_whatever_was_recorded_there_is_a_result_and_its_claims_hold(
    steps: list[tuple[int, int, int, bool, int]],
    switches: list[tuple[int, int, int]],
    verdicts: list[tuple[int, Outcome]],
) -> None:
    records: list[JobRecord] = [hello(rank, 3) for rank in range(3)]
    records += [step(rank, n, wall, exact=exact, micro_batch=m) for rank, n, wall, exact, m in steps]
    records += [switch(rank, n, d, epoch) for epoch, (rank, n, d) in enumerate(switches)]
    for number, outcome in verdicts:
        records += [decision(number, 2, 4, 10), verdict(number, 20, outcome)]
    result = summarize(records)
    for rate in (throughput(result, "before"), throughput(result, "after")):
        if rate is not None:
            assert rate["low"] <= rate["samples_per_second"] <= rate["high"]
    for total in (result.ledger_before, result.ledger_after, result.exact_before, result.exact_after):
        if total is not None:
            assert sum(total.ledger.parts().values()) == total.ledger.wall_ns
            assert total.steps == total.estimate + total.exact > 0
    if result.before is not None and switches:
        assert result.before.last[1] <= min(n for _, n, _ in switches)
    json.dumps(as_document(result), allow_nan=False)


def check(rank: int, number: int, error: int, *, own: bool = True) -> EstimateCheck:
    exact = Ledger(wall_ns=100, compute_ns=100)
    return EstimateCheck(
        job="j", rank=rank, step=number, ended_wall_ns=0, exact=exact, calibration_age_steps=1, is_own_setting=own,
        estimate=Ledger(wall_ns=100, compute_ns=100 - error, host_bound_ns=error), windows=1, slowdown_ns=error,
    )  # fmt: skip


def test_the_estimates_error_is_over_the_windows_of_all_ranks() -> None:
    records = [check(0, 5, 2), check(1, 7, 9, own=False), check(0, 30, 0)]
    error = summarize([hello(0), *records]).estimate_error
    assert error is not None
    assert (error.windows, error.median_ratio, error.worst_ratio) == (3, 0.02, 0.09)
    assert (error.own_setting, error.own_setting_median_ratio, error.bias_limit_ratio) == (2, 0.01, 0.02)
    assert as_document(summarize(records))["estimate_error"]["worst_ratio"] == 0.09


def test_an_estimate_that_was_never_checked_has_no_error() -> None:
    assert summarize([hello(0), step(0, 1)]).estimate_error is None


def test_the_ladder_that_closes_is_the_jobs_last_or_that_of_the_first_rank() -> None:
    def ladder(of_rank: int | None, step: int) -> WhatIf:
        return WhatIf(
            job="j", of_rank=of_rank, step=step, wall_ns=1, steps=10, pace_ns=1, source="estimate",
            calibration_age_steps=1, rungs=(),
        )  # fmt: skip

    of_ranks = [ladder(1, 90), ladder(0, 40), ladder(0, 80)]
    assert summarize(of_ranks).what_if == ladder(0, 80)
    result = summarize([*of_ranks, ladder(None, 20), ladder(None, 10)])
    assert result.what_if == ladder(None, 20)
    assert as_document(result)["what_if"]["step"] == 20
    assert summarize([]).what_if is None


def costly(costs_ns: dict[int, int], switches: tuple[int, ...] = ()) -> list[JobRecord]:
    """Two ranks of 100 steps of 100 ms; `costs_ns` are what a step costs from that one on."""
    records: list[JobRecord] = []
    total_ns = cost_ns = 0
    for number in range(1, 101):
        cost_ns = costs_ns.get(number, cost_ns)
        total_ns += cost_ns
        records += [structs.replace(step(rank, number), total_overhead_ns=total_ns) for rank in (0, 1)]
    return records + [switch(rank, number, 1, number) for number in switches for rank in (0, 1)]


def test_what_was_spent_at_the_start_is_paid_by_what_is_saved_since() -> None:
    """1.5 % over 10 s and of late 0.5 %: the 50 ms that are too much take ten seconds more."""
    result = summarize(costly({1: 105 * MS // 10, 11: MS // 2}, (12,)), overhead_budget=0.01)
    overhead = result.overhead
    assert overhead is not None
    assert overhead.wall_seconds == 10.0
    assert overhead.late_ratio == pytest.approx(0.005)
    assert overhead.ratio == pytest.approx(0.015)
    assert result.overhead_paid_by_seconds == pytest.approx(20.0)
    document = as_document(result)
    assert document["overhead_ratio"] == overhead.ratio
    assert document["overhead_paid_by_seconds"] == result.overhead_paid_by_seconds


def test_the_last_long_stretch_without_a_switch_says_how_it_goes_on_and_too_short_a_one_nothing() -> None:
    dear = costly({1: 2 * MS, 40: MS // 10, 90: 5 * MS}, (40, 89, 95))
    late = summarize(dear, overhead_budget=0.01).overhead
    assert late is not None
    assert late.late_ratio == pytest.approx(0.001)
    short = summarize(costly({1: 2 * MS}, tuple(range(5, 101, 5))), overhead_budget=0.01)
    assert short.overhead is not None
    assert short.overhead.late_ratio is None
    assert short.overhead_paid_by_seconds is None


def test_what_is_within_the_budget_is_paid_and_what_goes_on_above_it_never_will_be() -> None:
    cheap = summarize(costly({1: MS // 2}), overhead_budget=0.01)
    assert cheap.overhead_paid_by_seconds == 10.0
    assert summarize(costly({1: 2 * MS}, (3,)), overhead_budget=0.01).overhead_paid_by_seconds is None
    assert summarize(costly({1: MS // 2})).overhead_paid_by_seconds is None, "nobody said what is allowed"
