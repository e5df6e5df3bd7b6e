"""An arm is run again where the host took the processors, for no other reason, and the least disturbed run counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.bench import bench_tuning
from tests.bench.bench_tuning import PAUSE_SECONDS, STOLEN_MAX, Case, run_calmly, wait_for_calm
from tests.bench.tuning_figures import Run
from tests.shaping import Net

LOUD, CALM = 4 * STOLEN_MAX, STOLEN_MAX / 2


@pytest.mark.parametrize(
    ("stolen", "again", "count", "counts"),
    [
        ([CALM, LOUD], 2, 1, 0),
        ([LOUD, CALM, LOUD], 2, 2, 1),
        ([LOUD, 2 * LOUD, LOUD / 2, CALM], 2, 3, 2),
        ([LOUD, CALM], 0, 1, 0),
        ([None, CALM], 2, 1, 0),
    ],
)
def test_runs_until_the_host_is_calm(
    monkeypatch: pytest.MonkeyPatch, stolen: list[float | None], again: int, count: int, counts: int
) -> None:
    """Totals fall from run to run, so that choosing by pace would take the last."""
    taken: list[Run] = []

    def run(*_: Any) -> Run:
        number = len(taken)
        taken.append(Run("exact", [10.0 - number] * 4, stolen_ratio=stolen[number]))
        return taken[-1]

    monkeypatch.setattr(bench_tuning, "run_arm", run)
    monkeypatch.setattr(bench_tuning, "stolen_now", lambda: 0.0)
    chosen = run_calmly(cast("Net", None), Case.parse("deep@1000"), "exact", 4, 0, again=again, patience_seconds=0)
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


def test_what_others_take_is_a_share() -> None:
    assert 0.0 <= bench_tuning.stolen_now() <= 1.0
