"""A rank is killed, stopped or slowed under torchrun: the job ends, restarts or goes on as without pacecar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.forking_python import forking_python

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = Path(__file__).with_name("job_restart.py")


def run(
    folder: Path, what: str, tune: str, *more: str, restarts: int = 1, python: str = sys.executable
) -> dict[str, Any]:
    """Return each life's report by rank, how torchrun ended, and the seconds from the fault to the end."""
    folder.mkdir()
    ended = subprocess.run(
        [
            python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
            "--max-restarts", str(restarts), "--monitor-interval", "0.1", str(JOB), str(folder), what, tune, *more,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    told = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("life*.json"))}
    since = time.time() - float((folder / "fell").read_text()) if (folder / "fell").exists() else None
    return {"told": told, "code": ended.returncode, "err": ended.stderr, "seconds": since}


def losses(ended: dict[str, Any]) -> list[Any]:
    return [told["losses"] for told in ended["told"].values()]


def test_all_ranks_of_a_killed_one_are_started_anew_and_tuned_again(tmp_path: Path, fork_ranks: Any) -> None:
    tuned = run(tmp_path / "exact", "kill", "exact", python=forking_python())
    assert tuned["code"] == 0, tuned["err"][-3000:]
    assert list(tuned["told"]) == ["life1-rank0", "life1-rank1"]
    alone = tmp_path / "alone"
    alone.mkdir()
    fork_ranks("job_restart.py", 2, [str(alone), "none", "none"], {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert losses(tuned) == [json.loads(path.read_text())["losses"] for path in sorted(alone.glob("life*.json"))]
    for told in tuned["told"].values():
        assert told["frozen"] is None
        assert told["spaces"] > 0, "the new ranks met, and exchanged their offers"


@pytest.mark.soak
def test_a_rank_that_is_slower_from_some_step_on_changes_no_number(tmp_path: Path) -> None:
    tuned, alone = (run(tmp_path / tune, "slow", tune) for tune in ("exact", "none"))
    assert losses(tuned) == losses(alone)


@pytest.mark.soak
def test_a_rank_stopped_for_20_seconds_costs_20_seconds_and_no_number(tmp_path: Path) -> None:
    tuned, alone = (run(tmp_path / tune, "stop", tune, "20") for tune in ("exact", "none"))
    assert (tuned["code"], alone["code"]) == (0, 0), tuned["err"][-3000:]
    assert losses(tuned) == losses(alone)
    said = tuned["told"]["life0-rank0"]["said"]
    print(said)  # noqa: T201
    assert any(line.startswith("frozen: rank 0 may hang") for line in said)
    assert not said[-1].startswith("frozen"), "and it goes on"
    print(tuned["seconds"], alone["seconds"])  # noqa: T201
    assert tuned["seconds"] < alone["seconds"] + 10


@pytest.mark.soak
def test_a_killed_rank_that_is_not_started_anew_ends_the_job_as_without_pacecar(tmp_path: Path) -> None:
    tuned, alone = (run(tmp_path / tune, "kill", tune, restarts=0) for tune in ("exact", "none"))
    print(tuned["seconds"], alone["seconds"])  # noqa: T201
    assert tuned["code"] == alone["code"] != 0
    assert tuned["seconds"] < alone["seconds"] + 10
    assert "SIGKILL" in tuned["err"]
    assert "SIGKILL" in alone["err"]
