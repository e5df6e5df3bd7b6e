"""One rank of a small DDP job of which rank 1 needs longer for each sample; prints losses and pace as JSON.

Run by test_work_share_ranks.py: RANK, WORLD_SIZE and STORE in the environment, a JSON list of options as argument.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from itertools import groupby
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import pacecar
from pacecar.controller.policy.hand_orders import Order, OrderError
from pacecar.records import Decision, Verdict
from tests.kit.cpu_quota import cpu_quota
from tests.kit.rank_jobs import DEVICE, RANK, WORLD, do_models_agree, records_of, run_jobs

TURN_STEPS = 40
"""Steps between orders; ranks take up to 16 of them to agree."""

RUN_STEPS_MIN, SETTLING = 12, 2
"""Steps of a run that count, and those at its beginning that do not."""


def pass_time(seconds: float, *, burn: bool) -> None:
    """Compute (or wait, so that ranks do not take the processors from each other) for this long."""
    if not burn:
        time.sleep(seconds)
        return
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def take_turns(tuner: Any, step: int) -> None:
    """On rank 0 order even shares and unequal ones in turns, as people do by `pacecar tune set`."""
    if RANK == 0 and step >= 2 * TURN_STEPS and step % TURN_STEPS == 0:
        wanted = {"work_share": int(tuner._actuators["work_share"].value() == 0)}
        with suppress(OrderError):  # the last one is still being carried out
            tuner._orders.accept(Order("set", wanted, "by hand", lambda state, detail: None))


def paces(walls: list[float], sizes: list[int], even: int) -> dict[str, list[float]]:
    """Return the median seconds of a step in each run of steps with even shares, and in each with unequal ones."""
    found: dict[str, list[float]] = {"even": [], "unequal": []}
    for is_even, run in groupby(range(len(walls)), lambda step: sizes[step] == even):
        steps = list(run)[SETTLING:]
        if len(steps) >= RUN_STEPS_MIN:
            found["even" if is_even else "unequal"].append(median(walls[step] for step in steps))
    return found


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch_size = options.get("batch", 16)
    numbers = torch.arange(batch_size * WORLD * 100 + options.get("tail", 40)).float()
    data = TensorDataset(torch.sin(numbers[:, None] * torch.arange(1, 9)), torch.cos(numbers)[:, None])
    sampler = RandomSampler(data) if options.get("random") else DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size, sampler=sampler, num_workers=options.get("workers", 0))
    os.environ["PACECAR_TUNE_KNOBS"] = "work_share"
    losses: list[float] = []
    walls: list[float] = []
    quota = options.get("quota")
    seconds = options["seconds"] * (2 if options.get("slow", 1) == RANK and quota is None else 1)

    def loss_fn(slice_: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pass_time(seconds * len(slice_[0]), burn=quota is not None)
        loss: torch.Tensor = nn.functional.mse_loss(model(slice_[0].to(DEVICE)), slice_[1].to(DEVICE))
        return loss

    with (
        nullcontext() if quota is None or RANK == 0 else cpu_quota(quota, period_us=10_000),
        pacecar.attach(
            model,
            optimizer,
            tune=options["tune"],
            remember=False,
            crew=bool(options.get("by_hand")),
            windows=False,
            overhead_budget=0.05,
        ) as pacer,
    ):
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
                    loss = nn.functional.mse_loss(model(batch[0].to(DEVICE)), batch[1].to(DEVICE))
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    count = torch.ones(len(batch[0]), dtype=torch.int64) if options.get("count") else None
                    loss = pacer.train_batch(batch, loss_fn, count=count)
                optimizer.step()
                sizes.append(len(batch[0]))
                losses.append(loss.item() * len(batch[0]))
                walls.append(time.perf_counter() - begin)
                if options.get("by_hand"):
                    take_turns(pacer._tuner, len(walls))
                uneven = options.get("freeze")  # so many steps with unequal shares, and all is frozen
                if uneven and RANK == 1 and pacer._tuner is not None and batch_size not in sizes[-uneven:]:
                    pacer._tuner.freeze("for a test")
                begin = time.perf_counter()
                if len(walls) >= options["steps"]:
                    break
        refused = {} if pacer._tuner is None else pacer._tuner.refused
        status = None if pacer._tuner is None else pacer._tuner.status
        detail = "" if status is None else f"{status.state}: {status.detail}"
        value = pacer.knobs.values.get("work_share")
    after = {len(batch[0]) for batch in pacer.data(loader)}
    total = torch.tensor([losses, [float(size) for size in sizes]], dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "losses": (total[0] / total[1]).tolist(),
        "samples": total[1].tolist(),
        "sizes": sizes,
        "pace": median(walls[-60:]),
        "paces": paces(walls, sizes, batch_size),
        "value": value,
        "sizes_after": sorted(after),
        "refused": refused,
        "detail": detail,
        "agree": do_models_agree(torch.cat([p.detach().flatten() for p in model.parameters()])),
        "reasons": [r.reason for r in records if isinstance(r, (Decision, Verdict))],
    }


if __name__ == "__main__":
    run_jobs(main)
