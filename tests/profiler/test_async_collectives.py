"""A profiler's session of ours that ends while a collective of the job is out costs the job nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = Path(__file__).parent / "job_async_collective.py"


def test_a_plain_session_may_end_while_a_collective_is_out() -> None:
    """With annotations a rank dies of signal 11 after some 200 sessions (`job_async_collective.py annotated 3000`)."""
    said = run_ranks([JOB, "plain", "500"], 2)
    assert [int(line) >= 500 * 20 for line in said] == [True, True], "the operators were seen"


@pytest.mark.parametrize("steps", [200, pytest.param(3000, marks=pytest.mark.full)])
def test_a_window_is_read_a_step_late_where_collectives_may_be_out(steps: int) -> None:
    """Read where its step ends, a rank dies of signal 11 or reads rubbish in 3000 steps; 200 show when it is read."""
    said = run_ranks([JOB, "attached", str(steps)], 2)
    assert [int(line) >= steps // 12 for line in said] == [True, True], "windows were taken all the time"
