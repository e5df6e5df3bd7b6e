"""One rank of a gloo job in which rank 1 gets slow in its forward; ends when rank 0 has told a window's verdict.

Its argument is the folder where rank 0 says that the job may end.  Prints JSON lines: records of late ranks, what was
recorded, and what is left.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import pacecar
from pacecar.records import JobRecord, StepRecord, Straggler
from tests.kit.hook_inspection import hook_of

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ONSET, STEPS_MAX, LAYERS = 40, 1000, 4
ENDING_SECONDS = 5.0
SLOW_SECONDS, SLOW_STEPS = 0.05, 3
"""Rank 1 sleeps so long in its forward, at least so many usual steps: awake it would make rank 0 slow, too."""


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Told:
    """A logger."""

    dropped = 0

    def __init__(self) -> None:
        self.disturbed: list[int] = []

    def put(self, record: JobRecord) -> None:
        if isinstance(record, StepRecord) and record.disturbed:
            self.disturbed.append(record.step)
        if isinstance(record, Straggler):
            say(rank=record.late_rank, cause=record.cause, step=record.step, ended=record.ended, why=record.evidence)
            if "all ranks recorded" in record.evidence:
                (FOLDER / "end").touch()

    def close(self, *_: object) -> None:
        pass


class Recordings(logging.Handler):
    """Notes what a recording says of itself."""

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"recorded steps (\d+) to (\d+), (\d+) rows: (\d+) bytes", record.getMessage())
        if found is not None:
            say(recorded=[int(each) for each in found.groups()])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    log = logging.getLogger("pacecar")
    log.setLevel(logging.DEBUG)
    log.addHandler(Recordings())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    if KIND == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in [*model.children(), model]:
            fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    told = Told()
    pacer = pacecar.attach(
        model, optimizer, tune="off", overhead_budget=0.9, loggers=[told],
    )  # fmt: skip
    hook = hook_of(pacer)
    x = torch.randn(32, 128)
    ends = torch.zeros(1)
    costs, lasted = [0], list[float]()
    for step in range(STEPS_MAX):
        if step == ONSET and RANK == 1:
            for module in model.modules():
                if isinstance(module, Layer):
                    module.seconds = max(SLOW_SECONDS, SLOW_STEPS * median(lasted)) / LAYERS
        was_traced, begun = hook.is_traced, time.monotonic()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if hook.is_traced and not was_traced:
            costs = [hook.budget.cost_ns]
        elif was_traced and not hook.is_traced:
            costs.append(hook.budget.cost_ns)
        lasted.append(time.monotonic() - begun)
        ends[0] = (FOLDER / "end").exists()
        dist.all_reduce(ends)
        if ends[0]:
            break
    hook.records.flush()
    listened = listening()
    pacer.close()
    deadline = time.monotonic() + ENDING_SECONDS
    while (threads := ours()) and time.monotonic() < deadline:  # a thread may be about to end
        time.sleep(0.05)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    say(
        step=step,
        cost_ns=costs[-1] - costs[0],
        threads=threads,
        children=children,
        disturbed=told.disturbed,
        closed=len(listened - listening()),
    )
    dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


def ours() -> list[str]:
    """Return the names of pacecar's threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pacecar")]


def listening() -> set[str]:
    """Return the TCP sockets at which this process listens."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"} & mine


if __name__ == "__main__":
    main()
