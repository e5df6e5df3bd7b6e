"""The lines with which `pacecar run` reports a run's outcome, from records alone."""

from __future__ import annotations

from typing import Any

import pytest

from pacecar.job.autoattach.stderr_lines import NOT_KEPT, OutcomeLines
from pacecar.records import Decision, Goodbye, TunerStatus, Verdict
from tests.kit import records
from tests.kit.records import MS, ledger, step_record


def goodbye(**changes: Any) -> Goodbye:
    totals = ledger(1000 * MS, exposed_communication=300 * MS, host_bound=100 * MS, data_wait=5 * MS, unknown=20 * MS)
    fields: dict[str, Any] = {
        "job": "j", "rank": 0, "reason": "finished", "wall_ns": 1, "totals": totals, "total_steps": 10,
        "total_overhead_ns": 5 * MS,
    }  # fmt: skip
    return Goodbye(**(fields | changes))


def status(state: Any, detail: str = "", rank: int = 0) -> TunerStatus:
    return TunerStatus(job="j", rank=rank, state=state, detail=detail, step=1, wall_ns=1, exploration_ns=0, trials=0)


def tried(number: int, knob: str, before: int, after: int, outcome: Any) -> list[Decision | Verdict]:
    return [
        records.decision(number, knob=knob, from_value=before, to_value=after),
        records.verdict(number, knob=knob, outcome=outcome),
    ]


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*records: Any, run_dir: str | None = None) -> str:
        line = OutcomeLines(run_dir)
        for record in records:
            line.put(record)
        line.close(1.0)
        line.close(1.0)
        return capfd.readouterr().err

    return run


KEPT = f"; {NOT_KEPT}\n"
MEASURED = "pacecar: 10 steps of 100.00 ms: 57.5 % compute, 30.0 % exposed communication, 10.0 % host-bound"


def test_a_measured_script_hears_its_largest_shares_and_what_pacecar_took(said: Any) -> None:
    assert said(step_record(), goodbye()) == f"{MEASURED}; pacecar's own time 5.00 ms (0.50 %){KEPT}"
    assert said(goodbye(), run_dir="runs/my a").endswith("; more: pacecar report 'runs/my a'\n")
    assert said(goodbye(), run_dir="runs/a").endswith("(0.50 %); more: pacecar report runs/a\n")
    assert said(goodbye(total_overhead_ns=None)) == f"{MEASURED}{KEPT}"


def test_a_tuned_script_hears_what_was_kept_from_the_first_value_to_the_last(said: Any) -> None:
    steps = [
        status("trial"),
        *tried(1, "bucket_bytes", 25 * 2**20, 50 * 2**20, "kept"),
        *tried(2, "bucket_bytes", 50 * 2**20, 100 * 2**20, "rolled_back"),
        *tried(3, "micro_batch", 8, 4, "kept"),
        *tried(4, "micro_batch", 4, 2, "kept"),
    ]
    kept = "; kept bucket_bytes 25 MiB -> 50 MiB, micro_batch 8 -> 2" + KEPT
    assert said(*steps, goodbye()).endswith(kept)
    assert said(*steps, *tried(5, "micro_batch", 2, 8, "kept"), goodbye()).endswith(
        "; kept bucket_bytes 25 MiB -> 50 MiB" + KEPT
    )
    assert said(status("watching"), goodbye()).endswith("; kept no change" + KEPT)
    assert "; kept" not in said(status("off"), status("frozen"), goodbye())


def test_where_there_turns_out_to_be_nothing_to_tune_the_first_reason_is_said_at_once(said: Any) -> None:
    detail = "nothing to tune: bucket_bytes: all gradients fit in the smallest bucket; loader_workers: no loader"
    line = "pacecar: tunes nothing: bucket_bytes: all gradients fit in the smallest bucket\n"
    assert said(status("warming"), status("off", detail), status("off", detail)) == line
    assert said(status("warming", rank=1), status("off", detail, rank=1), goodbye(rank=1)) == ""
    assert (
        said(status("warming"), status("off", detail), goodbye())
        == f"{line}{MEASURED}; pacecar's own time 5.00 ms (0.50 %){KEPT}"
    )


def test_a_run_that_was_too_short_says_so_and_other_ranks_than_the_first_hear_nothing(said: Any) -> None:
    assert said() == ""
    short = "pacecar: measured no step: none ended after the one in which pacecar attached"
    assert said(goodbye(totals=None, total_steps=None)) == f"{short}{KEPT}"
    assert said(goodbye(total_steps=0), run_dir="a") == f"{short}; more: pacecar report a\n"
    assert said(goodbye(rank=1)) == ""
