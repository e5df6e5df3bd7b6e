"""What does a tuned job say?  One record of every kind that ends up in a series, a different number in every field."""

from __future__ import annotations

from pacecar.records import (
    Bound,
    CollectiveSum,
    CollectiveWindow,
    Decision,
    DeviceMemory,
    EstimateCheck,
    HangSuspicion,
    HangVerdict,
    JobLedger,
    JobRecord,
    Knobs,
    KnobSwitch,
    Ledger,
    Rung,
    Straggler,
    TunerOrder,
    TunerStatus,
    Verdict,
    Vitals,
    WhatIf,
)
from pacecar.records.hangs import HangKind

__all__ = ["everything"]


def everything(rank: int) -> list[JobRecord]:
    """Return one of each, as `rank` of the job "run-7" would say it; hello and step are the caller's."""
    why = 'a "quoted"\nreason'
    common = {"job": "run-7", "decision": 1, "knob": "bucket_bytes", "step": 5, "wall_ns": 1, "reason": why}
    return [
        Vitals(
            job="run-7", rank=rank, step=41, ended_wall_ns=1, steps=20, wall_ns=2_000_000_000, samples=640,
            tokens=10240, flops_source="counted", step_flops=3_000_000, flops=60_000_000, flops_steps=20,
            flops_wall_ns=2_000_000_000, arithmetic="bfloat16", peak_flops_per_second=120_000_000,
            memory=DeviceMemory(
                allocated_bytes=300, reserved_bytes=400, allocated_peak_bytes=350, interval_peak_bytes=350,
                inactive_split_bytes=50, total_allocation_retries=2, total_out_of_memory=1,
            ),
            total_checkpoints=3, total_checkpoint_ns=4_500_000_000,
        ),
        EstimateCheck(
            job="run-7", rank=rank, step=40, ended_wall_ns=1, calibration_age_steps=9, is_own_setting=True, windows=2,
            exact=Ledger(wall_ns=1000, compute_ns=700, host_bound_ns=200, unknown_ns=100),
            estimate=Ledger(wall_ns=1000, compute_ns=730, host_bound_ns=190, unknown_ns=80), slowdown_ns=60,
        ),
        CollectiveWindow(
            job="run-7", rank=rank, step=40, ended_wall_ns=1,
            sums=(CollectiveSum(operation="all_reduce", count=4, duration_ns=8_000_000, bytes=4000, bus_bytes=6000),
                  CollectiveSum(operation="barrier", count=1, duration_ns=9)),
        ),
        KnobSwitch(
            job="run-7", rank=rank, decision=1, epoch=7, step=5, knobs=Knobs(7, {"bucket_bytes": 1}), duration_ns=3
        ),
        Decision(kind="trial", from_value=1, to_value=2, expected_gain_ratio=0.125, **common),
        Verdict(outcome="kept", measured_gain_ratio=0.25, gain_low=0.1, gain_high=0.3, evidence=2.0, trial_steps=1,
                exploration_ns=5, **common),
        TunerOrder(
            job="run-7", action="set", outcome="done", uid=7, values={"bucket_bytes": 1}, step=5, wall_ns=1, detail=why
        ),
        TunerStatus(job="run-7", rank=rank, state="watching", detail="", step=5, wall_ns=1, exploration_ns=6, trials=1),
        JobLedger(job="run-7", ranks=4, step=5, pace_ns=30_000_000, median_ns=29_000_000, total_steps=6,
                  total_wall_ns=700_000_000, total_phases_ns={"forward": 300_000_000, "tail": 400_000_000}),
        Straggler(job="run-7", late_rank=1, cause="data_wait", phase="data_wait", since_step=2, step=5, wall_ns=1,
                  excess_ns=8_000_000, evidence="because"),
        WhatIf(job="run-7", of_rank=None, step=5, wall_ns=1, steps=400, pace_ns=30_000_000, source="estimate",
               calibration_age_steps=17, rungs=(
                   Rung("at_most_communication_hidden", 24_000_000, 0.2, Bound.REST),
                   Rung("at_most_data_free", 30_000_000, 0.0, Bound.REST),
               )),
        HangSuspicion(job="run-7", rank=rank, step=6, phase="tail", wall_ns=1, silent_ns=9, last_collective=None,
                      collectives=17, stack=None),
        HangVerdict(job="run-7", rank=rank, wall_ns=1, kind=HangKind.NOT_JOINED, culprits=(1,), waiting=(0,),
                    waited_ns=12_000_000_000, summary="rank 1 never joined all_reduce #183", step=6),
    ]  # fmt: skip
