"""Plain loops under each of torch's data parallel wrappers, with `pacecar.attach` and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import compatibility

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.full]

Rank = dict[str, Any]

KINDS = {
    "ddp": ("plain loop, `DistributedDataParallel`", {"bucket_bytes"}),
    "fsdp2": ("loop like torchtitan's, `fully_shard`", {"fsdp_prefetch", "fsdp_reshard"}),
    "fsdp1": ("plain loop, `FullyShardedDataParallel`", set()),
}


@pytest.fixture(scope="module")
def jobs(run_job: Callable[..., list[list[Rank]]]) -> dict[str, list[Rank]]:
    """All jobs, one after the other in the same two processes."""
    wanted = [(kind, tune) for kind in KINDS for tune in (None, "exact")]
    answers = run_job("torch", "job_plain.py", [("train", {"kind": kind, "tune": tune}) for kind, tune in wanted])
    return {f"{kind} {tune}": ranks for (kind, tune), ranks in zip(wanted, answers, strict=True)}


@pytest.mark.parametrize("kind", KINDS)
def test_its_knobs_turn_while_it_trains_to_the_untuned_run_s_losses_and_weights(
    jobs: dict[str, list[Rank]], kind: str
) -> None:
    ranks, untuned = jobs[f"{kind} exact"], jobs[f"{kind} None"]
    assert KINDS[kind][1] <= set(compatibility.turned(ranks[0]["switches"]))
    assert ranks[0]["steps"] == 60
    for rank, plain in zip(ranks, untuned, strict=True):
        assert rank["history"] == pytest.approx(plain["history"], rel=1e-5)
        assert rank["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_says_what_ran(jobs: dict[str, list[Rank]], kind: str) -> None:
    answer = jobs[f"{kind} exact"][0]
    compatibility.ran(f"torch_{kind}", "torch", answer["version"], KINDS[kind][0], answer)


def test_fsdp1_is_measured_and_says_why_it_is_not_tuned(jobs: dict[str, list[Rank]]) -> None:
    answer = jobs["fsdp1 exact"][0]
    assert {"forward", "backward", "optimizer", "data_wait"} <= set(answer["measured"])
    assert "FSDP1" in answer["refused"]["fsdp_prefetch"]
