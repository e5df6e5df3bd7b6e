"""What the adapters' jobs share: their options, a tuner that turns everything it can, and each rank's answer."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pacecar.adapters import shared_attach
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


class Numbers(torch.utils.data.Dataset[Any]):
    """Rows of 16 numbers and what a model can learn of them; as a dict where the two have `names`."""

    def __init__(self, count: int, names: tuple[str, str] | None = None) -> None:
        self.names = names
        self.x = torch.randn(count, 16, generator=torch.Generator().manual_seed(3))
        self.y = self.x[:, :4].sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        row = self.x[index], self.y[index]
        return row if self.names is None else dict(zip(self.names, row, strict=True))


def regression() -> nn.Sequential:
    """Return a model of `Numbers`."""
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


@contextmanager
def planted(library: str, adapter: Any = None, *, is_untested: bool = False, is_broken: bool = False) -> Iterator[None]:
    """Let no version of the library be tested, or the adapter's own work fail, for what is attached inside."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted: pacecar is broken")

    tested, attach_for = shared_attach.TESTED[library], getattr(adapter, "attach_for", None)
    if is_untested:
        shared_attach.TESTED[library] = ((0, 1), (0, 2))
    if is_broken:
        adapter.attach_for = fail
    yield
    shared_attach.TESTED[library] = tested
    if adapter is not None:
        adapter.attach_for = attach_for


@contextmanager
def shared_folder() -> Iterator[str]:
    """Make a folder that all ranks use, and that is there until the last of them is done."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        yield folders[0]
        dist.barrier()


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
