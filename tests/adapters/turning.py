"""What the adapters' jobs share: their options, a tuner that turns everything it can, and each rank's answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from pacecar.job.attach import Pacer
from pacecar.records import KnobSwitch, StepRecord
from tests.kit.next_values import NextValues
from tests.kit.patient_gathers import wait_for_gathers
from tests.kit.rank_jobs import RANK, do_models_agree, records_of, run_jobs

OPTIONS: dict[str, Any] = {
    "remember": False, "socket": "/nonexistent/pacecar.sock", "overhead_budget": 1.0, "bucket_bytes_min": 4096,
    "windows": False, "crew": False,
}  # fmt: skip
"""Models of some ten thousand parameters have buckets of some thousand bytes; every step is measured."""


def broken(*_: Any, **__: Any) -> Any:
    """Stand in for a failing part of pacecar."""
    raise RuntimeError("planted: pacecar is broken")


class Ear:
    """The records of this rank's hook and tuner; lets the tuner turn everything it can."""

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
        self.records = records_of(pacer)
        if turns and RANK == 0 and pacer._tuner is not None:
            pacer._tuner._policy = NextValues()

    def answer(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return what the test checks; called on all ranks."""
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
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
            "models_agree": do_models_agree(weights),
        }


def main(jobs: dict[str, Callable[..., dict[str, Any]]]) -> NoReturn:
    """Run the jobs that the script's argument names, a JSON list of [name, options], and print their answers."""
    wait_for_gathers()
    run_jobs(lambda named: jobs[named[0]](**named[1]), seconds=120)
