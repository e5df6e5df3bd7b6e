"""`pacecar run` on a script of transformers' Trainer that knows nothing of it, with the real library."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.world import ROOT, adapters_python
from tests.zerocode.scripts import TRAINER, Done, run_both

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": str(ROOT)}


def lines(done: Done) -> list[str]:
    """Return what the script printed but for the line in which Trainer prints its times."""
    return [line for line in done.out.splitlines() if "_runtime" not in line]


def test_a_trainer_script_has_its_buckets_tuned_and_prints_and_trains_the_same(tmp_path: Path) -> None:
    size = ("--steps", "90", "--width", "192", "--layers", "4", "--batch", "1", "--accumulate", "2", "--length", "8")
    bare, seen = run_both(
        TRAINER,
        *size,
        watched=("--tune", "exact", "--run-dir", str(tmp_path)),
        python=adapters_python(),
        PACECAR_HOOK_WINDOWS="false",
        PACECAR_TUNE_EXPLORATION_BUDGET="1.0",
        PACECAR_TUNE_WARMUP_STEPS="3",
        PACECAR_TUNE_KNOBS="bucket_bytes,first_bucket_bytes",
        PACECAR_TUNE_DEAD_BAND="0.0",
        **OFFLINE,
    )
    assert (seen.code, lines(seen), seen.errors) == (0, lines(bare), bare.errors)
    assert len(lines(seen)) > 10, "of two numbers a sum has one order, so the losses are equal to the bit"
    (line,) = seen.pacecar
    assert line.endswith("DistributedDataParallel and AdamW on 2 ranks; mode exact")
    for rank in range(2):
        (hello,) = seen.of(rank, "hello")
        assert (hello["rank"], hello["local_rank"], hello["world_size"]) == (rank, rank, 2)
        steps = seen.of(rank, "step")
        assert 75 < steps[-1]["total_steps"] < 90, "updates, not batches"
        assert {step["micro_batches"] for step in steps[1:]} == {2}
        assert all(sum(v for k, v in step["ledger"].items() if k != "wall_ns") > 0 for step in steps)
    assert [one for one in seen.of(0, "decision") if "bucket" in one["knob"]]
    switches = [[(s["decision"], s["epoch"], s["knobs"]["values"]) for s in seen.of(r, "switch")] for r in range(2)]
    assert switches[0] == switches[1]
    assert switches[0], "a decision is tried"


def test_a_trainer_script_that_ends_badly_ends_in_the_same_way(tmp_path: Path) -> None:
    bare, seen = run_both(
        TRAINER,
        "--end",
        "exit",
        ranks=1,
        watched=("--tune", "exact", "--run-dir", str(tmp_path)),
        python=adapters_python(),
        **OFFLINE,
    )
    assert (seen.code, lines(seen), seen.errors) == (3, lines(bare), bare.errors)
    (line,) = seen.pacecar
    assert line.endswith("on 1 ranks; tunes nothing: one rank has nothing to tune here")
