"""An arm is run again where the host took the processors, for no other reason, and the least disturbed run counts.

A sweep runs a disturbed stretch again on all ranks, by what rank 0 saw.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import bench_tuning, tuning_job
from bench.bench_tuning import DISTURBED_MAX, PAUSE_SECONDS, Case, run_calmly, wait_for_calm
from bench.tuning_figures import STOLEN_MAX, Run
from tests.kit.shaping import Net

LOUD, CALM = 4 * STOLEN_MAX, STOLEN_MAX / 2


@pytest.mark.parametrize(
    ("disturbed", "again", "count", "counts"),
    [
        ([0, 90], 2, 1, 0),
        ([100 * DISTURBED_MAX, 0], 2, 1, 0),
        ([90, 0, 90], 2, 2, 1),
        ([80, 90, 70, 0], 2, 3, 2),
        ([90, 0], 0, 1, 0),
    ],
)
def test_runs_until_the_host_is_calm(
    monkeypatch: pytest.MonkeyPatch, disturbed: list[float], again: int, count: int, counts: int
) -> None:
    """Totals fall from run to run, so that choosing by pace would take the last."""
    taken: list[Run] = []

    def run(*_: Any) -> Run:
        number = len(taken)
        shares = [LOUD if step < disturbed[number] else CALM for step in range(100)]
        taken.append(Run("exact", [10.0 - number] * 100, stolen_ratio=LOUD, stolen=shares))
        return taken[-1]

    monkeypatch.setattr(bench_tuning, "run_arm", run)
    monkeypatch.setattr(bench_tuning, "stolen_now", lambda: 0.0)
    chosen = run_calmly(cast("Net", None), Case.parse("deep@1000"), "exact", 100, 0, again=again, patience_seconds=0)
    assert len(taken) == count
    assert chosen is taken[counts]


@pytest.mark.parametrize(("stolen", "pauses"), [([CALM], 0), ([LOUD, LOUD, CALM], 2), ([LOUD] * 20, 5), ([0.0], 0)])
def test_a_run_begins_when_the_host_is_calm_or_patience_is_over(
    monkeypatch: pytest.MonkeyPatch, stolen: list[float], pauses: int
) -> None:
    now, looks = [0.0], iter(stolen)
    monkeypatch.setattr(bench_tuning, "stolen_now", lambda: next(looks))
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(bench_tuning, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    wait_for_calm(5 * PAUSE_SECONDS)
    assert now[0] == pauses * PAUSE_SECONDS


@pytest.mark.slow
def test_what_others_take_is_a_share() -> None:
    assert 0.0 <= bench_tuning.stolen_now() <= 1.0


@pytest.mark.parametrize(
    ("loud", "again", "kept", "pauses"),
    [([], 3, 0, 0), ([0, 1], 3, 2, 2), ([0, 1, 2], 2, 1, 3), ([0], 0, 0, 1)],
)
def test_a_sweep_runs_a_disturbed_stretch_again(
    monkeypatch: pytest.MonkeyPatch, loud: list[int], again: int, kept: int, pauses: int
) -> None:
    """One setting, a stretch of 2 + 3 steps; the shares of loud stretches fall, then rise."""
    shares, slept = [4 * LOUD, LOUD, 2 * LOUD], list[float]()

    class Job:
        def __init__(self, _given: dict[str, Any]) -> None:
            self.model = None
            self.walls: list[float] = []
            self.stolen: list[float] = []

        def step(self) -> None:
            stretch = (len(self.walls) - 3) // 5
            self.walls.append(float(stretch))
            self.stolen.append(shares[stretch] if stretch in loud else CALM)

    reducer = SimpleNamespace(
        refusal=lambda: None, prepare=lambda: None, plan=SimpleNamespace(bucket_bytes=1), request=lambda **_: None
    )
    monkeypatch.setattr(tuning_job, "Job", Job)
    monkeypatch.setattr("pacecar.controller.knobs.ddp.reducer.DdpReducer", lambda _: reducer)
    monkeypatch.setattr(tuning_job, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(tuning_job.dist, "broadcast", lambda *_: None)
    said = tuning_job.sweep({"sweep": [[1, None]], "rounds": 1, "steps": 3, "again": again})
    assert said == {"sweep": [[[float(kept)] * 3]], "repeated": min(len(loud), again)}
    assert slept == [tuning_job.PAUSE_SECONDS] * pauses
