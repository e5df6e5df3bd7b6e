"""One rank of an FSDP2 job whose blocks keep their parameters or free them, in turns; prints what it saw as JSON.

Run by test_fsdp.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as the argument.
A block's arithmetic is a wait, as if a device computed; its parameters and gathers are real.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pacecar
from pacecar.config import TuneConfig
from pacecar.controller.knobs.fsdp2 import fsdp_knobs
from pacecar.records import Decision, Verdict
from tests.kit.rank_jobs import DEVICE, RANK, WORLD, records_of, run_jobs

BLOCKS = 8
WIDTH = 1024
"""Four MiB a block."""

FORWARD_SECONDS, BACKWARD_SECONDS = 0.002, 0.004


class Work(torch.autograd.Function):
    """Waits in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(Work.apply(x)))


class Job:
    """A loop that notes its losses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh(DEVICE.type, (WORLD,))
        self.model = nn.Sequential(*[Block() for _ in range(BLOCKS)]).to(DEVICE)
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.losses: list[str] = []

    def train(self) -> int:
        """Train one step; return the bytes of whole parameters held between forward and backward."""
        generator = torch.Generator().manual_seed(100 * len(self.losses) + RANK)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, WIDTH, generator=generator).to(DEVICE)).square().mean()
        whole = [p for p in self.model.parameters() if not hasattr(p, "to_local")]
        held = sum(p.untyped_storage().nbytes() for p in whole)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item().hex())
        return held


def interleaved(pairs: int, block_steps: int) -> dict[str, Any]:
    """Train blocks of steps in the order A B B A: A frees all parameters after forward, B none."""
    job = Job()
    for _ in range(2):
        job.train()
    knob = fsdp_knobs(job.model, TuneConfig(knobs=("fsdp_reshard",)))[0]
    estimate = {value: sum(knob.gathers().freeable_bytes[value:]) for value in (0, BLOCKS)}  # type: ignore[attr-defined]
    refused, seconds, held = knob.refusal(), {"A": [], "B": []}, set()  # type: ignore[var-annotated]
    for arm in "ABBA" * (pairs // 2):
        value = 0 if arm == "B" else BLOCKS
        knob.apply(value)
        dist.barrier()
        begun = time.monotonic()
        found = {job.train() - estimate[value] for _ in range(block_steps)}
        dist.barrier()
        seconds[arm].append((time.monotonic() - begun) / block_steps)
        held |= found
    plain = Job()
    for _ in job.losses:
        plain.train()
    return {
        "refused": refused,
        "seconds": seconds,
        "beside_estimate": sorted(held),
        "estimate": estimate[0],
        "is_equal": job.losses == plain.losses,
    }


def tuned(steps_max: int) -> dict[str, Any]:
    """Let the tuner find it from its windows; return what it expected and measured."""
    os.environ["PACECAR_TUNE_KNOBS"] = "fsdp_reshard"
    job = Job()
    tuning = {"remember": False, "crew": False, "exploration_budget": 0.3, "overhead_budget": 0.1}
    values = []
    with pacecar.attach(job.model, job.optimizer, tune="exact", **tuning) as pacer:
        records = records_of(pacer)
        while len(job.losses) < steps_max:
            job.train()
            values.append(pacer.knobs.values.get("fsdp_reshard"))
        status = None if pacer._tuner is None or pacer._tuner.status is None else pacer._tuner.status.detail
        refused = {} if pacer._tuner is None else pacer._tuner.refused
    plain = Job()
    for _ in job.losses:
        plain.train()
    return {
        "is_equal": job.losses == plain.losses,
        "values": values,
        "switches": sum(a != b for a, b in pairwise(values)),
        "refused": refused,
        "status": status,
        "decisions": [
            (r.from_value, r.to_value, r.expected_gain_ratio, r.expected_gain_error, r.reason)
            for r in records
            if isinstance(r, Decision)
        ],
        "verdicts": [
            (r.outcome, r.measured_gain_ratio, r.gain_low, r.gain_high, r.reason)
            for r in records
            if isinstance(r, Verdict)
        ],
    }


def main(options: dict[str, Any]) -> dict[str, Any]:
    if "pairs" in options:
        return interleaved(options["pairs"], options.get("block_steps", 40))
    return tuned(options["steps"])


if __name__ == "__main__":
    run_jobs(main, seconds=120.0)
