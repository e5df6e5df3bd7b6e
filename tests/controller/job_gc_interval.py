"""One rank of a job that holds a million objects, whose collections are scheduled; prints what it saw as JSON.

Run by test_gc_interval_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as the
argument.  The objects are a replay buffer: each step makes some and drops as many of the oldest.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.controller.knobs.garbage_collection import GcIntervalActuator, HostAndDeviceMemory
from pacecar.records import Verdict
from tests.kit.rank_jobs import DEVICE, RANK, records_of, run_jobs

HELD = 1_000_000
MADE = 12_000
BLOCK_STEPS = 96
STEPS_MAX = 1000
KEPT_STEPS = 64
"""Steps at intervals of any length, more than a half of a pair takes: what was found is kept."""

REST_SECONDS = 0.02
"""Each step's computing on a device: the processor is free."""


class Job:
    """A small model, and the objects beside it."""

    def __init__(self, held: int = HELD) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(DEVICE)
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        chunks = held // MADE + 5 * RANK  # ranks hold different amounts, so they would collect at different steps
        self.buffer = deque(([[number] for number in range(MADE)] for _ in range(chunks)), maxlen=chunks)
        self.step = 0
        self.losses: list[str] = []

    def train(self) -> None:
        """Train one step."""
        generator = torch.Generator().manual_seed(100 * self.step + RANK)
        self.buffer.append([[number] for number in range(MADE)])  # and the oldest go
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 16, generator=generator).to(DEVICE)).square().mean()
        loss.backward()
        time.sleep(REST_SECONDS)
        self.optimizer.step()
        self.losses.append(loss.item().hex())
        self.step += 1


def interleaved(pairs: int, interval: int) -> dict[str, Any]:
    """Train blocks without the knob and with it, in the order A B B A; return the seconds of each block's steps."""
    job, knob = Job(), GcIntervalActuator(HostAndDeviceMemory(DEVICE))
    refused, thresholds = knob.refusal(), gc.get_threshold()
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    for arm in "ABBA" * (pairs // 2):
        knob.apply(interval if arm == "B" else 0)
        dist.barrier()
        begun = time.monotonic()
        for _ in range(BLOCK_STEPS):
            job.train()
            knob.on_boundary()
        dist.barrier()
        seconds[arm].append((time.monotonic() - begun) / BLOCK_STEPS)
    knob.close()
    return {"refused": refused, "seconds": seconds, "is_undone": gc.get_threshold() == thresholds}


def tuned() -> dict[str, Any]:
    """Let the tuner find it, and train as many steps without it; return what each did and the losses."""
    found = _train("exact", STEPS_MAX)
    return {"exact": found, "off": _train("off", len(found["losses"]))}


def _train(mode: str, steps_max: int) -> dict[str, Any]:
    os.environ["PACECAR_TUNE_KNOBS"] = "gc_interval"
    job, thresholds = Job(), gc.get_threshold()
    tuning = {"remember": False, "crew": False, "windows": False, "exploration_budget": 0.2, "overhead_budget": 1.0}
    values: list[int | None] = []
    with pacecar.attach(job.model, job.optimizer, tune=mode, **tuning) as pacer:
        records = records_of(pacer)
        while job.step < steps_max and not (len(values) > KEPT_STEPS and all(values[-KEPT_STEPS:])):
            job.train()
            values.append(pacer.knobs.values.get("gc_interval"))
        refused = {} if pacer._tuner is None else pacer._tuner.refused
        status = None if pacer._tuner is None or pacer._tuner.status is None else pacer._tuner.status.detail
        verdicts = [(r.outcome, r.measured_gain_ratio, r.gain_low, r.reason) for r in records if isinstance(r, Verdict)]
    return {
        "losses": job.losses,
        "values": values,
        "verdicts": verdicts,
        "refused": refused,
        "status": status,
        "are_thresholds_back": gc.get_threshold() == thresholds,
    }


def main(options: dict[str, Any]) -> dict[str, Any]:
    if "pairs" in options:
        return interleaved(options["pairs"], options.get("interval", 16))
    return tuned()


if __name__ == "__main__":
    run_jobs(main, seconds=300.0)
