"""What the adapters' jobs share: a policy that turns every knob again and again, and what a rank says at the end.

A real policy turns only what is worth it, which no test can wait for on a machine that others use too.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Policy, TuningTurn
from pacecar.job.attach import Pacer
from pacecar.records import KnobSwitch, StepRecord
from tests.kit.patient_gathers import wait_for_gathers

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

OPTIONS: dict[str, Any] = {
    "remember": False, "socket": "/nonexistent/pacecar.sock", "overhead_budget": 1.0, "bucket_bytes_min": 4096,
    "windows": False, "crew": False,
}  # fmt: skip
"""Models of some ten thousand parameters have buckets of some thousand bytes; every step is measured."""


def broken(*_: Any, **__: Any) -> Any:
    """Stand in for what fails in ours."""
    raise RuntimeError("planted: pacecar is broken")


class Turning(Policy):
    """Wishes for the next values whenever the last ones are seen in force."""

    def __init__(self) -> None:
        self.turn: TuningTurn | None = None
        self.turns = 0
        self.spaces: Sequence[KnobSpace] = ()

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, mode: Any) -> None:
        self.spaces = spaces

    def advance(self, observations: Sequence[Observation]) -> tuple[TuningTurn | None, list[Any]]:
        if self.turn is None or observations[-1].values == self.turn.values:
            self.turns += 1
            values = {s.knob: s.domain[self.turns % len(s.domain)] for s in self.spaces}
            self.turn = TuningTurn(self.turns, values, is_trial=False)
        return self.turn, []

    def finish(self, reason: str = "") -> list[Any]:
        return []


class Ear:
    """What hook and tuner of this rank say; lets the tuner turn everything it can."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.pacer: Pacer | None = None
        self.lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("pacecar")
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)

    def follow(self, pacer: Pacer, *, turns: bool = True) -> None:
        self.pacer = pacer
        if not pacer._run.sinks:
            raise RuntimeError(pacer.inert_because)
        sink = pacer._run.sinks[0]  # each of them gets every record
        put = sink.put
        sink.put = lambda record: (self.records.append(record), put(record))[1]  # type: ignore[method-assign]
        if turns and RANK == 0 and pacer._tuner is not None:
            pacer._tuner._policy = Turning()

    def answer(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return what the test asks for; called on all ranks."""
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        gathered = [torch.empty_like(weights) for _ in range(WORLD)]
        dist.all_gather(gathered, weights)
        tuner = None if self.pacer is None else self.pacer._tuner
        steps = [r for r in self.records if isinstance(r, StepRecord)]
        return {
            "switches": [[r.step, r.knobs.values] for r in self.records if isinstance(r, KnobSwitch)],
            "refused": {} if tuner is None else tuner.refused,
            "state": None if tuner is None else tuner.state,
            "inert": None if self.pacer is None else self.pacer.inert_because,
            "is_over": self.pacer is None or not self.pacer.is_active,
            "steps": len(steps),
            "measured": sorted(
                name.removesuffix("_ns")
                for name in ("data_wait_ns", "forward_ns", "backward_ns", "optimizer_ns", "samples", "micro_batches")
                if any(getattr(step, name) is not None for step in steps)
            ),
            "micro_batches": [step.micro_batches for step in steps],
            "checkpoint_ns": sum(step.ledger.checkpoint_ns for step in steps),
            "samples": sorted({step.samples for step in steps if step.samples is not None}),
            "lines": self.lines,
            "weights": weights.double().tolist()[::37],
            "models_agree": all(torch.equal(gathered[0], other) for other in gathered),
        }


def main(jobs: dict[str, Callable[..., dict[str, Any]]], argument: str) -> None:
    """Run the jobs that `argument` names, a JSON list of [name, options], and print what they answer."""
    torch.set_num_threads(1)
    wait_for_gathers()
    dist.init_process_group(
        "gloo", init_method="file://" + os.environ["STORE"], rank=RANK, world_size=WORLD, timeout=timedelta(seconds=120)
    )
    answers = [jobs[name](**options) for name, options in json.loads(argument)]
    dist.barrier()
    print(json.dumps(answers), flush=True)  # noqa: T201  this is what the test reads
    os._exit(0)  # torch's own end aborts now and then
