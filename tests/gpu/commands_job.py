"""The training job of `test_commands`: one rank with DistributedDataParallel, attached with pacecar.

    torchrun's variables, then    python -m tests.gpu.commands_job FOLDER cuda

Trains until FOLDER/stop is there, and tells in FOLDER/progress.json how far it is and how long its steps take.  Then it
traces five more steps with torch.profiler into FOLDER/trace.json, and writes what it measured to FOLDER/result.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

import pacecar

JOB = "gpu-commands"
TELL_SECONDS = 0.25
RECENT_SECONDS = 3.0
TRACED_STEPS = 5


def write(path: Path, told: dict[str, Any]) -> None:
    """Replace a file in one go."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(told))
    os.replace(draft, path)


class Trainer:
    """A model of some layers that is trained on random numbers."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        width, batch = (4096, 2048) if device.type == "cuda" else (256, 64)
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
        self.model = DistributedDataParallel(
            nn.Sequential(*layers).to(device), device_ids=[0] if device.type == "cuda" else None
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.data = torch.randn(batch, width)
        if device.type == "cuda":
            self.data = self.data.pin_memory()
        self.device = device

    def step(self) -> None:
        """Train on the batch."""
        batch = self.data.to(self.device, non_blocking=True)
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def train(trainer: Trainer, folder: Path, seconds: float) -> list[float]:
    """Train until told to stop, and return when steps ended."""
    begun = time.perf_counter()
    ends = [begun]
    told = begun
    while not (folder / "stop").exists() and ends[-1] - begun < seconds:
        trainer.step()
        ends.append(time.perf_counter())
        if ends[-1] - told > TELL_SECONDS:
            told = ends[-1]
            recent = [end for end in ends if end > told - RECENT_SECONDS]
            pace = None if len(recent) < 2 else (recent[-1] - recent[0]) / (len(recent) - 1) * 1e3
            write(folder / "progress.json", {"steps": len(ends) - 1, "pace_ms": pace, "seconds": told - begun})
    trainer.sync()
    return ends


def trace(trainer: Trainer, path: Path) -> None:
    """Trace some steps."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (trainer.device.type == "cuda")
    for _ in range(3):
        trainer.step()
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=TRACED_STEPS)) as profiler:
        for number in range(TRACED_STEPS + 1):
            trainer.step()
            trainer.sync()
            if number < TRACED_STEPS:
                profiler.step()
    profiler.export_chrome_trace(str(path))


def main() -> None:
    """Train, trace, and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    trainer = Trainer(device)
    pacer = pacecar.attach(
        trainer.model, trainer.optimizer, tune="off", job=JOB, run_dir=options.folder / "run"
    )  # fmt: skip
    ends = train(trainer, options.folder, options.seconds)
    pacer.close()
    trace(trainer, options.folder / "trace.json")
    steps_ms = [(after - before) * 1e3 for before, after in pairwise(ends)]
    settled = steps_ms[len(steps_ms) // 5 :]
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
    write(
        options.folder / "result.json",
        {
            "steps": len(steps_ms), "mean_ms": sum(settled) / len(settled), "median_ms": median(settled),
            "inert_because": getattr(pacer, "inert_because", None), "memory_bytes": memory,
            "name": torch.cuda.get_device_name(device) if is_gpu else None,
        },
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
