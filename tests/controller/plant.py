"""A simulated job whose step time is a known function of its knobs: what the policy is tested on.

It carries out a proposal some steps later, reports steps in batches and one control period late, makes the first steps
after a switch slow, and adds noise, as a real job does, but its optimum is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log2

from pacecar.config import TuneConfig
from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Policy
from pacecar.controller.policy.tuning_policy import TuningPolicy
from pacecar.records import BackwardWindow, Decision, Ledger, TunerStatus, Verdict

MIB = 2**20
BUCKETS = tuple(MIB * 2**k // 4 for k in range(10))
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
PERIOD_STEPS = 4

Curve = Callable[[dict[str, int], int], float]
Noise = Callable[[random.Random], float]


def gaussian(deviation: float) -> Noise:
    return lambda draw: draw.gauss(0.0, deviation)


def spiky(deviation: float) -> Noise:
    """Gaussian, but one step in twenty takes about two and a half times as long."""
    return lambda draw: draw.gauss(0.0, deviation) + (abs(draw.gauss(0.9, 0.4)) if draw.random() < 0.05 else 0.0)


@dataclass
class Plant:
    """One job.  `curve` gives seconds a step for values and step number; `decide` is the policy under test."""

    curve: Curve
    noise: Noise
    spaces: list[KnobSpace]
    seed: int
    config: TuneConfig = field(default_factory=lambda: TuneConfig(exploration_budget=0.05))
    turns_knobs: bool = True
    facts: JobFacts = field(default_factory=lambda: JobFacts(job="plant", world_size=2, batch_samples=32))
    latency_steps: tuple[int, int] = (4, 12)
    transient: tuple[float, ...] = (1.3, 1.1)
    obey: bool = True
    ledger: Callable[[int, int], Ledger | None] = lambda step, pace: None
    backward: Callable[[int, dict[str, int]], BackwardWindow | None] = lambda step, values: None
    pace_of: Callable[[int, int], int] = lambda step, pace: pace
    records: list[Decision | Verdict | TunerStatus] = field(default_factory=list)
    paces: list[int] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    switches: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    history: list[dict[str, int]] = field(default_factory=list)
    make: Callable[[TuneConfig], Policy] = TuningPolicy
    at: Callable[[int, Policy], None] = lambda step, policy: None

    def run(self, steps: int) -> Plant:
        draw = random.Random(self.seed)
        self.policy = policy = self.make(self.config)
        policy.begin(self.facts, self.spaces, turns_knobs=self.turns_knobs)
        self.values = {space.knob: space.value for space in self.spaces}
        wish: tuple[int, dict[str, int]] | None = None
        batch: list[Observation] = []
        gathered: list[Observation] = []  # what the ranks posted a period ago and rank 0 reads now
        since_switch = 1000
        for step in range(1, steps + 1):
            if wish is not None and step >= wish[0]:
                if wish[1] != self.values:
                    self.values, since_switch = dict(wish[1]), 0
                    self.switches.append(step)
                wish = None
            slow = self.transient[since_switch] if since_switch < len(self.transient) else 1.0
            since_switch += 1
            self.factors.append(exp(self.noise(draw)))
            self.history.append(dict(self.values))
            pace = int(self.curve(self.values, step) * slow * self.factors[-1] * 1e9)
            pace = self.pace_of(step, pace)
            self.paces.append(pace)
            ledger = self.ledger(step, pace)
            batch.append(
                Observation(
                    step=step,
                    wall_ns=step * 1_000_000_000,
                    values=dict(self.values),
                    pace_ns=pace,
                    ledger=ledger,
                    exact=ledger is not None,
                    profiled=ledger is not None,
                    backward=self.backward(step, self.values),
                )
            )
            self.at(step, policy)
            if step % PERIOD_STEPS == 0:
                turn, records = policy.advance(gathered)
                gathered, batch = batch, []
                self.records += records
                if turn is not None and self.obey:
                    delay = draw.randint(*self.latency_steps)
                    if wish is None or wish[1] != turn.values:
                        wish = (step + delay, dict(turn.values))
        self.records += policy.finish()
        return self

    @property
    def total_seconds(self) -> float:
        return sum(self.paces) / 1e9

    @property
    def verdicts(self) -> list[Verdict]:
        return [record for record in self.records if isinstance(record, Verdict)]

    @property
    def decisions(self) -> list[Decision]:
        return [record for record in self.records if isinstance(record, Decision)]

    @property
    def statuses(self) -> list[TunerStatus]:
        return [record for record in self.records if isinstance(record, TunerStatus)]


def link_curve(milliseconds: dict[int, float]) -> Curve:
    """Step time by bucket size alone, in milliseconds, from a table."""
    return lambda values, step: milliseconds[values["bucket_bytes"]] / 1e3


def both_curve(values: dict[str, int], step: int) -> float:
    """0.1 s of work, 10 ms a micro-batch of 32 samples, and an optimum at buckets of 4 MiB, 10 % better than 32."""
    passes = 32 / values["micro_batch"]
    octaves = abs(log2(values["bucket_bytes"] / (4 * MIB)))
    return 0.1 + 0.010 * passes + 0.0035 * octaves**1.5
