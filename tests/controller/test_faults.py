"""Faults at random points of real jobs: ranks never disagree, losses never differ, nothing hangs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.forking_python import forking_python

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FAULTS = Path(__file__).with_name("faults.py")


def run(points: int, seed: int, mode: str = "tuned", *, seconds: float = 120) -> dict[str, Any]:
    """Return the figures; the harness ends its own processes."""
    ended = subprocess.run(
        [forking_python(), str(FAULTS), "--points", str(points), "--seed", str(seed), "--mode", mode],
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert ended.stdout, ended.stderr[-3000:]
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def test_ten_faults_at_random_points_leave_no_ranks_that_disagree() -> None:
    figures = run(10, seed=7)
    assert figures["wrong"] == []
    assert figures["points"] == 10
    assert figures["switches"] > 10


@pytest.mark.full
def test_a_switch_that_is_not_taken_back_everywhere_is_seen_by_the_harness() -> None:
    assert any("ranks disagree" in wrong for wrong in run(4, seed=5, mode="broken")["wrong"])


@pytest.mark.soak
def test_500_faults() -> None:
    figures = run(500, seed=11, seconds=3600)
    print(json.dumps(figures, indent=1))  # noqa: T201  the figures
    assert figures["wrong"] == []


@pytest.mark.soak
def test_a_kill_ends_the_others_as_it_does_without_a_tuner() -> None:
    tuned, alone = (run(20, seed=3, mode=mode, seconds=900) for mode in ("killed", "alone"))
    print(json.dumps([tuned, alone], indent=1))  # noqa: T201  the figures
    assert tuned["wrong"] == alone["wrong"] == []
    assert tuned["killed"] == alone["killed"] == 20
