"""One rank: profiler sessions that end while collectives of the job are out.

job_async_collective.py plain|annotated SESSIONS    the profiler alone; annotated sessions kill a rank
job_async_collective.py attached STEPS              a job of which windows are taken, collectives over each boundary
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.profiler.windows.kineto_window import WindowProfiler
from pacecar.records import StepRecord

OUT = 4
SIZE = 1 << 16


def launch(numbers: torch.Tensor, late_seconds: float) -> list[dist.Work]:
    if dist.get_rank() == 1:
        time.sleep(late_seconds)
    works = [dist.all_reduce(numbers, async_op=True) for _ in range(OUT)]
    return [work for work in works if work is not None]


def profiled(sessions: int, *, is_plain: bool) -> int:
    profiler = WindowProfiler(on_device=False)
    profiler.install()
    numbers, rows = torch.ones(SIZE), 0
    for _ in range(sessions):
        profiler.open(is_plain=is_plain)
        for _ in range(20):
            torch.ones(100).mul_(1.0)
        out = launch(numbers, 0.001)
        rows += len(profiler.close()[0])
        profiler.step_passed()
        heap = [bytearray(200) for _ in range(1000)]  # what was freed is given away again
        for work in out:
            work.wait()
        del heap
        numbers.fill_(1.0)
    return rows


class Windows:
    """Counts the steps that an exact window saw, and of these the ones with communication."""

    dropped = 0

    def __init__(self) -> None:
        self.exact = self.communicated = 0

    def put(self, record: object) -> None:
        if isinstance(record, StepRecord) and record.source == "exact":
            self.exact += 1
            ledger = record.ledger
            self.communicated += ledger.communication_ns > 0

    def close(self, seconds: float) -> None:
        pass


def attached(steps: int) -> int:
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    windows = Windows()
    options = {"tune": "off", "overhead_budget": 1.0, "window_interval_steps": 2}
    pacer = pacecar.attach(model, optimizer, loggers=[windows], **options)
    numbers, out, open_steps = torch.ones(SIZE), list[dist.Work](), 0
    for _ in range(steps):
        heap = [bytearray(200) for _ in range(1000)]
        for work in out:
            work.wait()
        del heap
        loss = model(torch.ones(8, 64)).sum()
        open_steps += torch.autograd._profiler_enabled()
        optimizer.zero_grad()
        loss.backward()
        out = launch(numbers, 0.002)
        optimizer.step()
    for work in out:
        work.wait()
    pacer.close()
    assert windows.communicated == windows.exact, "each window saw the buckets"
    assert open_steps >= 2 * windows.exact, "each session went on for at least a step after its window's"
    return windows.exact


def main(kind: str, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group()  # as new scripts do: then torch calls the backend "undefined"
    said = attached(count) if kind == "attached" else profiled(count, is_plain=kind == "plain")
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
