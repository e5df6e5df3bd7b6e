"""Build records for tests: valid in every field, so that a test names the fields that it is about and no others."""

from __future__ import annotations

from typing import Any

from pacecar.records import Decision, JobHello, Knobs, Ledger, StepRecord, Verdict

__all__ = ["MS", "START_NS", "decision", "job_hello", "ledger", "step_record", "verdict"]

MS = 1_000_000
"""Nanoseconds in a millisecond."""

START_NS = 1_700_000_000_000_000_000
"""When the jobs of tests started, by the wall clock."""


def job_hello(rank: int = 0, world_size: int = 2, **changes: Any) -> JobHello:
    """Return who a rank of a job on one node says it is."""
    fields: dict[str, Any] = {
        "job": "j", "rank": rank, "local_rank": rank, "world_size": world_size, "pid": 100 + rank, "host": "node-a",
        "device": "cpu", "backend": "gloo", "framework": "torch 2.13.0", "pacecar_version": "0.1.0",
        "started_wall_ns": START_NS,
    }  # fmt: skip
    return JobHello(**(fields | changes))


def ledger(wall_ns: int = 100 * MS, **parts_ns: int) -> Ledger:
    """Return a ledger of `wall_ns`: the headings in `parts_ns` (without their `_ns`), and the rest compute."""
    fields = {f"{name}_ns": value for name, value in parts_ns.items()}
    beside = {"communication_ns", "overlapped_communication_ns"}  # in no sum
    if "compute_ns" not in fields:
        fields["compute_ns"] = wall_ns - sum(value for name, value in fields.items() if name not in beside)
    if "communication_ns" not in fields:
        fields["communication_ns"] = fields.get("exposed_communication_ns", 0) + fields.get(
            "overlapped_communication_ns", 0
        )
    return Ledger(wall_ns=wall_ns, **fields)


def step_record(rank: int = 0, step: int = 1, wall_ns: int = 100 * MS, **changes: Any) -> StepRecord:
    """Return what a rank says of a step; its time was all compute, and so was that of the `step` - 1 before it."""
    here = changes.get("ledger", ledger(wall_ns))
    fields: dict[str, Any] = {
        "job": "j", "rank": rank, "step": step, "ended_wall_ns": START_NS + step * wall_ns, "wall_ns": wall_ns,
        "data_wait_ns": 0, "forward_ns": wall_ns // 4, "backward_ns": wall_ns // 2, "optimizer_ns": wall_ns // 8,
        "micro_batches": 1, "samples": 16, "tokens": None, "ledger": here, "source": "estimate",
        "calibration_age_steps": None, "totals": ledger(wall_ns * step), "total_steps": step,
        "total_samples": 16 * step, "total_tokens": None, "overhead_ns": 1000, "total_overhead_ns": 1000 * step,
        "total_windows": 0, "dropped_records": 0, "knobs": Knobs(), "gc_ns": 10, "total_gc_ns": 10 * step,
    }  # fmt: skip
    return StepRecord(**(fields | changes))


def decision(number: int = 1, **changes: Any) -> Decision:
    """Return a tuner's trial, of buckets of twice the size."""
    fields: dict[str, Any] = {
        "job": "j", "decision": number, "kind": "trial", "knob": "bucket_bytes", "from_value": 1, "to_value": 2,
        "step": 1, "wall_ns": 1, "reason": "", "expected_gain_ratio": None,
    }  # fmt: skip
    return Decision(**(fields | changes))


def verdict(number: int = 1, **changes: Any) -> Verdict:
    """Return what became of it: kept, for nothing that was measured."""
    fields: dict[str, Any] = {
        "job": "j", "decision": number, "knob": "bucket_bytes", "outcome": "kept", "step": 2, "wall_ns": 2,
        "measured_gain_ratio": None, "gain_low": None, "gain_high": None, "evidence": None, "trial_steps": 1,
        "exploration_ns": 0, "reason": "",
    }  # fmt: skip
    return Verdict(**(fields | changes))
