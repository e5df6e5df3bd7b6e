"""One rank of a small DDP job with pacecar attached, that does one of the things after which no rank may vote any more.

    join     each epoch under Join: rank r has 12 + 6 r batches, in the second epoch rank 0 has none
    anew     the process group is destroyed, the job goes on alone, meets again, attaches again
    again    the same, but the pacer of before stays

Run by test_step_boundaries.py: RANK, WORLD_SIZE and STORE in the environment, a list of jobs' options as the argument;
the jobs run one after the other, each with process groups of its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import pacecar
from tests.kit.hook_inspection import hook_of, inspect

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Said(logging.Handler):
    """Keeps what is said aloud, and what was said with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.traced: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        (self.traced if record.exc_info else self.lines).append(record.getMessage())


class Job:
    """Trains, and remembers every loss to the last bit."""

    def __init__(self, number: int, options: dict[str, Any]) -> None:
        self.number, self.options = number, options
        torch.manual_seed(7)
        self.net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        self.draw = torch.Generator().manual_seed(RANK)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.losses: list[str] = []

    def attach(self, model: nn.Module) -> Any:
        if self.options["tune"] is None:
            return None
        return pacecar.attach(
            model, self.optimizer, tune=self.options["tune"], socket="/nonexistent/socket", crew=True, warmup_steps=2,
            bucket_bytes_min=4096, job="parting",
        )  # fmt: skip

    def train(self, model: nn.Module, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = model(torch.randn(16, 64, generator=self.draw)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(float(loss.detach()).hex())


def meet(job: Job, name: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['STORE']}-{job.number}-{name}", rank=RANK, world_size=WORLD,
        timeout=timedelta(seconds=30),
    )  # fmt: skip


def join(job: Job) -> list[Any]:
    meet(job, "first")
    model = DistributedDataParallel(job.net, bucket_cap_mb=0.02)
    pacer = job.attach(model)
    job.train(model, job.options.get("even", 0))
    for steps in (12 + 6 * RANK, 9 * RANK):
        with Join([model]):
            job.train(model, steps)
    return [pacer]


def anew(job: Job) -> list[Any]:
    meet(job, "first")
    model = DistributedDataParallel(job.net, bucket_cap_mb=0.02)
    pacers = [job.attach(model)]
    job.train(model, 30)
    dist.barrier()
    if not job.options.get("keeps"):
        dist.destroy_process_group()
        if pacers[0] is not None:
            pacers[0].close()
    else:
        dist.destroy_process_group()
    job.train(job.net, 10 + 3 * RANK)
    meet(job, "second")
    dist.barrier()
    model = DistributedDataParallel(job.net, bucket_cap_mb=0.02)
    pacers.append(job.attach(model))
    job.train(model, 30)
    return pacers


def main(number: int, options: dict[str, Any]) -> dict[str, Any]:
    said = Said()
    logging.getLogger("pacecar").addHandler(said)
    job = Job(number, options)
    pacers = {"join": join, "anew": anew}[options["what"]](job)
    tuners = [None if p is None else p._tuner for p in pacers]
    is_hooked = bool(options["tune"] and options.get("keeps"))
    steps, failures = (hook_of(pacers[0]).step, inspect(pacers[0]).failures) if is_hooked else (None, None)
    begun = time.monotonic()
    for pacer in reversed(pacers):
        if pacer is not None:
            pacer.close()
    answer = {
        "losses": job.losses,
        "frozen": [None if t is None else t._agreement.frozen for t in tuners],
        "states": [None if t is None else t.state for t in tuners],
        "spaces": [None if t is None else len(t._agreement.spaces) for t in tuners],
        "inert": [None if p is None else p.inert_because for p in pacers],
        "close_seconds": time.monotonic() - begun,
        "hook_steps": steps,
        "hook_failures": failures,
        "said": said.lines,
        "traced": said.traced,
    }
    logging.getLogger("pacecar").removeHandler(said)
    dist.barrier()
    if RANK == 0:
        time.sleep(0.2)  # rank 1's worker may still be in the barrier
    dist.destroy_process_group()
    return answer


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="LOG %(name)s %(levelname)s %(message)s")
    answers = [main(number, options) for number, options in enumerate(json.loads(sys.argv[1]))]
    print(json.dumps(answers), flush=True)  # noqa: T201  this is what the test reads
    os._exit(0)
