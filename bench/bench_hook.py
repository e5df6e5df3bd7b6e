"""What does the hook cost a job?  Blocks of steps with and without it, interleaved, in one process and on two ranks.

Two figures that need not agree: the ratio of the medians of steps with and without the hook (all its effects, but as
noisy as the machine), and `overhead_ns`, what the hook itself says it spent on the step path (median of undisturbed
steps).
Windows are off in the first line of each job and on in the second, with what a window cost in all.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import HookConfig
from pacecar.profiler.hook.hook import Hook, StepListener, make_hello
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.hook.step_records import FinishedStep

BLOCKS = 5
BLOCK_STEPS = 25
TIMEOUT_SECONDS = 120


class Noted(StepListener):
    """Keeps the steps that were measured."""

    def __init__(self, steps: list[FinishedStep]) -> None:
        self._steps = steps

    def wants_boundary(self) -> bool:
        return True

    def on_boundary(self, step: FinishedStep | CountedStep | None) -> None:
        if isinstance(step, FinishedStep):
            self._steps.append(step)


def train(model: nn.Module, batch: torch.Tensor, *, micro_batches: int, windows: bool) -> str:
    """Train in blocks, every second one with a hook; return a line of figures."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    paces: dict[bool, list[float]] = {False: [], True: []}
    steps: list[FinishedStep] = []

    for block in range(2 * BLOCKS + 1):  # the first block warms up and is not counted
        is_hooked = block % 2 == 1
        config = HookConfig(windows=windows, overhead_budget=1.0, window_interval_steps=10)
        hook = Hook(model, optimizer, hello=make_hello(model), config=config)
        if is_hooked:
            hook.start(Noted(steps))
        for _ in range(BLOCK_STEPS):
            begun = time.perf_counter_ns()
            for _ in range(micro_batches):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if block:
                paces[is_hooked].append((time.perf_counter_ns() - begun) / 1000)
        hook.close()
    plain, hooked = statistics.median(paces[False]), statistics.median(paces[True])
    low, _, high = statistics.quantiles(paces[False], n=4)
    records = [step.settled() for step in steps]
    own = [r.overhead_ns / 1000 for r in records if not r.disturbed and r.step > 0]
    line = (
        f"plain {plain:8.0f} us (quartiles {low:.0f} to {high:.0f})  hooked {hooked:8.0f} us"
        f"  ratio {hooked / plain:6.4f}"
        f"  overhead_ns {statistics.median(own):6.1f} us"
    )
    exact = [(r, after) for r, after in itertools.pairwise(records) if r.source == "exact"]
    if exact:
        price = statistics.median(r.overhead_ns + after.overhead_ns for r, after in exact) / 1000
        line += f"  window {price:8.0f} us ({len(exact)} taken)"
    return line


def mlp(width: int, layers: int) -> nn.Module:
    """Return layers enough for a step of a few milliseconds."""
    torch.manual_seed(1)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


def rank_main(rank: int, store: str) -> None:
    """Train on one of two gloo ranks; rank 0 prints."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(mlp(256, 8))
    for windows in (False, True):
        line = train(model, torch.ones(64, 256), micro_batches=4, windows=windows)
        if rank == 0:
            show("two gloo ranks, 4 micro-batches", windows, line)
    dist.destroy_process_group()


def show(job: str, windows: bool, line: str) -> None:
    sys.stdout.write(f"{job:<32} windows {'on ' if windows else 'off'}  {line}\n")
    sys.stdout.flush()


def main() -> None:
    for windows in (False, True):
        line = train(mlp(256, 8), torch.ones(64, 256), micro_batches=1, windows=windows)
        show("one process, MLP", windows, line)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [subprocess.Popen([sys.executable, __file__, str(rank), store]) for rank in range(2)]
        try:
            for process in ranks:
                process.wait(TIMEOUT_SECONDS)
        finally:
            for process in ranks:
                process.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        rank_main(int(sys.argv[1]), sys.argv[2])
    else:
        main()
