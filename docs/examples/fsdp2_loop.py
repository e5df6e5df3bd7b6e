"""A plain FSDP2 loop with pacecar, as in torchtitan: `attach` after `fully_shard`.

torchrun --nproc_per_node 2 docs/examples/fsdp2_loop.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pacecar


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and what the block adds."""
        out: torch.Tensor = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return out


def main() -> None:
    """Train a small network to repeat its input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 128), *(Block(128) for _ in range(4)), nn.Linear(128, 256)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in list(model)[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = [torch.randint(0, 256, (8, 64), device=device) for _ in range(16)]
    loss = torch.zeros(())
    with pacecar.attach(model, optimizer, tune="exact") as pacer:
        for ids in pacer.data([texts[step % len(texts)] for step in range(steps)]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}; knobs at the end {pacer.knobs.values}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
