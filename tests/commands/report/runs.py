"""Runs for the tests of report and demo: folders as hooks write them, with every number known, and their reports."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from pacecar.commands.report.build import BuildOptions, Built, build_report
from pacecar.commands.report.document import Report
from pacecar.commands.report.reading.inputs import find_inputs
from pacecar.records import Decision, JobHello, JobRecord, Knobs, KnobSwitch, Ledger, StepRecord, Verdict

MS = 1_000_000
START_NS = 1_800_000_000_000_000_000

Pace = Callable[[int, int], int]
"""Rank and step -> wall time in nanoseconds."""


def hello(rank: int, ranks: int = 2, *, job: str = "j", host: str = "node-a", uuid: str | None = None) -> JobHello:
    return JobHello(
        job=job, rank=rank, local_rank=rank, world_size=ranks, pid=100 + rank, host=host, device="cuda",
        device_uuid=uuid, backend="nccl", framework="torch 2.13", pacecar_version="0.1.0", parallel={"data": ranks},
        started_wall_ns=START_NS, interface="eth0",
    )  # fmt: skip


def step(
    rank: int,
    number: int,
    wall_ns: int = 100 * MS,
    *,
    job: str = "j",
    ended_ns: int | None = None,
    samples: int | None = 16,
    tokens: int | None = 512,
    micro_batch: int = 2,
    epoch: int = 0,
    exact: bool = False,
    disturbed: bool = False,
    total_wall_ns: int | None = None,
) -> StepRecord:
    """A step that computes 80 %, communicates exposed 15 % (and as much again under compute) and idles 5 %."""
    exposed, host = wall_ns * 15 // 100, wall_ns * 5 // 100
    ledger = Ledger(
        wall_ns=wall_ns, compute_ns=wall_ns - exposed - host, exposed_communication_ns=exposed, host_bound_ns=host,
        communication_ns=2 * exposed, overlapped_communication_ns=exposed,
    )  # fmt: skip
    total = total_wall_ns if total_wall_ns is not None else wall_ns * (number + 1)
    return StepRecord(
        job=job, rank=rank, step=number, ended_wall_ns=ended_ns if ended_ns is not None else START_NS + total,
        wall_ns=wall_ns, data_wait_ns=None, forward_ns=None, backward_ns=None, optimizer_ns=None, micro_batches=None,
        samples=samples, tokens=tokens, ledger=ledger, source="exact" if exact else "estimate",
        calibration_age_steps=3, totals=Ledger(wall_ns=total, compute_ns=total), total_steps=number + 1,
        total_samples=None if samples is None else samples * (number + 1),
        total_tokens=None if tokens is None else tokens * (number + 1),
        overhead_ns=1, total_overhead_ns=total // 200, total_windows=1, dropped_records=rank,
        knobs=Knobs(epoch=epoch, values={"micro_batch": micro_batch}), disturbed=disturbed,
    )  # fmt: skip


def decision(number: int, at: int, old: int, new: int, *, job: str = "j", wall_ns: int = START_NS) -> Decision:
    return Decision(
        job=job, decision=number, kind="trial", knob="micro_batch", from_value=old, to_value=new, step=at,
        wall_ns=wall_ns, reason="larger", expected_gain_ratio=0.1,
    )  # fmt: skip


def switch(number: int, at: int, value: int, epoch: int, *, rank: int = 0, job: str = "j") -> KnobSwitch:
    knobs = Knobs(epoch=epoch, values={"micro_batch": value})
    return KnobSwitch(job=job, rank=rank, decision=number, epoch=epoch, step=at, knobs=knobs, duration_ns=7)


def verdict(number: int, at: int, outcome: str = "kept", *, job: str = "j", wall_ns: int = START_NS) -> Verdict:
    return Verdict(
        job=job, decision=number, knob="micro_batch", outcome=outcome, step=at, wall_ns=wall_ns,
        measured_gain_ratio=0.2, gain_low=0.1, gain_high=0.3, evidence=100.0, trial_steps=8, exploration_ns=-5,
        reason=f"micro_batch: {outcome}",
    )  # fmt: skip


def lines(records: Iterable[JobRecord]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def steady(base_ns: int = 100 * MS, noise: float = 0.0, seed: int = 0) -> Pace:
    """The same pace on all ranks, with noise of each step."""

    def pace(_: int, number: int) -> int:
        # One stream a step, so that ranks have the same and any step can be asked for first.
        return round(base_ns * random.Random(seed * 1_000_003 + number).lognormvariate(0, noise)) if noise else base_ns

    return pace


def untuned(folder: Path, *, ranks: int = 2, steps: int = 200, pace: Pace | None = None, job: str = "j") -> Path:
    """A run in which nothing is turned."""
    folder.mkdir(parents=True, exist_ok=True)
    pace = pace or steady()
    for rank in range(ranks):
        total, records = 0, [hello(rank, ranks, job=job)]
        for number in range(steps):
            wall_ns = pace(rank, number)
            total += wall_ns
            records.append(step(rank, number, wall_ns, job=job, total_wall_ns=total))
        (folder / f"rank{rank}.jsonl").write_bytes(lines(records))
    return folder


def tuned(folder: Path, *, steps: int = 200, gain: float = 0.2, kept: bool = True) -> Path:
    """Two ranks; micro_batch 2 -> 4 is tried from step 59 on, decided at step 99, and saves `gain` of the step."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = round(100 * MS * (1 - gain))
    for rank in range(2):
        total, records = 0, [hello(rank)]
        for number in range(steps):
            is_four = 60 <= number < 80 or (number >= 100 and kept)
            wall_ns = fast if is_four else 100 * MS
            total += wall_ns
            epoch = 0 if number < 60 else 1 if number < 80 else 2 if number < 100 else 3
            records.append(
                step(rank, number, wall_ns, micro_batch=4 if is_four else 2, epoch=epoch, total_wall_ns=total)
            )
            now = START_NS + total
            if number == 50 and rank == 0:
                records.append(decision(1, 50, 2, 4, wall_ns=now))
            if number in (59, 79):
                records.append(switch(1, number, 4 if number == 59 else 2, epoch + 1, rank=rank))
            if number == 99:
                if kept:
                    records.append(switch(1, 99, 4, 3, rank=rank))
                if rank == 0:
                    records.append(verdict(1, 99, "kept" if kept else "rolled_back", wall_ns=now))
        (folder / f"rank{rank}.jsonl").write_bytes(lines(records))
    return folder


def append(folder: Path, rank: int, *records: JobRecord) -> None:
    """Write more records of a rank."""
    with (folder / f"rank{rank}.jsonl").open("ab") as stream:
        stream.write(lines(records))


def built(run: Path, **options: object) -> Built:
    """Return the report of a run with its rates; `options` are those of `BuildOptions`."""
    return build_report(find_inputs(run), BuildOptions(**options))  # type: ignore[arg-type]


def report_of(run: Path, **options: object) -> Report:
    """Return the report of a run."""
    return built(run, **options).report
