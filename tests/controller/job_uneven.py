"""One rank of a small job with pacecar attached, in which one rank does something that the others do not.

    close      `pacer.close()` after a step, and training on
    block      a `with` block around the pacer that ends in an exception, which the script catches, and training on
    raise      the step raises before its forward, which the script catches; it does that step again
    skip       the step raises after its backward: its optimizer step is left out
    absent     pacecar is not attached on this rank
    off        pacecar's hook fails until it turns itself off
    none       nothing

`kind` is "ddp"; "metrics": DDP, and a loss reduced by hand in each step; "accumulate": DDP, two backwards a step, the
first without communication; "micro": DDP, and pacecar cuts the batches; "batches": DDP, and pacecar makes updates of
`steps` batches of the loader; "fsdp": FSDP2; "plain": gradients reduced by hand.
`when` is a step, or a moment: "trial" (a trial's values are in force), "voted" (a vote is out that this rank is for),
"switched" (a switch was carried out in the last boundary).  The job knows its own losses to the last bit, and what was
in force in each step.

Run by test_uneven_ranks.py, by hand or under torchrun: a list of jobs' options as the argument; the jobs run one
after the other, and their answers go to the file in ANSWERS, with the rank's number at the end, or to stdout.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.controller.observation import Proposal
from tests.kit.hook_inspection import turn_off
from tests.kit.patient_gathers import wait_for_gathers

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH = 12

VALUES = {
    "bucket_bytes": (4096, 16384, 65536),
    "fsdp_prefetch": (1, 2, 0),
    "fsdp_reshard": (0, 3, 6),
    "micro_batch": (3, 6, 12),
    "batch_samples": (2 * BATCH * WORLD, BATCH * WORLD, 4 * BATCH * WORLD),
}
"""What a restless policy tries."""

KNOBS = {
    "fsdp": ("fsdp_prefetch", "fsdp_reshard"),
    "micro": ("micro_batch",),
    "batches": ("batch_samples",),
    "plain": (),
}
"""Those of a kind of job; of the others the buckets."""


class PlannedError(Exception):
    """What the script expects and catches."""


class Restless:
    """A policy that always tries other values, and keeps each second time."""

    def __init__(self) -> None:
        self.turns = 0

    def begin(self, facts: Any, spaces: Any, *, turns_knobs: bool) -> None:
        self.spaces = spaces

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        pass

    def advance(self, observations: Any) -> tuple[Proposal | None, list[Any]]:
        self.turns += 1
        turned = [space.knob for space in self.spaces if space.knob in VALUES]
        values = {knob: VALUES[knob][self.turns // 2 % len(VALUES[knob])] for knob in turned}
        return Proposal(self.turns // 2, values, is_trial=self.turns // 2 % 2 == 0), []

    def finish(self, reason: str) -> list[Any]:
        return []

    def wants_window(self) -> bool:
        return False

    def is_calm(self) -> bool:
        return False


def shard(net: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Said(logging.Handler):
    """Keeps what the tuner says aloud; the crew may find a rank slow on a busy machine."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "tuner" in record.getMessage():
            self.lines.append(record.getMessage())


class Job:
    """Trains, and does `what` on the rank `who` when it is time."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        torch.manual_seed(7)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(6)])
        self.kind = options.get("kind", "ddp")
        self.knobs = KNOBS.get(self.kind, ("bucket_bytes",))
        self.model: Any = net
        if self.kind == "fsdp":
            self.model = shard(net)
        elif self.kind != "plain":
            self.model = DistributedDataParallel(net, bucket_cap_mb=0.02)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.draw = torch.Generator().manual_seed(RANK)
        self.losses: list[str] = []
        self.is_mine = RANK in options["who"]
        self.did_at: int | None = None
        self.pacer: Any = None
        self.updates: Any = None
        self.proven: tuple[int, ...] | None = None
        self.slowest = 0.0
        self.said = Said()
        logging.getLogger("pacecar").addHandler(self.said)

    def attach(self) -> None:
        what = self.options["what"]
        if self.options["tune"] is None or (what == "absent" and self.is_mine):
            return
        extra: dict[str, Any] = {}
        if self.kind in ("micro", "batches"):
            extra = {"knobs": self.knobs, "micro_batch": 6}
        if self.kind == "batches":
            extra |= {"learning_rate_rule": "adascale", "batch_samples_max": 4 * BATCH * WORLD}
        self.pacer = pacecar.attach(
            self.model, self.optimizer, tune=self.options["tune"], socket="/nonexistent/socket", warmup_steps=2,
            bucket_bytes_min=4096, job="uneven", crew=self.options.get("crew", True),
            meet_seconds=2.0 if what == "absent" else 60.0, **extra,
        )  # fmt: skip
        if self.kind == "batches":
            self.updates = iter(self.pacer.batches([self.batch() for _ in range(self.options["steps"])]))
        if self.options.get("restless") and RANK == 0 and self.pacer._tuner is not None:
            self.pacer._tuner._policy = Restless()

    def is_time(self, step: int) -> bool:
        """Whether the moment has come, which on a rank that has none of it comes at the step of the same number."""
        when, tuner = self.options["when"], None if self.pacer is None else self.pacer._tuner
        if self.did_at is not None or not self.is_mine:
            return False
        if isinstance(when, int) or tuner is None:
            return step == (when if isinstance(when, int) else 20)
        agreement = tuner.agreement
        return {
            "trial": tuner._proven is not None and tuner._proven != tuner._switcher.agreed(),
            "voted": agreement._vote is not None and agreement._member._voted is not None,
            "switched": tuner._boundary == tuner._switched_at,
        }[when] and step > 8  # fmt: skip

    def step(self, number: int) -> None:
        raises = self.options["what"] if self.is_time(number) else None
        if raises == "raise":
            self.did_at = number
            raise PlannedError
        batch = self.batch() if self.updates is None else next(self.updates)
        self.optimizer.zero_grad()
        loss = self.backward(batch)
        if self.kind == "metrics":
            dist.all_reduce(loss.detach().clone())
        if self.kind == "plain":
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        if raises == "skip":
            self.did_at = number
            raise PlannedError
        self.optimizer.step()
        self.losses.append(float(loss.detach()).hex())
        if raises in ("close", "off") and self.pacer is not None:
            self.did_at = number
            self.proven = None if self.pacer._tuner is None else self.pacer._tuner._proven
            self.pacer.close() if raises == "close" else turn_off(self.pacer)

    def batch(self) -> torch.Tensor:
        return torch.randn(BATCH, 48, generator=self.draw)

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        def loss_of(part: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(part).square().mean()
            return loss

        if self.kind in ("micro", "batches") and self.pacer is not None:
            whole: torch.Tensor = self.pacer.train_batch(batch, loss_of)
            return whole
        if self.kind == "accumulate":
            with self.model.no_sync():
                (loss_of(self.batch()) / 2).backward()
        loss = loss_of(batch)
        loss.backward()
        return loss

    def train(self) -> None:
        number = 0
        while len(self.losses) < self.options["steps"]:
            number += 1
            begun = time.monotonic()
            try:
                if self.options["what"] == "block" and self.is_time(number):
                    self.did_at = number
                    with self.pacer or nullcontext():
                        raise PlannedError
                self.step(number)
            except StopIteration:  # of the updates
                break
            except PlannedError:
                if self.options["what"] == "skip":
                    self.losses.append("left out")
            self.slowest = max(self.slowest, time.monotonic() - begun)


def main(options: dict[str, Any]) -> dict[str, Any]:
    job = Job(options)
    job.attach()
    job.train()
    tuner = None if job.pacer is None else job.pacer._tuner
    layout = None
    if tuner is not None and all(knob in tuner._actuators for knob in job.knobs):
        layout = [tuner._actuators[knob].value() for knob in job.knobs]
    spaces = () if tuner is None else tuner.agreement.spaces
    proven = [value for space, value in zip(spaces, job.proven or (), strict=False) if space.knob in job.knobs]
    if job.pacer is not None:
        job.pacer.close()
    logging.getLogger("pacecar").removeHandler(job.said)
    shards = [p.to_local() if job.kind == "fsdp" else p for p in job.model.parameters()]
    weights = torch.cat([shard.detach().flatten() for shard in shards])
    return {
        "losses": job.losses,
        "weights": weights.double().sum().item().hex(),
        "did_at": job.did_at,
        "layout": layout,
        "proven": proven,
        "knobs": [space.knob for space in spaces if space.knob in job.knobs],
        "said": job.said.lines,
        "frozen": None if tuner is None else tuner.agreement.frozen,
        "state": None if tuner is None else tuner.state,
        "slowest": job.slowest,
        "epoch": None if tuner is None else tuner.knobs.epoch,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="LOG %(name)s %(levelname)s %(message)s")
    wait_for_gathers()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    answers = [main(options) for options in json.loads(sys.argv[1])]
    said = json.dumps(answers)
    if "ANSWERS" in os.environ:
        Path(os.environ["ANSWERS"] + str(RANK)).write_text(said)
    else:
        print(said, flush=True)  # noqa: T201  this is what the test reads
    dist.barrier()
    if RANK == 0:
        time.sleep(0.2)  # the others' worker may still be in the barrier
    dist.destroy_process_group()
