"""The baselines do what their originals do, behind our protocol, and leave a job alone when they must stop."""

from __future__ import annotations

import builtins
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from pacecar.config import ConfigError, TuneConfig
from pacecar.controller.baselines.doubling import DoublingSampler
from pacecar.controller.baselines.gaussian_process import (
    NOISE,
    SAMPLES_MAX,
    WARMUP_SAMPLES,
    GaussianProcessSampler,
    expected_improvement,
    fit,
)
from pacecar.controller.baselines.registry import make_baseline
from pacecar.controller.baselines.tpe import TRIALS
from pacecar.controller.observation import JobFacts, KnobSpace, Observation, TuningTurn
from pacecar.controller.policy.registry import make_policy
from pacecar.records import Decision, TunerStatus, Verdict

MIB = 2**20
SIZES = (4 * MIB, 8 * MIB, 16 * MIB, 25 * MIB, 32 * MIB, 64 * MIB)
BUCKET = KnobSpace("bucket_bytes", 25 * MIB, SIZES)
COMPRESSION = KnobSpace("compression", 0, (0, 1, 2))
NAMES = ("throughput-doubling", "gaussian-process", "tpe")


def _drive(
    name: str, steps: int, pace_ns: Any, *spaces: KnobSpace, holds: dict[int, tuple[str | None, bool]] | None = None
) -> tuple[list[Any], list[dict[str, int]]]:
    """Obey a baseline for so many steps; return its records and the values in force at each step."""
    policy = make_policy(TuneConfig(mode="lossy", policy=name))  # type: ignore[arg-type]
    spaces = spaces or (BUCKET,)
    policy.begin(JobFacts(job="job", world_size=2), spaces, mode="exact")
    values = {space.knob: space.value for space in spaces}
    records: list[Any] = []
    history = []
    for step in range(1, steps + 1):
        if holds and step in holds:
            reason, is_brief = holds[step]
            policy.hold(reason, is_brief=is_brief)
        history.append(dict(values))
        turn, said = policy.advance([Observation(step, step, dict(values), int(pace_ns(values, step)))])
        records += said
        if turn is not None:
            values = dict(turn.values)
    return records + policy.finish(), history


def _curve(values: dict[str, int], _: int) -> float:
    """Best at 8 MiB, and half as long with compression."""
    octaves = abs(math.log2(values["bucket_bytes"] / (8 * MIB)))
    return 1e8 * (1 + 0.08 * octaves) * (0.5 if values.get("compression") else 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_decision_has_one_verdict_and_the_story_is_told(name: str) -> None:
    records, _ = _drive(name, 2000, _curve, BUCKET, COMPRESSION)
    decisions = [r.decision for r in records if isinstance(r, Decision)]
    verdicts = [r.decision for r in records if isinstance(r, Verdict)]
    assert decisions == sorted(verdicts) == list(range(1, len(decisions) + 1))
    states = [r.state for r in records if isinstance(r, TunerStatus)]
    assert states[0] == "warming"
    assert "trial" in states


def test_horovods_search_takes_its_number_of_samples_and_ends_on_the_best() -> None:
    records, history = _drive("gaussian-process", 2000, _curve)
    assert history[11] == {"bucket_bytes": 4 * MIB}, "the first test point, also while warming up"
    first = [values["bucket_bytes"] // MIB for values in history[11 + 50 * WARMUP_SAMPLES :: 50]][:4]
    assert first == [4, 32, 16, 8]
    done = next(r for r in records if isinstance(r, TunerStatus) and r.state == "watching")
    assert done.step == pytest.approx(10 + 50 * (WARMUP_SAMPLES + SAMPLES_MAX + 1), abs=30)
    assert history[-1] == {"bucket_bytes": 8 * MIB}


def test_horovods_first_size_is_judged_once_after_its_warm_up_and_all_of_it_counts_as_trial() -> None:
    begun = 11
    records, _ = _drive("gaussian-process", begun + 50 * (WARMUP_SAMPLES + 2), _curve)
    first, second = [r for r in records if isinstance(r, Verdict)][:2]
    assert (first.decision, first.outcome) == (1, "kept"), "nothing was better yet"
    assert first.step == pytest.approx(begun + 50 * (WARMUP_SAMPLES + 1), abs=2)
    assert first.trial_steps == pytest.approx(50 * (WARMUP_SAMPLES + 1), abs=2)
    assert (second.decision, second.outcome) == (2, "rolled_back"), "32 MiB is slower than 4"
    assert second.step - first.step == pytest.approx(50, abs=2)


def test_horovods_choices_are_chained() -> None:
    _, history = _drive("gaussian-process", 3700, _curve, BUCKET, COMPRESSION)
    order = [values["compression"] for values in history]
    assert [order[i] for i in range(1, len(order)) if order[i] != order[i - 1]][:2] == [1, 2]
    assert history[-1]["compression"] in (1, 2)


def test_expected_improvement_is_the_published_formula() -> None:
    """One sample at 0 with height and length 1, by hand."""
    x, y, there = np.array([[0.0]]), np.array([1.0]), np.array([[1.0]])
    k, total = math.exp(-0.5), 1 + NOISE**2
    mean, sigma = k / total, math.sqrt(1 - k * k / total)
    gain = mean - 1 / total - 0.01
    z = gain / sigma
    by_hand = gain * 0.5 * math.erfc(-z / math.sqrt(2)) + sigma * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    assert expected_improvement(there, x, y, 1.0, 1.0)[0] == pytest.approx(by_hand)


def test_the_fitted_kernel_follows_the_length_of_the_function() -> None:
    x = np.arange(0.0, 64.0, 2.0)[:, None]
    long, _ = fit(x, 3 * np.sin(x[:, 0] / 20))
    short, _ = fit(x, 3 * np.sin(x[:, 0] / 2))
    assert long > short


def test_a_flat_job_does_not_break_the_process() -> None:
    sampler = GaussianProcessSampler()
    sampler.begin([BUCKET])
    for _ in range(WARMUP_SAMPLES + SAMPLES_MAX + 1):
        proposed = sampler.propose()
        assert proposed is not None
        sampler.tell(proposed, 1e8)
    assert sampler.propose() is None


def test_tpe_is_optunas_begins_with_the_present_setting_and_takes_twenty_trials() -> None:
    records, history = _drive("tpe", 1000, _curve)
    assert history[40] == {"bucket_bytes": 25 * MIB}
    done = next(r for r in records if isinstance(r, TunerStatus) and r.state == "watching")
    assert done.step <= 10 + TRIALS * 24
    assert history[-1] == {"bucket_bytes": 8 * MIB}


def test_tpe_without_optuna_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return whole(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'pacecar\[tpe\]'"):
        make_policy(TuneConfig(policy="tpe"))


def _told(sampler: DoublingSampler, *paces: float) -> list[int]:
    values = []
    for pace in paces:
        proposed = sampler.propose()
        assert proposed is not None
        values.append(next(iter(proposed.values())))
        sampler.tell(proposed, pace)
    return values


def test_doubling_keeps_a_worse_bucket_that_costs_less_than_ten_percent() -> None:
    sampler = DoublingSampler()
    sampler.begin([BUCKET])
    assert _told(sampler, 100, 108, 108, 108) == [25 * MIB, 64 * MIB, 64 * MIB, 64 * MIB]
    assert sampler.best == {"bucket_bytes": 64 * MIB}


def test_doubling_goes_back_and_forth_where_neighbours_differ_by_more() -> None:
    sampler = DoublingSampler()
    sampler.begin([BUCKET])
    assert [v // MIB for v in _told(sampler, 100, 140, 100, 140, 100)] == [25, 64, 32, 64, 32]


def test_doubling_keeps_the_batch_between_256_and_8192() -> None:
    sampler = DoublingSampler()
    sampler.begin([KnobSpace("batch_samples", 4096, tuple(2**k for k in range(6, 16)))])
    # The pace does not change, so every doubling doubles throughput.
    assert _told(sampler, 100, 100, 100, 100) == [4096, 8192, 8192, 8192]


def test_doubling_leaves_choices_alone() -> None:
    sampler = DoublingSampler()
    sampler.begin([COMPRESSION])
    assert sampler.propose() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_held_baseline_goes_back_and_goes_on_afterwards(name: str) -> None:
    records, history = _drive(name, 400, _curve, holds={60: ("rank 1 is late", False), 100: (None, False)})
    states = [(r.state, r.detail) for r in records if isinstance(r, TunerStatus)]
    assert ("frozen", "rank 1 is late") in states
    assert states[-1][0] != "frozen"
    away = {values["bucket_bytes"] for values in history[65:99]}
    assert len(away) == 1, "what was being tried is taken back, and nothing is tried"
    if name != "throughput-doubling":  # which has had its one push by then
        assert len({values["bucket_bytes"] for values in history[100:]}) > 1


@pytest.mark.parametrize("name", NAMES)
def test_absurd_steps_end_the_search_with_a_reason(name: str) -> None:
    records, history = _drive(name, 200, lambda values, step: -1 if step == 70 else 1e8)
    assert [r for r in records if isinstance(r, TunerStatus)][-1].state == "frozen"
    assert history[-1] == history[80]


def test_a_knob_that_the_ranks_lose_ends_the_search() -> None:
    policy = make_baseline(TuneConfig(policy="tpe"))
    policy.begin(JobFacts(job="job", world_size=2), [BUCKET, COMPRESSION], mode="exact")
    policy.advance([Observation(1, 1, {"bucket_bytes": 25 * MIB, "compression": 0}, 100)])
    turn, records = policy.advance([Observation(2, 2, {"bucket_bytes": 25 * MIB}, 100)])
    assert "compression cannot be turned any more" in records[-1].detail
    assert turn is None or turn == TuningTurn(0, {"bucket_bytes": 25 * MIB})


@pytest.mark.parametrize("name", NAMES)
def test_advice_turns_nothing(name: str) -> None:
    policy = make_policy(TuneConfig(mode="advise", policy=name))  # type: ignore[arg-type]
    policy.begin(JobFacts(job="job", world_size=2), [BUCKET], mode="advise")
    turn, records = policy.advance([Observation(i, i, {"bucket_bytes": 25 * MIB}, 100) for i in range(1, 60)])
    assert turn is None
    assert records[-1].state == "advising"


def test_our_own_policy_loads_no_baseline_and_none_loads_numpy_before_it_must() -> None:
    code = (
        "import sys, pacecar.controller.policy.registry as p\n"
        "from pacecar.config import TuneConfig as T; p.make_policy(T());"
        "assert not any('baselines' in m for m in sys.modules), 'baselines';"
        "p.make_policy(T(policy='gaussian-process')); assert 'numpy' not in sys.modules and 'optuna' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
