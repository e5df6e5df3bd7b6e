"""One rank of a job that is stopped (SIGSTOP) now and then, for SECONDS each: `job_stopped.py FOLDER RANK MOMENT...`.

Each rank trains; the one named is stopped once at each of the moments, in their order, some steps apart.  Who continues
it is a shell, started before it stops itself.  Writes what it did, a line a stop, to FOLDER/stops: moment, step, when.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pacecar

SECONDS = 1.5
APART = 6
"""Steps between two stops."""

GIVE_UP_STEPS = 400


class Stopper:
    """Stops this process when the loop comes to a moment that is due."""

    def __init__(self, folder: Path, moments: list[str]) -> None:
        self._folder = folder
        self._left = moments
        self._due = APART
        self.step = 0

    @property
    def is_done(self) -> bool:
        return not self._left and self.step > self._due

    def at(self, moment: str) -> None:
        if not self._left or self.step < self._due or self._left[0] not in (moment, f"window {moment}"):
            return
        is_profiled = torch._C._autograd._profiler_enabled()
        if self._left[0].startswith("window ") and not is_profiled:
            return
        said = self._left.pop(0)
        self._due = self.step + APART
        with (self._folder / "stops").open("a") as stream:
            stream.write(f"{said},{self.step},{int(is_profiled)},{time.time_ns()}\n")
        with subprocess.Popen(["/bin/sh", "-c", f"sleep {SECONDS}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)


class MonitoredHook(torch.autograd.Function):
    """Is at "backward" in its backward."""

    stopper: Stopper

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        MonitoredHook.stopper.at("backward")
        return gradients[0]


class Net(nn.Module):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self._at = at

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.relu(layer(inputs))
        self._at("forward")
        out: Tensor = MonitoredHook.apply(inputs)  # type: ignore[no-untyped-call]
        return out


class Descent(torch.optim.SGD):
    """Is at "optimizer" in its step."""

    at: Callable[[str], None]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.at("optimizer")
        super().step()


def batches(stopper: Stopper) -> Iterator[Tensor]:
    while True:
        stopper.at("data_wait")
        yield torch.ones(4, 64)


def main(folder: Path, rank: int, moments: list[str]) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    mine = int(os.environ.get("RANK", "0"))
    stopper = MonitoredHook.stopper = Stopper(folder, moments if mine == rank else [])
    torch.manual_seed(0)
    net = Net(stopper.at)
    model = DistributedDataParallel(net) if world_size > 1 else net
    optimizer = Descent(model.parameters(), lr=1e-3)
    optimizer.at = stopper.at  # type: ignore[method-assign]
    is_done = torch.zeros(1)
    with pacecar.attach(
        model, optimizer, tune="off", run_dir=folder, socket=str(folder / "nobody"), job="stopped",
        overhead_budget=1.0, window_interval_steps=3, hang_seconds=1.0,
    ) as pacer:  # fmt: skip
        for step, batch in enumerate(pacer.data(batches(stopper))):
            stopper.step = step
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
            stopper.at("outside")
            is_done.fill_(float(stopper.is_done or step >= GIVE_UP_STEPS))
            if world_size > 1:
                dist.broadcast(is_done, rank)
            if is_done:
                break
    if world_size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
