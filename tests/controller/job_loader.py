"""One rank of a small DDP job that waits for its data; prints its step times and what it trained on as JSON.

Run by test_loader_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as argument.
How long a job runs is said in run_on.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import pacecar

sys.path.insert(0, str(Path(__file__).parent))  # the tests are no package
from loaders import Numbers  # type: ignore[import-not-found]
from run_on import Ear, RunOn  # type: ignore[import-not-found]

COMPUTE_SECONDS = 0.005

_run_on = RunOn()


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = Numbers(options["epoch"] * 8, options["seconds"])
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=options["workers"])
    walls: list[float] = []
    seen = hashlib.blake2b()
    os.environ["PACECAR_TUNE_KNOBS"] = "loader_workers,loader_prefetch"
    with pacecar.attach(model, optimizer, tune=options["tune"], remember=False, crew=False) as pacer:
        ear = Ear(pacer)
        epoch = 0
        is_over = False
        while not is_over:
            sampler.set_epoch(epoch)
            epoch += 1
            begin = time.perf_counter()
            for batch in pacer.data(loader):
                seen.update(batch.numpy().tobytes())
                time.sleep(COMPUTE_SECONDS)
                model(batch[:, None].float()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                walls.append(time.perf_counter() - begin)
                begin = time.perf_counter()
                is_over = _run_on.is_over(options, len(walls), ear)
                if is_over:
                    break
        tuner = pacer._tuner
        knobs = dict(pacer.knobs.values)
        detail = "" if tuner is None or tuner.status is None else f"{tuner.status.state}: {tuner.status.detail}"
        refused = {} if tuner is None else tuner.refused
    return {
        "walls": walls,
        "seen": seen.hexdigest(),
        "knobs": knobs,
        "detail": detail,
        "refused": refused,
        "weights": [p.item() for p in model.parameters()],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method="file://" + os.environ["STORE"], rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=60),
    )  # fmt: skip
    answer = [main(options) for options in json.loads(sys.argv[1])]
    dist.barrier()
    print(json.dumps(answer), flush=True)  # noqa: T201  this is what the test reads
    os._exit(0)  # as in the other jobs: gloo's threads may still need the GIL
