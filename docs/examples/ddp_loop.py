"""A plain DDP loop with pacecar: a DataLoader, accumulation without a needless all-reduce, bfloat16, a learning rate.

torchrun --nproc_per_node 2 docs/examples/ddp_loop.py
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pacecar

ACCUMULATED = 2


def main() -> None:
    """Fit a small network to sums of its inputs; a step is one update of ACCUMULATED batches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1)).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x = torch.randn(4096, 32)
    data = TensorDataset(x, x[:, :8].sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    done, epoch, loss = 0, 0, torch.zeros(())
    with pacecar.attach(model, optimizer, tune="exact") as pacer:
        while done < steps:
            sampler.set_epoch(epoch)
            for number, (rows, wanted) in enumerate(pacer.data(loader), start=1):
                is_last = number % ACCUMULATED == 0
                with contextlib.nullcontext() if is_last else model.no_sync():
                    with torch.autocast(device.type, dtype=torch.bfloat16):
                        loss = nn.functional.mse_loss(model(rows.to(device)).float(), wanted.to(device))
                    (loss / ACCUMULATED).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    done += 1
                if done == steps:
                    break
            epoch += 1
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}; knobs at the end {pacer.knobs.values}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
