"""A loop under Ray Train: two workers of a local Ray, each of which trains without pacecar and then with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import compatibility
from world import adapters_python, environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.full]

RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"}

Rank = dict[str, Any]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Rank], list[Rank], Path]:
    """What the workers said of the untuned and of the tuned training, and the folder."""
    folder = tmp_path_factory.mktemp("ray")
    done = subprocess.run(
        [adapters_python(), str(Path(__file__).with_name("job_ray.py")), str(folder)],
        env=environment(**RAY),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,  # against hangs; on a busy machine it took 280
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    untuned, tuned = zip(*(json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)), strict=True)
    return list(untuned), list(tuned), folder


def test_buckets_turn_while_it_trains_to_the_untuned_run_s_losses_and_weights(
    job: tuple[list[Rank], list[Rank], Path],
) -> None:
    untuned, tuned, _ = job
    assert "bucket_bytes" in compatibility.turned(tuned[0]["switches"])
    for rank, plain in zip(tuned, untuned, strict=True):
        assert rank["steps"] == 60
        assert rank["models_agree"]
        assert rank["history"] == pytest.approx(plain["history"], rel=1e-4)
        assert rank["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-5)


def test_the_job_has_the_name_of_rays_run_and_each_worker_its_rank(job: tuple[list[Rank], list[Rank], Path]) -> None:
    hellos = [json.loads((job[2] / "run" / f"rank{rank}.jsonl").read_text().splitlines()[0]) for rank in range(2)]
    assert [hello["job"] for hello in hellos] == ["sums"] * 2
    assert [hello["rank"] for hello in hellos] == [0, 1]


def test_the_loader_is_rays_own_and_stays(job: tuple[list[Rank], list[Rank], Path]) -> None:
    answer = job[1][0]
    assert "_WrappedDataLoader" in answer["refused"]["loader_workers"]
    assert {"data_wait", "forward", "backward", "optimizer"} <= set(answer["measured"])


def test_outside_a_worker_of_ray_it_is_an_error(job: tuple[list[Rank], list[Rank], Path]) -> None:
    assert "outside of a Ray Train training function" in (job[2] / "outside").read_text()


def test_the_example_runs_and_says_what_it_did(job: tuple[list[Rank], list[Rank], Path]) -> None:
    said = (job[2] / "example").read_text()
    assert "knobs at the end {" in said
    assert "bucket_bytes" in said


def test_the_table_says_what_ran(job: tuple[list[Rank], list[Rank], Path]) -> None:
    answer = job[1][0]
    compatibility.ran("ray", "ray", answer["version"], "Ray Train's `TorchTrainer`, DDP", answer)
