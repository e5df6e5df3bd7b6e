"""One rank of a small DDP job of which rank 1 needs longer for each sample; prints losses and pace as JSON.

Run by test_work_share_ranks.py: RANK, WORLD_SIZE and STORE in the environment, a JSON list of options as argument.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import pacecar
from pacecar.records import Decision, Verdict
from tests.kit.rank_jobs import RANK, WORLD, do_models_agree, records_of, run_jobs

BATCH = 16


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers = torch.arange(BATCH * WORLD * 100 + 40).float()
    data = TensorDataset(torch.sin(numbers[:, None] * torch.arange(1, 9)), torch.cos(numbers)[:, None])
    sampler = RandomSampler(data) if options.get("random") else DistributedSampler(data, seed=3)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=options.get("workers", 0))
    os.environ["PACECAR_TUNE_KNOBS"] = "work_share"
    losses: list[float] = []
    walls: list[float] = []
    seconds = options["seconds"] * (2 if options.get("slow", 1) == RANK else 1)

    def loss_fn(slice_: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(seconds * len(slice_[0]))
        loss: torch.Tensor = nn.functional.mse_loss(model(slice_[0]), slice_[1])
        return loss

    with pacecar.attach(
        model, optimizer, tune=options["tune"], remember=False, crew=False, windows=False, overhead_budget=0.05
    ) as pacer:
        records = records_of(pacer)
        sizes: list[int] = []
        epoch = 0
        while len(walls) < options["steps"]:
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)
            epoch += 1
            begin = time.perf_counter()
            for batch in pacer.data(loader):
                optimizer.zero_grad()
                if options.get("plain"):
                    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    count = torch.ones(len(batch[0]), dtype=torch.int64) if options.get("count") else None
                    loss = pacer.train_batch(batch, loss_fn, count=count)
                optimizer.step()
                sizes.append(len(batch[0]))
                losses.append(loss.item() * len(batch[0]))
                walls.append(time.perf_counter() - begin)
                begin = time.perf_counter()
                if len(walls) >= options["steps"]:
                    break
        refused = {} if pacer._tuner is None else pacer._tuner.refused
        status = None if pacer._tuner is None else pacer._tuner.status
        detail = "" if status is None else f"{status.state}: {status.detail}"
        value = pacer.knobs.values.get("work_share")
    total = torch.tensor([losses, [float(size) for size in sizes]], dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "losses": (total[0] / total[1]).tolist(),
        "samples": total[1].tolist(),
        "sizes": sizes,
        "pace": median(walls[-60:]),
        "value": value,
        "refused": refused,
        "detail": detail,
        "agree": do_models_agree(torch.cat([p.detach().flatten() for p in model.parameters()])),
        "reasons": [r.reason for r in records if isinstance(r, (Decision, Verdict))],
    }


if __name__ == "__main__":
    run_jobs(main)
