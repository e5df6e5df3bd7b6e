"""One rank of a gloo job in which rank 1 gets slow, started by `bench_stragglers_live.py`; prints whom rank 0 names.

    KIND FAULT ONSET STEPS SHARE

KIND is ddp, accumulation, fsdp2, pipeline or tensor; FAULT is forward, backward, data, host, gc, quota, work, link or
none.  From step ONSET on rank 1 takes SHARE of a step longer in that part of it. Layers sleep where others compute, so
that ranks do not take the processors from each other; `work` gives rank 1 longer sequences, which take longer in
proportion. Under `quota` layers compute for a quarter of their time, and rank 1 may then use SHARE less of a processor
than it did (needs root and control groups of version 1). Under `link` the ranks make a file in their folder at ONSET,
and who started them slows rank 1's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.records import JobRecord, Straggler
from tests.kit.cpu_quota import cpu_quota
from tests.kit.long_collection import collect_for

WIDTH, LAYERS, TOKENS = 64, 4, 32
FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02
"""What one layer takes."""
STEP_SECONDS = LAYERS * (FORWARD_SECONDS + BACKWARD_SECONDS)
SLOW_RANK = 1
BURNT = 0.25
ONSET_FILE = "onset"


class Fault:
    """What this rank does in the present step."""

    def __init__(self, kind: str, seconds: float, onset: int) -> None:
        self.kind, self.seconds, self.onset, self.step = kind, seconds, onset, 0
        self.limits, self.is_throttled = ExitStack(), False

    def is_on(self, kind: str) -> bool:
        return self.kind == kind and self.step >= self.onset and int(os.environ["RANK"]) == SLOW_RANK

    def act(self, kind: str, share: float = 1.0) -> None:
        if self.is_on(kind):
            time.sleep(self.seconds * share)

    def pass_time(self, seconds: float) -> None:
        """Let a layer work."""
        if self.kind == "quota":
            end = time.thread_time() + seconds * BURNT
            while time.thread_time() < end:
                pass
            seconds *= 1 - BURNT
        time.sleep(seconds)

    def throttle(self) -> None:
        """Give this process less of a processor, in a control group of its own."""
        if not self.is_on("quota") or self.is_throttled:
            return
        self.is_throttled = True
        self.limits.enter_context(cpu_quota(BURNT / (1 + self.seconds / STEP_SECONDS)))


class Work(torch.autograd.Function):
    """Takes its time in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault, scale: float) -> torch.Tensor:
        ctx.fault, ctx.scale = fault, scale
        fault.pass_time(FORWARD_SECONDS * scale)
        fault.act("forward", 1 / LAYERS * scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.fault.pass_time(BACKWARD_SECONDS * ctx.scale)
        ctx.fault.act("backward", 1 / LAYERS * ctx.scale)
        return gradient, None, None


class Layer(nn.Module):
    """A transformer's feed-forward part, of which `fault` knows how slow it is."""

    def __init__(self, fault: Fault, scale: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fault, self.scale = fault, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale * x.shape[-2] / TOKENS
        return x + self.down(torch.relu(self.up(Work.apply(x, self.fault, scale))))


class Losses(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target.mean()).square().mean()


def ddp(fault: Fault, micro_batches: int = 1) -> tuple[nn.Module, Callable[[Any], None]]:
    model = DistributedDataParallel(net(fault, 1 / micro_batches))

    def train(x: torch.Tensor) -> None:
        for micro in range(micro_batches):
            model.require_backward_grad_sync = micro == micro_batches - 1
            model(x).square().mean().backward()

    return model, train


def fsdp2(fault: Fault) -> tuple[nn.Module, Callable[[Any], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net(fault)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, lambda x: model(x).square().mean().backward()


def tensor(fault: Fault) -> tuple[nn.Module, Callable[[Any], None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net(fault)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, lambda x: model(x).square().mean().backward()


def pipeline(fault: Fault) -> tuple[nn.Module, Callable[[Any], None]]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks, micro_batches = dist.get_rank(), dist.get_world_size(), 4
    model = net(fault, 1 / micro_batches)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=Losses())

    def train(x: torch.Tensor) -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(**({"target": x} if rank == ranks - 1 else {}))

    return model, train


KINDS: dict[str, Callable[[Fault], tuple[nn.Module, Callable[[Any], None]]]] = {
    "ddp": ddp, "accumulation": lambda fault: ddp(fault, 3), "fsdp2": fsdp2, "tensor": tensor, "pipeline": pipeline,
}  # fmt: skip


def net(fault: Fault, scale: float = 1.0) -> nn.Sequential:
    return nn.Sequential(*(Layer(fault, scale) for _ in range(LAYERS)))


def batches(fault: Fault, steps: int, variable: bool) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for step in range(steps):
        fault.step = step
        fault.act("data")
        fault.throttle()
        if step == fault.onset and fault.kind == "link":
            Path(ONSET_FILE).touch()
        tokens = TOKENS
        if variable:
            tokens = int(TOKENS * (0.7 + 0.6 * torch.rand((), generator=draw)))
        if fault.is_on("work"):
            tokens = round(TOKENS * (1 + fault.seconds / STEP_SECONDS))
        yield torch.randn(8, tokens, WIDTH, generator=draw)


class Said:
    """Prints what rank 0 says of late ranks."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.dropped = fault, 0

    def put(self, record: JobRecord) -> None:
        if isinstance(record, Straggler):
            found = {"rank": record.late_rank, "cause": record.cause, "phase": record.phase, "at": self.fault.step}
            more = {"ended": record.ended, "excess_ms": record.excess_ns / 1e6, "evidence": record.evidence}
            sys.stdout.write(json.dumps(found | more) + "\n")
            sys.stdout.flush()

    def close(self, timeout_seconds: float) -> None:
        pass


def main() -> None:
    kind, fault_kind, onset, steps, share = sys.argv[1:6]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    fault = Fault(fault_kind, float(share) * STEP_SECONDS, int(onset))
    model, train = KINDS[kind](fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    pacer = pacecar.attach(model, optimizer, tune="off", job=kind, loggers=[Said(fault)])
    for x in pacer.data(batches(fault, int(steps), fault_kind == "variable")):
        optimizer.zero_grad()
        train(x)
        fault.act("host")
        if fault.is_on("gc"):
            collect_for(fault.seconds)
        optimizer.step()
    pacer.close()
    fault.limits.close()
    dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main()
