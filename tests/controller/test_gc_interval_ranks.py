"""Scheduled garbage collections in a real job that holds a million objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.alone]

ROOT = Path(__file__).parents[2]

JOBS: list[dict[str, Any]] = [{"pairs": 4}, {"tune": True}]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Each job's answer of each rank; in processes of their own, because a forked one has frozen its objects."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("job_gc_interval.py")), json.dumps(JOBS)],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "STORE": str(store), "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        answers = [json.loads(rank.communicate(timeout=300)[0].strip().splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [list(answer) for answer in zip(*answers, strict=True)]


def test_a_job_with_a_million_objects_is_faster_with_scheduled_collections(jobs: list[list[dict[str, Any]]]) -> None:
    for rank in jobs[0]:
        assert rank["refused"] is None
        assert rank["is_undone"]
        without, with_it = rank["seconds"]["A"], rank["seconds"]["B"]
        assert all(b < a for a, b in zip(without, with_it, strict=True))
        assert fmean(with_it) < 0.9 * fmean(without)


def test_the_tuner_finds_it_and_the_losses_are_equal_to_the_bit(jobs: list[list[dict[str, Any]]]) -> None:
    tuned, plain = ([rank[mode] for rank in jobs[1]] for mode in ("exact", "off"))
    seen = tuned[0]["verdicts"], tuned[0]["status"]
    for rank, other in zip(tuned, plain, strict=True):
        assert rank["refused"] == {}
        assert rank["losses"] == other["losses"]
        assert rank["are_thresholds_back"], "closing gives the collector back"
    assert tuned[0]["values"] == tuned[1]["values"], "all ranks switch at the same steps"
    kept = [verdict for verdict in tuned[0]["verdicts"] if verdict[0] == "kept"]
    assert kept, seen
    assert kept[0][1] > 0.01
    assert tuned[0]["values"][-1] > 0, seen
    assert sum(a != b for a, b in pairwise(tuned[0]["values"])) >= 3, "it went to and fro"
    assert {None, 0} >= {rank["values"][-1] for rank in plain}, "nothing is turned where tuning is off"
