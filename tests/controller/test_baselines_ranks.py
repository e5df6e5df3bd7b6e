"""Every baseline turns a real job's knob, on both ranks at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

POLICIES = ("throughput-doubling", "gaussian-process", "tpe")


@pytest.fixture(scope="module")
def jobs(run_ranks: Callable[..., list[list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    options = [{"policy": name, "steps": 160, "bytes_min": 65536} for name in POLICIES]
    return dict(zip(POLICIES, run_ranks("job_baseline.py", 2, options), strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_a_baseline_tunes_a_real_job(jobs: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, two = jobs[name]
    assert one["values"] == two["values"]
    assert len(set(one["values"])) > 1, "it has turned the knob"
    assert one["weights"] == two["weights"]
    assert one["state"] in ("trial", "watching")
