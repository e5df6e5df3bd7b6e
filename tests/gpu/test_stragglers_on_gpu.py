"""Two ranks on one GPU over gloo, one of which is slowed: whom pacecar names, for what, and after how many steps."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

from pacecar.records import JobLedger, JobRecord, StepRecord, Straggler
from tests.gpu.conftest import Figures
from tests.gpu.jobs import Ended, run
from tests.gpu.straggler_job import ACTS, BURNING, SLOW_RANK

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive, pytest.mark.slow]

JOB = "tests.gpu.straggler_job"
STEPS = "STRAGGLER_STEPS"
"""Environment variable: how many steps an act has, of which the last three quarters may be slow."""

SECONDS = 130
"""For all acts."""

WORLD = 2
WARM_STEPS = 10
"""Steps at the beginning that say nothing of a usual one."""


@dataclass(frozen=True)
class Job:
    """A job that has played all acts, or as many as it could; `error` says why not all."""

    folder: Path
    slow_from: int
    error: str | None


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, is_real: bool) -> Job:
    """Run both ranks through all acts."""
    folder = tmp_path_factory.mktemp("stragglers")
    steps = int(os.environ.get(STEPS, "160" if is_real else "60"))
    slow_from = steps // 4
    size = () if is_real else ("--width", "128", "--layers", "2", "--batch", "32", "--slow-ms", "25")
    arguments = (JOB, *ACTS, "--folder", str(folder), "--steps", str(steps), "--slow-from", str(slow_from), *size)
    error = None
    try:
        ended = run(*arguments, seconds=SECONDS, ranks=WORLD, environ={"OMP_NUM_THREADS": "1"})
        wrong = [(rank, process) for rank, process in enumerate(ended) if process.returncode]
        if wrong:
            error = "; ".join(f"rank {rank}: {process.returncode}: {process.stderr[-1000:]}" for rank, process in wrong)
    except Ended as ended_late:
        error = str(ended_late)
    return Job(folder, slow_from, error)


def phases(records: list[JobRecord], slow_from: int) -> dict[str, Any]:
    """Return the medians of a rank's phases, before and after `slow_from`, in milliseconds."""
    found: dict[str, Any] = {}
    steps = [one for one in records if isinstance(one, StepRecord) and one.step >= WARM_STEPS]
    for when, chosen in (("usual", [one for one in steps if one.step < slow_from]),
                         ("later", [one for one in steps if one.step >= slow_from])):  # fmt: skip
        for name in ("wall_ns", "data_wait_ns", "forward_ns", "backward_ns", "optimizer_ns"):
            values = [value for one in chosen if (value := getattr(one, name)) is not None]
            found[f"{when}_{name.removesuffix('_ns')}_ms"] = round(median(values) / 1e6, 2) if values else None
        for name in ("compute_ns", "exposed_communication_ns", "host_bound_ns"):
            values = [getattr(one.ledger, name) for one in chosen]
            found[f"{when}_ledger_{name.removesuffix('_ns')}_ms"] = round(median(values) / 1e6, 2) if values else None
    return found


def named(act: str, job: Job, figures: Figures) -> set[int | None]:
    """Keep as figures what was said in an act, and return the ranks that were named.

    Raises:
        Ended: the job did not come through this act.
    """
    folder, slow_from = job.folder / act, job.slow_from
    ends = [folder / f"ended{rank}.json" for rank in range(WORLD)]
    if not all(end.exists() for end in ends):
        raise Ended(f"{act} was not played to its end: {job.error}")
    said = [json.loads(end.read_text()) for end in ends]
    figures(slow_from=slow_from, jobs=said)
    assert [one["inert_because"] for one in said] == [None] * WORLD
    decoder = msgspec.json.Decoder(JobRecord)
    logs = [(folder / f"rank{rank}.jsonl").read_bytes().splitlines() for rank in range(WORLD)]
    records: list[list[JobRecord]] = [[decoder.decode(line) for line in log] for log in logs]
    found = [record for record in records[0] if isinstance(record, Straggler)]
    figures(
        findings=[
            {"rank": one.late_rank, "cause": one.cause, "phase": one.phase, "excess_ms": one.excess_ns / 1e6,
             "since_step": one.since_step, "step": one.step, "after_steps": one.step - slow_from, "ended": one.ended,
             "evidence": one.evidence} for one in found
        ],
        phases=[{"rank": rank, **phases(records[rank], slow_from)} for rank in range(WORLD)],
        compared=[
            {"steps": one.total_steps, "pace_ms": one.pace_ns / 1e6, "median_ms": one.median_ns / 1e6,
             **{f"{name}_ms": ns / 1e6 for name, ns in one.total_phases_ns.items()}}
            for one in records[0] if isinstance(one, JobLedger)
        ][-1:],
    )  # fmt: skip
    assert any(isinstance(record, JobLedger) for record in records[0]), "the ranks were not compared"
    return {one.late_rank for one in found if not one.ended}


@pytest.mark.full
@pytest.mark.slow
def test_healthy(job: Job, is_real: bool, figures: Figures) -> None:
    """Where two ranks on one GPU do the same, pacecar names neither of them."""
    found = named("healthy", job, figures)
    if is_real:
        assert found == set()


def test_neighbour(job: Job, is_real: bool, figures: Figures) -> None:
    """Where another process keeps the GPU busy, both ranks suffer and pacecar names neither of them."""
    found = named("neighbour", job, figures)
    assert (job.folder / "neighbour" / BURNING).exists()
    if is_real:
        assert found == set()


@pytest.mark.parametrize("how", ["kernel", "loader", "host"])
def test_slow(how: str, job: Job, is_real: bool, figures: Figures) -> None:
    """A rank with longer kernels, late data or a busy host is named, and the other one is not."""
    found = named(how, job, figures)
    if is_real:
        assert found == {SLOW_RANK}
