"""One rank of a DDP job on gloo, with one rank slowed or none; it records a Kineto trace of its steps.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=... python bench/counterfactual_job.py FOLDER FAULT RANK

FAULT is none, compute, data or host of RANK, or no_data (batches cost nothing, on all ranks).  Writes
FOLDER/rank<r>.json, and prints the nanoseconds of each recorded step.  Compute is an operator that sleeps, so that it
takes as long as a kernel on a separate device, whatever else runs on the shared processors.  The rest is real: DDP, its
buckets, gloo, loader, optimizer.
"""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, Dataset

WARM_STEPS, RECORDED_STEPS = 10, 24

LAYERS, WIDTH = 8, 192
"""Width of each linear layer: 148 kB of gradients."""

FORWARD_SECONDS = 0.0015
"""Time of an operator; a layer has one in forward and one, twice as long, in backward."""

SAMPLE_SECONDS = 0.002
"""Time to make a batch."""

SLOWED = {"compute": 0.3, "data": 0.012, "host": 0.010}
"""Compute: the share by which each operator takes longer; data: seconds more for a batch; host: seconds more that the
loop's own code takes before each forward."""

BUCKET_MB = 0.3
"""Two layers a bucket, so that communication goes on under backward."""


@torch.library.custom_op("pacecar_bench::device_work", mutates_args=())
def device_work(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """Return a copy of `x` after `seconds`."""
    time.sleep(seconds)
    return x.clone()


class DeviceWork(torch.autograd.Function):
    """`device_work`, which takes twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return device_work(x, seconds)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return device_work(gradients[0], 2 * ctx.seconds), None


class Layer(nn.Module):
    """A linear layer and the time that a device takes for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`, (batch, WIDTH)."""
        worked: torch.Tensor = DeviceWork.apply(torch.relu(self.linear(x)), self.seconds)
        return worked


class Samples(Dataset[torch.Tensor]):
    """One sample a batch, made in `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return WARM_STEPS + RECORDED_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((WIDTH,), index / len(self))


def main() -> None:
    """Train, and write the trace."""
    folder, fault, slow_rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    more = SLOWED[fault] if fault in SLOWED and rank == slow_rank else 0.0
    torch.manual_seed(0)
    layers = [Layer(FORWARD_SECONDS * (1 + (more if fault == "compute" else 0.0))) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    samples = Samples(0.0 if fault == "no_data" else SAMPLE_SECONDS + (more if fault == "data" else 0.0))
    took = []
    steps = schedule(wait=WARM_STEPS - 2, warmup=2, active=RECORDED_STEPS)
    # With shapes gloo's rows say how many bytes they sum up.
    with profile(activities=[ProfilerActivity.CPU], schedule=steps, record_shapes=True) as recorded:
        began = time.perf_counter_ns()
        for batch in DataLoader(samples, batch_size=1):
            if fault == "host" and more:
                with record_function("own_code"):
                    time.sleep(more)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            recorded.step()
            ended = time.perf_counter_ns()
            took.append(ended - began)
            began = ended
    recorded.export_chrome_trace(str(folder / f"rank{rank}.json"))
    sys.stdout.write(" ".join(map(str, took[WARM_STEPS:])) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
