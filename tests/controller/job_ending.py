"""One rank of a small DDP job with pacecar attached that ends in one of the ways in which jobs end every day.

    normal       the last step, `close`, `destroy_process_group`, the end
    no close     neither of the two
    destroy      `destroy_process_group` first, `close` after it
    late close   rank 1 closes half a second after rank 0 has ended
    early close  rank 1 closes after 30 steps and trains on
    exception    the script of rank 1 ends in an exception; rank 0's training fails by that
    exit         rank 1 calls `sys.exit(3)`
    kill         rank 1 is killed
    term         rank 1 gets SIGTERM

Run by test_endings.py with the way as the argument, by hand or under torchrun.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar

RANK = int(os.environ["RANK"])
STEPS, ENDS_AT = 60, 40

torch.set_num_threads(1)
logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="LOG %(name)s %(levelname)s %(message)s")
way = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
torch.manual_seed(7)
model = DistributedDataParallel(nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)]), bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
pacer = pacecar.attach(
    model, optimizer, socket=os.environ["SOCKET"], warmup_steps=2, bucket_bytes_min=4096, job="ending", crew=True,
    crew_period_steps=2,
)  # fmt: skip


class PlannedError(Exception):
    """What ends the script."""


def end() -> None:
    if way == "exception":
        raise PlannedError
    if way == "exit":
        sys.exit(3)
    if way == "early close":
        pacer.close()
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(way)
    if number is not None:
        os.kill(os.getpid(), number)


for step in range(STEPS):
    optimizer.zero_grad()
    try:
        model(torch.randn(8, 48)).square().mean().backward()
    except RuntimeError:
        sys.exit("the training failed")
    optimizer.step()
    time.sleep(0.01)
    if RANK == 1 and step == ENDS_AT:
        end()
if way == "late close" and RANK == 1:
    time.sleep(0.5)
if way == "destroy":
    dist.destroy_process_group()
if way != "no close":
    pacer.close()
if way in ("normal", "early close"):
    dist.destroy_process_group()
