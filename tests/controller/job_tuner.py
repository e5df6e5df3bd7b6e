"""One rank of a DDP job under a Tuner with a scripted policy; prints what it saw as JSON.

Run by test_tuner_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as
the argument; the jobs run one after the other.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.clock import SystemClock
from pacecar.config import TuneConfig
from pacecar.controller.consensus.rank_agreement import RankAgreement
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator
from pacecar.controller.knobs.ddp.buckets import BucketActuator
from pacecar.controller.knobs.ddp.reducer import DdpReducer
from pacecar.controller.observation import JobFacts, Observation, Proposal
from pacecar.controller.status_reporter import StatusReporter
from pacecar.controller.tuner import TunedJob, Tuner, choose_agreement
from pacecar.records import JobRecord, Knobs, KnobSwitch, StepRecord, TunerStatus
from tests.kit.next_values import NextValues
from tests.kit.rank_jobs import RANK, WORLD, run_jobs
from tests.kit.records import job_hello, step_record


class SmallJob(TunedJob):
    """A job of `world` ranks to its tuner; what is in force goes to the end of `in_force`."""

    def __init__(self, world: int, buckets: Any, batcher: MicroBatcher, in_force: list[Knobs]) -> None:
        self.world, self.buckets, self.batcher, self.in_force = world, buckets, batcher, in_force

    def facts(self) -> JobFacts:
        sizes = () if self.buckets is None else self.buckets._reducer.gradient_bytes()
        return JobFacts("job", self.world, sizes, self.batcher.batch_samples)

    def set_knobs(self, knobs: Knobs) -> None:
        self.in_force.append(knobs)

    def request_window(self) -> None:
        """Do nothing: nothing is profiled."""


class Script(NextValues):
    """Raises at the `fail_at`-th proposal, and counts how often it was finished."""

    def __init__(self, fail_at: int | None = None, *, is_trial: bool = False) -> None:
        super().__init__(is_trial=is_trial)
        self.fail_at = fail_at
        self.finished = 0

    def advance(self, observations: Sequence[Observation]) -> tuple[Proposal | None, list[Any]]:
        if self.fail_at is not None and self.turns >= self.fail_at:
            raise RuntimeError("the policy broke")
        return super().advance(observations)

    def finish(self, reason: str = "") -> list[Any]:
        self.finished += 1
        return super().finish(reason)


class Brittle(BucketActuator):
    """Cannot be turned to one value on one rank; `bad_calls` fail whatever the value."""

    bad: int | None = None
    bad_calls: tuple[int, ...] = ()
    calls = 0

    def apply(self, value: int) -> None:
        self.calls += 1
        if value == self.bad or self.calls in self.bad_calls:
            raise ActuatorError("planted")
        super().apply(value)


class Finished:
    """A step as the hook tells it."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.step, self.wall_ns, self.disturbed = record.step, record.wall_ns, record.disturbed
        self.source, self.backward, self.pace_ns = record.source, None, record.wall_ns
        self.is_held = False

    def settled(self) -> StepRecord:
        return self.record


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)])
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    config = TuneConfig(bucket_bytes_min=16 * 1024, mode=options.get("mode", "exact"))
    batcher = MicroBatcher(ddp, 4)
    buckets = Brittle(config, DdpReducer(ddp))
    if RANK == WORLD - 1:
        buckets.bad, buckets.bad_calls = options.get("bad"), tuple(options.get("bad_calls", ()))
    actuators: list[Any] = [buckets, MicroBatchActuator(ddp, batcher, config)]
    policy = Script(options.get("policy_fails"), is_trial=options.get("trial", False)) if RANK == 0 else None
    emitted: list[JobRecord] = []
    in_force: list[Knobs] = [Knobs()]
    agreement_given = None
    if options.get("meet_seconds"):
        agreement_given = RankAgreement(RANK, WORLD, votes=True, meet_seconds=options["meet_seconds"])
    if options.get("absent") != RANK:
        tuner = Tuner(
            SmallJob(WORLD, buckets, batcher, in_force), config,
            StatusReporter(job_hello(RANK, WORLD), emitted.append, SystemClock()),
            policy=policy, actuators=actuators, agreement=agreement_given or choose_agreement(config),
        )  # fmt: skip
        tuner.start()
    generator = torch.Generator().manual_seed(RANK)
    costs: dict[str, list[int]] = {"tick": [], "vote": [], "read": [], "other": []}
    walls: list[int] = []
    last = time.perf_counter_ns()
    for step in range(1, options["steps"] + 1):
        batch = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        for micro in batcher.split(batch):
            batcher.backward(ddp(micro).square().mean())
        optimizer.step()
        if options.get("sleep_us"):
            time.sleep(options["sleep_us"] / 1e6)
        now = time.perf_counter_ns()
        record = step_record(RANK, step, now - last, knobs=in_force[-1])
        walls.append(now - last)
        last = now
        if options.get("break_side") == step and RANK == WORLD - 1:
            tuner.agreement._side._group = None
        if options.get("absent") == RANK:
            continue
        begin = time.perf_counter_ns()
        tuner.on_boundary(None if step % 50 == 0 and options.get("holes") else Finished(record))
        costs[{3: "vote", 0: "read"}.get(step % 4, "other")].append(time.perf_counter_ns() - begin)
        if options.get("crash") == step and RANK == WORLD - 1:
            raise SystemExit(7)
    begin = time.perf_counter_ns()
    state, agreement = "off", None
    if options.get("absent") != RANK:
        state, agreement = tuner.state, tuner.agreement
        tuner.close()
    close_ms = (time.perf_counter_ns() - begin) / 1e6
    digest = hashlib.blake2b()
    for p in net.parameters():
        digest.update(p.detach().numpy().tobytes())
    return {
        "switches": [[r.step, r.epoch, r.knobs.values, r.duration_ns] for r in emitted if isinstance(r, KnobSwitch)],
        "status": [[r.state, r.detail] for r in emitted if isinstance(r, TunerStatus)],
        "state": state,
        "frozen": None if agreement is None else agreement.frozen,
        "observed": None if policy is None else [[o.step, o.values, o.pace_ns] for o in policy.seen],
        "spaces": None if policy is None else [[s.knob, s.value, s.domain] for s in policy.spaces],
        "finished": None if policy is None else policy.finished,
        "weights": digest.hexdigest(),
        "close_ms": close_ms,
        "cost_us": {k: sorted(v)[len(v) // 2] / 1000 for k, v in costs.items() if v},
        "step_us": sorted(walls)[len(walls) // 2] / 1000,
        "walls": walls if options.get("walls") else None,
    }


if __name__ == "__main__":
    run_jobs(main)
