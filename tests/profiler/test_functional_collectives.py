"""Communication of functional collectives, which a DTensor begins and waits for inside ATen's own operators."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.trace.reader import read_trace
from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = Path(__file__).with_name("job_tensor_parallel.py")

LATE_SECONDS = 0.1
"""Much more than a step of the job computes."""

WAITED_NS_MIN = LATE_SECONDS * 1e9 / 8
"""On a busy machine the rank that waits comes late itself.  Written down as compute the waiting left 0.2 ms of this."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    said = run_ranks([JOB, "30", str(LATE_SECONDS)], 2, environ={"JOB_FOLDER": str(folder)})
    return [json.loads(line.strip().splitlines()[-1]) for line in said]


def test_a_rank_that_waits_for_a_late_one_in_a_dtensors_operator_does_not_compute_meanwhile(ranks) -> None:
    """Such waiting, most of the step, was written down as compute that hides the communication."""
    windows = ranks[0]["windows"]
    assert len(windows) >= 3
    assert statistics.median(window["exposed"] for window in windows) >= WAITED_NS_MIN
    assert all(window["compute"] + window["exposed"] <= window["wall"] for window in windows)


def test_a_trace_of_the_same_job_says_the_same_as_the_windows(ranks) -> None:
    trace = read_trace(Path(ranks[0]["trace"]))
    assert any(name.startswith("_c10d_functional::wait_tensor") for name in trace.names)
    report = analyze_trace(trace)
    traced = statistics.median(step.ledger.exposed_communication_ns for step in report.steps)
    assert traced >= WAITED_NS_MIN
