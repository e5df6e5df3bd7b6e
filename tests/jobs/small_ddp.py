"""A small real DDP job for tests: `python -m torch.distributed.run ... small_ddp.py --steps N`.

Rank 0 prints one JSON line at the end: losses as hex (so that they compare to the bit) and step times.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar


def build(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def repeated(batches: list[tuple[torch.Tensor, torch.Tensor]], until: Path) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the batches over and over, on all ranks equally often, until a file is there."""
    is_there = torch.zeros(1)
    while not is_there:
        yield from batches
        is_there[0] = until.exists()
        dist.all_reduce(is_there, dist.ReduceOp.MAX)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--passes", type=int, default=1, help="times that a job without pacecar repeats the steps")
    parser.add_argument("--until", type=Path, default=None, help="repeat the steps until this file is there")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep a step, to stretch the run")
    parser.add_argument(
        "--piece-pause", type=float, default=0.0, help="seconds of sleep a micro-batch, so that fewer are faster"
    )
    parser.add_argument("--tune", default="off")
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--run-dir", default=None)
    parser.add_argument("--no-pacecar", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(build(args.width, args.depth), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(100 + dist.get_rank())
    batches = [
        (torch.randn(32, args.width, generator=draw), torch.randint(0, 8, (32,), generator=draw))
        for _ in range(args.steps)
    ]
    losses: list[str] = []
    ends: list[float] = []

    def step(loss: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()).hex())
        ends.append(time.perf_counter())
        time.sleep(args.pause)

    if args.no_pacecar:
        for inputs, targets in batches * args.passes:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            step(loss)
    else:
        with pacecar.attach(
            model, optimizer, tune=args.tune, micro_batch=args.micro_batch, run_dir=args.run_dir, **args.options
        ) as pacer:
            for batch in pacer.data(batches if args.until is None else repeated(batches, args.until)):
                loss = torch.zeros(())
                for inputs, targets in pacer.microbatches(batch):
                    time.sleep(args.piece_pause)
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    pacer.backward(loss)
                step(loss)
    if dist.get_rank() == 0:
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        summary = {
            "losses": losses,
            "parameters": parameters.double().sum().item().hex(),
            "step_seconds": [b - a for a, b in itertools.pairwise(ends)],
        }
        print(json.dumps(summary), flush=True)  # noqa: T201  the test reads it
    dist.barrier()
    # Not by the interpreter's end: gloo's worker lets go of the last collective a moment after it is done, and aborts
    # the process if python ends just then (pytorch issue 190489), without pacecar and after destroy_process_group too.
    os._exit(0)


if __name__ == "__main__":
    main()
