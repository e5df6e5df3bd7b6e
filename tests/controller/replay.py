"""Replays recorded curves as a job, to compare policies on the very same steps.

The step time of the setting in force comes from a curve, with noise, the delay from a proposal to its effect, and slow
first steps after a switch.  The noise of step i is the same for every policy and for the untuned job, so totals compare
step by step.  Unlike in a real job no switch fails, there is one rank, and memory is unlimited.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from bench.baselines import BASELINES, make_baseline
from pacecar.config import TuneConfig
from pacecar.controller.forecast.gradient_readiness import ready_ns
from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Policy
from pacecar.controller.policy.tuning_policy import make_policy
from pacecar.records import BackwardWindow, Decision, Ledger, Verdict
from tests.controller.curves import Curve, load

PERIOD_STEPS = 4
LATENCY_STEPS = (4, 12)
"""From a proposal to its effect, as in the agreement."""

TRANSIENT = (1.10, 1.05)
"""Slowdown of the first steps after a switch (TUNING: V3 costs 4 to 5 % on each of two; one is doubled here)."""

WINDOW_STEPS = 50
SLOW_RATIO = 1.2
REDUCE_NOISE = 0.10
LATE_RATIO = 0.01
"""In a window each all-reduce is off by REDUCE_NOISE, and the first waits for a late rank, for LATE_RATIO of backward
on average (measured over gloo at 1 Gbit/s: 1 and 7 %)."""

POLICIES = ("throughput-doubling", *BASELINES, "pacecar")


@dataclass(frozen=True)
class Case:
    """Curves in force one after the other, in equal parts of the run."""

    name: str
    curves: tuple[Curve, ...]


@dataclass
class Run:
    """What one policy did with one job."""

    total_ns: float = 0.0
    alone_ns: float = 0.0
    end_ratio: float = 1.0
    trial_steps: int = 0
    slow_steps: int = 0
    slowest_ratio: float = 1.0
    kept: int = 0
    judged: int = 0
    null_kept: int = 0
    null_judged: int = 0
    forecasts: list[tuple[float, float | None, float]] = field(default_factory=list)
    """Expected gain, its standard error, and the true gain."""
    detail: str = ""

    @property
    def saved_ratio(self) -> float:
        return self.total_ns / self.alone_ns - 1


def noise(level: float, steps: int, seed: int) -> list[float]:
    """Factors on step time: 70 % of the variance white, 30 % correlated over about 20 steps; 1 step in 100 a spike.

    A spike takes 1.3 to 3 times as long: a garbage collection, a flush, a neighbour.
    """
    draw = random.Random(f"noise {seed}")
    keep = math.exp(-1 / 20)
    slow, white = level * math.sqrt(0.3), level * math.sqrt(0.7)
    drift, factors = draw.gauss(0.0, slow), []
    for _ in range(steps):
        drift = keep * drift + math.sqrt(1 - keep * keep) * draw.gauss(0.0, slow)
        spike = 1.3 + draw.expovariate(1 / 0.4) if draw.random() < 0.01 else 1.0
        factors.append(math.exp(drift + draw.gauss(0.0, white)) * min(spike, 3.0))
    return factors


def cases(curves: Sequence[Curve]) -> list[Case]:
    """Every curve in exact mode, also with compression if it has any, and links that change half way."""
    exact, lossy = [], []
    for curve in curves:
        if "compression" in curve.start:
            exact.append(Case(curve.name, (curve.only("compression", 0),)))
            lossy.append(Case(curve.name + ", lossy", (curve,)))
        else:
            exact.append(Case(curve.name, (curve,)))
    named = {case.name: case.curves[0] for case in exact}
    near, far = "1 Gbit/s, 40 layers 42 M", "1 Gbit/s 5 ms, 40 layers 42 M"
    changes = [
        Case(f"{one} > {other}", (named[one], named[other]))
        for one, other in ((near, far), (far, near), ("unlimited, 40 layers 42 M", near))
        if one in named and other in named
    ]
    return [*exact, *changes, *lossy]


def all_cases() -> list[Case]:
    return cases(load()[1])


def make(name: str, config: TuneConfig, seed: int = 0) -> Policy:
    if name in BASELINES:
        return make_baseline(name, config, seed=seed)
    return make_policy(msgspec.structs.replace(config, policy=name))


def _backward(curve: Curve, values: dict[str, int], draw: random.Random) -> BackwardWindow | None:
    """Return what a window shows of one backward, noise included."""
    point = curve.at(values)
    backward_ns = curve.backward_ns if point.backward_ns is None else point.backward_ns
    if backward_ns is None or point.alpha_ns is None or point.ns_per_byte is None:
        return None
    buckets, spans = curve.buckets(values), []
    free = 0.0
    for size, ready in zip(buckets, ready_ns(curve.readiness, buckets, backward_ns), strict=True):
        start = max(free, ready)
        late = 0.0 if spans else draw.expovariate(1.0) * LATE_RATIO * backward_ns
        free = start + late + (point.alpha_ns + size * point.ns_per_byte) * math.exp(draw.gauss(0.0, REDUCE_NOISE))
        spans.append((round(start), round(free)))
    return BackwardWindow(work_ns=backward_ns, reduces=tuple(spans))


def _observe(
    step: int, values: dict[str, int], pace_ns: int, curve: Curve, since_switch: int, draw: random.Random
) -> Observation:
    """Return what the policy sees of a step; every fiftieth, and one after each switch, is a profiled window."""
    seen = Observation(step=step, wall_ns=step, values=values, pace_ns=pace_ns)
    if step % WINDOW_STEPS and since_switch != 5:
        return seen
    point = curve.at(values)
    if point.exposed_ns is None or point.communication_ns is None:
        return seen
    scale = pace_ns / point.step_ns
    exposed, communication = int(point.exposed_ns * scale), int(point.communication_ns * scale)
    ledger = Ledger(
        wall_ns=pace_ns,
        compute_ns=pace_ns - exposed,
        exposed_communication_ns=exposed,
        communication_ns=communication,
        overlapped_communication_ns=communication - exposed,
    )
    return replace(seen, profiled=True, ledger=ledger, exact=True, backward=_backward(curve, values, draw))


def run(
    case: Case,
    name: str,
    factors: Sequence[float],
    *,
    seed: int,
    config: TuneConfig | None = None,
    watch: Callable[[int, dict[str, int]], None] | None = None,
) -> Run:
    """Run a policy over a case for as many steps as there are noise factors."""
    config = config or TuneConfig(mode="lossy")
    policy = make(name, config, seed)
    first = case.curves[0]
    spaces = [KnobSpace(knob, value, first.domains[knob]) for knob, value in first.start.items()]
    policy.begin(
        JobFacts(
            job="replay",
            world_size=2,
            gradient_bytes=first.gradient_bytes,
            batch_samples=first.batch_samples,
            bucket_bytes=first.start.get("bucket_bytes"),
            first_bucket_bytes=first.first_bucket_bytes,
        ),
        spaces,
        turns_knobs=True,
    )
    draw, seen = random.Random(f"latency {seed}"), random.Random(f"windows {seed}")
    values, kept = dict(first.start), dict(first.start)
    pending: tuple[int, dict[str, int], bool] | None = None
    done, steps = Run(), len(factors)
    part = -(-steps // len(case.curves))
    batch: list[Observation] = []
    gathered: list[Observation] = []
    since_switch, opened = len(TRANSIENT), {}
    for step in range(1, steps + 1):
        curve = case.curves[(step - 1) // part]
        if pending is not None and step >= pending[0]:
            if pending[1] != values:
                values, since_switch = dict(pending[1]), 0
            if not pending[2]:
                kept = dict(pending[1])
            pending = None
        level = curve.at(values).step_ns
        slow = TRANSIENT[since_switch] if since_switch < len(TRANSIENT) else 1.0
        since_switch += 1
        factor, start_ns = factors[step - 1], curve.at(first.start).step_ns
        pace = int(level * slow * factor)
        done.total_ns += pace
        done.alone_ns += start_ns * factor
        if values != kept:
            done.trial_steps += 1
            done.slowest_ratio = max(done.slowest_ratio, level * slow / start_ns)
        done.slow_steps += level * slow > SLOW_RATIO * start_ns
        if watch is not None:
            watch(step, values)
        batch.append(_observe(step, values, pace, curve, since_switch, seen))
        if step % PERIOD_STEPS:
            continue
        turn, records = policy.advance(gathered)
        gathered, batch = batch, []
        for record in records:
            if isinstance(record, Decision):
                opened[record.decision] = (record, dict(kept))
            elif isinstance(record, Verdict):
                _note(done, record, opened, curve)
        keeps = pending is not None and not pending[2]  # comes first, as in the tuner
        if turn is not None and not (keeps and turn.is_trial) and (pending or ())[1:] != (turn.values, turn.is_trial):
            pending = (step + draw.randint(*LATENCY_STEPS), dict(turn.values), turn.is_trial)
    last = case.curves[-1]
    done.end_ratio = last.at(kept).step_ns / last.oracle_ns
    done.detail = str(kept)
    return done


def _note(done: Run, verdict: Verdict, opened: dict[int, tuple[Decision, dict[str, int]]], curve: Curve) -> None:
    """Compare a verdict with the truth: a change that saves nothing should not be kept.

    Knobs that were tried together count once.
    """
    if verdict.decision not in opened:
        return
    decision, before = opened.pop(verdict.decision)
    tried = [number for number, (other, _) in opened.items() if other.step == decision.step]
    others = {other.knob: int(other.to_value) for other, _ in map(opened.pop, tried)}
    if verdict.outcome not in ("kept", "rolled_back"):
        return
    after = {**before, verdict.knob: int(decision.to_value), **others}
    truth = 1 - curve.at(after).step_ns / curve.at(before).step_ns
    is_kept = verdict.outcome == "kept"
    done.judged += 1
    done.kept += is_kept
    if truth <= 0:
        done.null_judged += 1
        done.null_kept += is_kept
    if decision.expected_gain_ratio is not None:
        done.forecasts.append((decision.expected_gain_ratio, decision.expected_gain_error, truth))
