"""One rank of plain loops: FSDP2 as torchtitan uses it, FSDP1, DDP; run by test_plain_loops.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from turning import OPTIONS, Ear, main

import pacecar
from tests.kit.rank_jobs import RANK, WORLD


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return out


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(64, 32), *(Block() for _ in range(4)), nn.Linear(32, 64))
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
    for block in list(net)[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def train(*, kind: str, tune: str | None, steps: int = 60, accumulation: int = 2) -> dict[str, Any]:
    """Train as torchtitan's loop does: accumulate, clip, step, schedule."""
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    ear = Ear()
    pacer = None if tune is None else pacecar.attach(model, optimizer, tune=tune, **OPTIONS)
    if pacer is not None:
        ear.follow(pacer)
    generator = torch.Generator().manual_seed(RANK)
    texts = [torch.randint(0, 64, (8, 12), generator=generator) for _ in range(steps * accumulation)]
    batches = iter(texts if pacer is None else pacer.data(texts))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            if kind == "fsdp2":
                model.set_requires_gradient_sync(micro == accumulation - 1)  # type: ignore[operator]
            ids = next(batches)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / accumulation
            loss.backward()
            total += loss.item()
        if kind == "fsdp1":
            model.clip_grad_norm_(1.0)  # type: ignore[operator]
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(total)
    if pacer is not None:
        pacer.close()
    stand_in = nn.Linear(1, 1)  # shards differ between ranks; losses and a rank's own shard are compared instead
    with torch.no_grad():
        for parameter in stand_in.parameters():
            parameter.zero_()
    own = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    flat = torch.cat([p.detach().flatten() for p in own])
    return ear.answer(stand_in) | {
        "history": losses, "weights": flat.double().tolist()[::37], "version": torch.__version__.partition("+")[0],
    }  # fmt: skip


if __name__ == "__main__":
    main({"train": train})
