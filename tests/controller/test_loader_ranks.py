"""Tuning finds the workers of a real job that waits for its data, on both ranks, and changes nothing that it learns."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 280


def test_a_job_that_waits_for_its_data_becomes_faster_and_trains_on_the_same_batches_to_the_last_bit(
    run_ranks: Any,
) -> None:
    job: dict[str, Any] = {"steps": STEPS, "epoch": 150, "seconds": 0.01, "workers": 1}
    jobs = [{**job, "steps": 30}, {**job}, {**job, "seconds": 0.0, "workers": 0}]
    for options, tune in zip(jobs, ("off", "exact", "off"), strict=True):
        options["tune"] = tune
    plain, tuned, reference = run_ranks("job_loader.py", 2, jobs)
    assert [rank["seen"] for rank in tuned] == [rank["seen"] for rank in reference]
    assert [rank["weights"] for rank in tuned] == [rank["weights"] for rank in reference]
    assert tuned[0]["knobs"] == tuned[1]["knobs"]
    before, after = median(plain[0]["walls"]), median(tuned[0]["walls"][-60:])
    total = median(plain[0]["walls"]) * STEPS / sum(tuned[0]["walls"])
    print(  # noqa: T201  with -s: the figure
        f"{before * 1e3:.1f} -> {after * 1e3:.1f} ms a step: {before / after:.2f} times,"
        f" {total:.2f} times in all, {tuned[0]['knobs']}"
    )
    assert before / after >= 1.3, tuned[0]["detail"]
