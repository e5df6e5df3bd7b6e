"""The knobs that need more than one setting of torch, turned on a GPU by the jobs of their tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.controller.job_checkpointed_blocks import BLOCKS
from tests.gpu.conftest import Figures
from tests.gpu.jobs import run_json

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

Jobs = Callable[..., list[Any]]


@pytest.fixture
def jobs(device: torch.device, tmp_path: Path) -> Jobs:
    """Return a function that runs jobs of a script of tests/controller on `device`: what rank 0 said of each."""

    def run(script: str, ranks: int, *options: dict[str, Any]) -> list[Any]:
        environ = {"STORE": str(tmp_path / "store"), "JOB_DEVICE": str(device), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        found: Any = run_json(
            f"tests.controller.{script}", json.dumps(options), seconds=150, ranks=ranks, environ=environ,
            may_fork=script != "job_gc_interval",
        )  # fmt: skip
        os.unlink(tmp_path / "store")
        return list(found)

    return run


def gains(seconds: dict[str, list[float]]) -> list[float]:
    """Return what each block B saves of the block A beside it."""
    return [1 - b / a for a, b in zip(seconds["A"], seconds["B"], strict=True)]


@pytest.mark.full
@pytest.mark.exclusive
def test_checkpointed_blocks(jobs: Jobs, is_real: bool, figures: Figures) -> None:
    """Activations that blocks keep take the memory estimated; losses and gradients stay the same to the bit."""
    measured, turned, untouched = jobs(
        "job_checkpointed_blocks", 1, {"pairs": 4}, *({"kind": "wrapped", "is_turned": one} for one in (True, False))
    )
    assert measured["refused"] is None
    held = dict(measured["held"])
    more, estimate = (held[0][i] - held[BLOCKS][i] for i in (0, 1))
    figures(gain=median(gains(measured["seconds"])), forecast=measured["expected"], kept_mib=more / 2**20,
            estimated_mib=estimate / 2**20)  # fmt: skip
    assert turned["refused"] is None
    assert turned["seen"] == untouched["seen"]
    if is_real:
        assert more == pytest.approx(estimate, rel=0.05)


@pytest.mark.full
@pytest.mark.exclusive
def test_fsdp_reshard(jobs: Jobs, figures: Figures) -> None:
    """FSDP2's blocks hold the bytes estimated where they keep their parameters; losses stay the same to the bit."""
    (found,) = jobs("job_fsdp_gain", 1, {"pairs": 4, "block_steps": 5})
    assert found["refused"] is None
    figures(gain=median(gains(found["seconds"])), estimated_mib=found["estimate"] / 2**20)
    assert found["estimate"] > 0
    assert found["beside_estimate"] == [0]
    assert found["is_equal"]


@pytest.mark.full
@pytest.mark.exclusive
def test_gc_interval(jobs: Jobs, is_real: bool, figures: Figures) -> None:
    """Collections at step boundaries spare a job with a million objects the long ones, and are undone."""
    (found,) = jobs("job_gc_interval", 2, {"pairs": 2})
    assert found["refused"] is None
    figures(gain=median(gains(found["seconds"])), automatic_ms=1e3 * median(found["seconds"]["A"]))
    assert found["is_undone"]
    if is_real:
        assert min(gains(found["seconds"])) > 0


@pytest.mark.full
@pytest.mark.exclusive
def test_work_share(jobs: Jobs, figures: Figures) -> None:
    """Samples of a rank at half speed move to the other by the device's times; the mean losses stay the same."""
    job = {"seconds": 0.001, "batch": 32, "tail": 0, "steps": 280}
    turns, plain = jobs("job_work_share", 2, {**job, "tune": "exact", "by_hand": True}, {**job, "tune": "off"})
    assert turns["refused"] == {}
    even, unequal = (median(turns["paces"][kind]) * 1e3 for kind in ("even", "unequal"))
    figures(even_ms=even, unequal_ms=unequal, largest_share=max(turns["sizes"]))
    assert unequal < even
    assert turns["agree"]
    assert turns["losses"] == pytest.approx(plain["losses"], abs=1e-5)
