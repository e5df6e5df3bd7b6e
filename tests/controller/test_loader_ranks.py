"""Tuning finds the workers of a real job that waits for its data, on both ranks, and changes nothing that it learns."""

from __future__ import annotations

from statistics import quantiles
from typing import Any

import pytest

from tests.controller.run_on import RESTED

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 220


def test_a_job_that_waits_for_its_data_becomes_faster_and_trains_on_the_same_batches_to_the_last_bit(
    run_ranks: Any,
) -> None:
    """A step is some 40 ms of waiting for its data and 5 ms of work.

    The faster quarter of the steps is compared: what others take of the machine slows steps down, not both runs alike.
    """
    job: dict[str, Any] = {"steps": STEPS, "epoch": 150, "seconds": 0.01, "workers": 1}
    tuned_job = {**job, "tune": "exact", "until": ["kept"]}
    reference_job = {**job, "tune": "off", "as_long": True, "seconds": 0.0, "workers": 0}
    plain, tuned, reference = run_ranks(
        "job_loader.py", 2, [{**job, "tune": "off", "steps": 30}, tuned_job, reference_job]
    )
    assert [rank["seen"] for rank in tuned] == [rank["seen"] for rank in reference]
    assert [rank["weights"] for rank in tuned] == [rank["weights"] for rank in reference]
    assert tuned[0]["knobs"] == tuned[1]["knobs"]
    steps = len(tuned[0]["walls"])
    before, after = quantiles(plain[0]["walls"])[0], quantiles(tuned[0]["walls"][-RESTED:])[0]
    total = before * steps / sum(tuned[0]["walls"])
    print(  # noqa: T201  with -s: the figure
        f"{before * 1e3:.1f} -> {after * 1e3:.1f} ms a step: {before / after:.2f} times,"
        f" {total:.2f} times in all of {steps} steps, {tuned[0]['knobs']}"
    )
    assert before / after >= 1.3, tuned[0]["detail"]
