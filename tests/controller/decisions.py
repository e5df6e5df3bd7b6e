"""Writes what the policy decides in every case of the replays, one line a run, to compare two commits by `diff`.

    python -m tests.controller.decisions FILE [SEEDS] [STEPS]

Every case runs with every seed without a memory, with one that remembers the middle of each knob's domain, and with one
that remembers its lower end.  A line has the case, the seed, the memory, the number of records, their SHA-256 and
totals.  After that each case is played by whole tuners with all guards and orders (`whole_tuner`).  The text of a
status is left out: it is for people, and may be put better.  So are fields that one of the commits has alone.  To
compare with another commit, run its own copy of this module.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from pacecar.config import TuneConfig
from pacecar.controller.policy.hand_orders import HandOrders
from tests.controller import replay
from tests.controller.ordered_run import OrderedRun
from tests.controller.whole_tuner import WholeTuner

SEEDS, STEPS, NOISE = 30, 1500, 0.05

FIELDS = frozenset({
    "type", "decision", "kind", "knob", "from_value", "to_value", "step", "expected_gain_ratio", "reason", "outcome",
    "measured_gain_ratio", "gain_low", "gain_high", "evidence", "trial_steps", "exploration_ns", "state", "trials",
})  # fmt: skip


class Memory:
    """A memory that knows `knobs`, and keeps what it is asked."""

    def __init__(self, knobs: dict[str, int], said: list[Any]) -> None:
        self._knobs, self._said = knobs, said

    def recall(self, began: Mapping[str, int]) -> Any:
        return SimpleNamespace(
            knobs=self._knobs, gain_ratio=0.1, pace_ns=None, steps=200, saved_wall_ns=10**18, used_wall_ns=10**18,
            job="j", stale=None, key="k", pacecar_version="0", fingerprint=SimpleNamespace(began=dict(began)),
        )  # fmt: skip

    def keep(self, *what: object) -> None:
        self._said.append(("keep", *what))

    def use(self, entry: object) -> None:
        self._said.append(("use",))

    def doubt(self, entry: object, why: str) -> None:
        self._said.append(("doubt", why))


class Told:
    """Keeps what a policy proposes and records."""

    def __init__(self, policy: Any, said: list[Any]) -> None:
        self._policy, self._said = policy, said

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def advance(self, observations: Sequence[Any]) -> Any:
        turn, records = self._policy.advance(observations)
        if turn is not None:
            self._said.append(("turn", turn.decision, dict(turn.values), turn.is_trial))
        for record in records:
            fields = msgspec.to_builtins(record)
            self._said.append({name: fields[name] for name in fields if name in FIELDS})
        return turn, records


def decided(case: replay.Case, seed: int, memory: str, factors: Sequence[float]) -> list[Any]:
    """Run one case; return its line."""
    said: list[Any] = []
    make, first = replay.make, case.curves[0]

    def told(name: str, config: TuneConfig, seed: int = 0) -> Any:
        if memory == "none":
            return Told(make(name, config, seed), said)
        knobs = {k: first.domains[k][len(first.domains[k]) // 2 if memory == "good" else 0] for k in first.start}
        policy = make(name, config, seed)
        return Told(OrderedRun(policy, HandOrders(config, memory=Memory(knobs, said))), said)

    replay.make = told
    try:
        run = replay.run(case, "pacecar", factors, seed=seed)
    finally:
        replay.make = make
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    return [case.name, seed, memory, len(said), digest, run.total_ns, run.detail, run.kept, run.judged]


def played(case: replay.Case, seed: int, factors: Sequence[float]) -> list[Any]:
    """Run a whole tuner; return its line."""
    job = WholeTuner(case, seed).run(factors, has_orders=True)
    said = [{k: v for k, v in msgspec.to_builtins(record).items() if k in FIELDS} for record in job.records]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    return [case.name, seed, "whole", len(said), digest, job.values]


def main(file: str, seeds: int = SEEDS, steps: int = STEPS) -> None:
    with Path(file).open("w") as stream:
        for case in replay.all_cases():
            for seed in range(seeds):
                factors = replay.noise(NOISE, steps, seed)
                for memory in ("none", "good", "bad"):
                    stream.write(json.dumps(decided(case, seed, memory, factors)) + "\n")
                stream.write(json.dumps(played(case, seed, factors)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
