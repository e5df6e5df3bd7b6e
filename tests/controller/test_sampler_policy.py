"""A sampler policy leaves a job alone when it must stop, with any sampler; doubling does what articles say of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.baselines import BASELINES, make_baseline
from pacecar.config import TuneConfig
from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Proposal
from pacecar.controller.policy.throughput_doubling import DoublingSampler
from pacecar.records import Decision, TunerStatus, Verdict
from tests.controller.obedient_job import BUCKET, COMPRESSION, MIB, curve, drive
from tests.controller.replay import make

NAMES = ("throughput-doubling", *BASELINES)
CONFIG = TuneConfig(mode="lossy")


@pytest.mark.parametrize("name", NAMES)
def test_every_decision_has_one_verdict_and_the_story_is_told(name: str) -> None:
    records, _ = drive(make(name, CONFIG), 2000, curve, BUCKET, COMPRESSION)
    decisions = [r.decision for r in records if isinstance(r, Decision)]
    verdicts = [r.decision for r in records if isinstance(r, Verdict)]
    assert decisions == sorted(verdicts) == list(range(1, len(decisions) + 1))
    states = [r.state for r in records if isinstance(r, TunerStatus)]
    assert states[0] == "warming"
    assert "trial" in states


@pytest.mark.parametrize("name", NAMES)
def test_a_held_search_goes_back_and_goes_on_afterwards(name: str) -> None:
    records, history = drive(make(name, CONFIG), 400, curve, holds={60: ("rank 1 is late", False), 100: (None, False)})
    states = [(r.state, r.detail) for r in records if isinstance(r, TunerStatus)]
    assert ("frozen", "rank 1 is late") in states
    assert states[-1][0] != "frozen"
    away = {values["bucket_bytes"] for values in history[65:99]}
    assert len(away) == 1, "what was being tried is taken back, and nothing is tried"
    if name != "throughput-doubling":  # which has had its one push by then
        assert len({values["bucket_bytes"] for values in history[100:]}) > 1


@pytest.mark.parametrize("name", NAMES)
def test_absurd_steps_end_the_search_with_a_reason(name: str) -> None:
    records, history = drive(make(name, CONFIG), 200, lambda values, step: -1 if step == 70 else 1e8)
    assert [r for r in records if isinstance(r, TunerStatus)][-1].state == "frozen"
    assert history[-1] == history[80]


def test_a_knob_that_the_ranks_lose_ends_the_search() -> None:
    policy = make_baseline("tpe", TuneConfig())
    policy.begin(JobFacts(job="job", world_size=2), [BUCKET, COMPRESSION], turns_knobs=True)
    policy.advance([Observation(1, 1, {"bucket_bytes": 25 * MIB, "compression": 0}, 100)])
    turn, records = policy.advance([Observation(2, 2, {"bucket_bytes": 25 * MIB}, 100)])
    assert "compression can no longer be turned" in records[-1].detail
    assert turn is None or turn == Proposal(0, {"bucket_bytes": 25 * MIB})


@pytest.mark.parametrize("name", NAMES)
def test_advice_turns_nothing(name: str) -> None:
    policy = make(name, TuneConfig(mode="advise"))
    policy.begin(JobFacts(job="job", world_size=2), [BUCKET], turns_knobs=False)
    turn, records = policy.advance([Observation(i, i, {"bucket_bytes": 25 * MIB}, 100) for i in range(1, 60)])
    assert turn is None
    assert records[-1].state == "advising"


@pytest.mark.slow
def test_our_own_policy_loads_no_other_and_none_loads_numpy() -> None:
    code = (
        "import sys, pacecar.controller.policy.tuning_policy as p\n"
        "from pacecar.config import TuneConfig as T; p.make_policy(T());"
        "assert not any('sampler' in m for m in sys.modules), 'sampler_policy';"
        "p.make_policy(T(policy='throughput-doubling')); assert any('sampler' in m for m in sys.modules);"
        "assert 'numpy' not in sys.modules and 'optuna' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _told(sampler: DoublingSampler, *paces: float) -> list[int]:
    values = []
    for pace in paces:
        proposed = sampler.propose()
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
