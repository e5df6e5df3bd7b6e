"""One rank of a small DDP job that a policy or a baseline tunes; run by test_sampler_policy_ranks.py."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from bench.baselines import BASELINES, tune_by
from pacecar.records import Decision
from tests.controller.run_on import Ear


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = options["policy"]
    if policy in BASELINES:
        tune_by(policy)
    values: list[int] = []
    with pacecar.attach(
        model, optimizer, tune="exact", policy=None if policy in BASELINES else policy, warmup_steps=4, remember=False,
        bucket_bytes_min=options["bytes_min"], windows=False, crew=False,
    ) as pacer:  # fmt: skip
        assert pacer._tuner is not None
        ear = Ear(pacer)
        for step in range(options["steps"]):
            torch.manual_seed(step)
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(int(pacer._tuner.knobs.values.get("bucket_bytes", 0)))
        state = pacer._tuner.state
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    reasons = [record.reason for record in ear.records if isinstance(record, Decision)]
    return {"values": values, "reasons": reasons, "state": state, "weights": hashlib.sha256(weights).hexdigest()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method="file://" + os.environ["STORE"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    answer = [main(options) for options in json.loads(sys.argv[1])]
    print(json.dumps(answer), flush=True)  # noqa: T201  this is what the test reads
    dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch#190489)
