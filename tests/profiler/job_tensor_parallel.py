"""One of two ranks of a tensor-parallel model: rank 1 comes late to a functional collective of each step.

job_tensor_parallel.py STEPS LATE_SECONDS    prints its exact windows, and where a trace of more steps is
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pacecar
from pacecar.records import StepRecord

WIDTH = 256


class Late(nn.Module):
    """Passes on what it gets, on one rank after a pause."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return numbers


class Windows:
    """Keeps the ledgers of exact windows."""

    dropped = 0

    def __init__(self) -> None:
        self.exact: list[StepRecord] = []

    def put(self, record: object) -> None:
        if isinstance(record, StepRecord) and record.source == "exact":
            self.exact.append(record)

    def close(self) -> None:
        pass


def main(steps: int, late_seconds: float, folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    late = Late(late_seconds if rank == 1 else 0.0)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), late, nn.Linear(WIDTH, WIDTH))
    model = parallelize_module(block, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    windows = Windows()
    pacer = pacecar.attach(
        model, optimizer, tune="off", job="tensor-parallel", overhead_budget=1.0, window_interval_steps=5,
        socket=str(folder / "none"),
    )  # fmt: skip
    pacer._run._outbox.put = windows.put

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(32, WIDTH)).sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    pacer.close()
    with torch.profiler.profile() as profile:
        for _ in range(3):
            step()
            profile.step()
    path = folder / f"rank{rank}.json"
    profile.export_chrome_trace(str(path))
    ledgers = [
        {"wall": r.wall_ns, "compute": r.ledger.compute_ns, "exposed": r.ledger.exposed_communication_ns}
        for r in windows.exact
    ]
    dist.destroy_process_group()
    return {"rank": rank, "windows": ledgers, "trace": str(path)}


if __name__ == "__main__":
    json.dump(main(int(sys.argv[1]), float(sys.argv[2]), Path(os.environ["JOB_FOLDER"])), sys.stdout)
