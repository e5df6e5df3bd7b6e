"""Every sampler policy turns a real job's knob on both ranks at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.baselines import BASELINES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

POLICIES = ("throughput-doubling", *BASELINES)
"""The baselines last, for the processes run one job after the other, and what `tune_by` says stays."""


@pytest.fixture(scope="module")
def jobs(run_ranks: Callable[..., list[list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    options = [{"policy": name, "steps": 160, "bytes_min": 65536} for name in POLICIES]
    return dict(zip(POLICIES, run_ranks("job_sampler_policy.py", 2, options), strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_it_tunes_a_real_job(jobs: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, two = jobs[name]
    assert one["values"] == two["values"]
    assert one["reasons"]
    assert all(reason.endswith(f" of {name}") for reason in one["reasons"]), "it is the policy that was asked for"
    assert len(set(one["values"])) > 1, "it has turned the knob"
    assert one["weights"] == two["weights"]
    assert one["state"] in ("trial", "watching")
