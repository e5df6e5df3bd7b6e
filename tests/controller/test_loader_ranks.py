"""Tuning finds the workers of a real job that waits for its data, on both ranks, and changes nothing that it learns."""

from __future__ import annotations

from statistics import quantiles
from typing import Any

import pytest

from tests.controller.run_on import RESTED

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB: dict[str, Any] = {"epoch": 150, "seconds": 0.01, "workers": 1}
"""A step is 40 ms of waiting for its data, with one worker, and 5 ms of work."""


def run(run_ranks: Any, steps: int, **options: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return what the ranks said of the job untuned, tuned until a change was kept, and untuned without waiting."""
    job = {**JOB, **options}
    jobs: list[dict[str, Any]] = [
        {**job, "tune": "off", "steps": 30},
        {**job, "tune": "exact", "steps": steps, "until": ["kept"]},
        {**job, "tune": "off", "as_long": True, "seconds": 0.0, "workers": 0},
    ]
    plain, tuned, reference = run_ranks("job_loader.py", 2, jobs)
    return plain, tuned, reference


def speedup(plain: list[Any], tuned: list[Any]) -> float:
    """Of the end of the run.  The faster quarter of the steps is compared: others who take of the machine only slow."""
    steps = len(tuned[0]["walls"])
    before, after = quantiles(plain[0]["walls"])[0], quantiles(tuned[0]["walls"][-RESTED:])[0]
    total = before * steps / sum(tuned[0]["walls"])
    print(  # noqa: T201  with -s: the figure
        f"{before * 1e3:.1f} -> {after * 1e3:.1f} ms a step: {before / after:.2f} times,"
        f" {total:.2f} times in all of {steps} steps, {tuned[0]['knobs']}"
    )
    return before / after


def test_a_job_that_waits_for_its_data_becomes_faster_and_trains_on_the_same_batches_to_the_last_bit(
    run_ranks: Any,
) -> None:
    plain, tuned, reference = run(run_ranks, 60, counted=True)
    assert [rank["seen"] for rank in tuned] == [rank["seen"] for rank in reference]
    assert [rank["weights"] for rank in tuned] == [rank["weights"] for rank in reference]
    assert tuned[0]["knobs"] == tuned[1]["knobs"]
    assert tuned[0]["knobs"]["loader_workers"] > JOB["workers"], tuned[0]["verdicts"]
    assert ["loader_workers", "kept"] in [verdict[:2] for verdict in tuned[0]["verdicts"]]
    assert speedup(plain, tuned) >= 1.3, tuned[0]["detail"]


@pytest.mark.full
@pytest.mark.alone
def test_a_job_that_really_waits_becomes_faster(run_ranks: Any) -> None:
    plain, tuned, reference = run(run_ranks, 220)
    assert [rank["seen"] for rank in tuned] == [rank["seen"] for rank in reference]
    assert speedup(plain, tuned) >= 1.3, tuned[0]["detail"]
