"""One rank of a small DDP job that a baseline policy tunes; run by test_baselines_ranks.py."""

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


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for key, value in {"POLICY": options["policy"], "WARMUP_STEPS": "4", "REMEMBER": "false"}.items():
        os.environ[f"PACECAR_TUNE_{key}"] = value
    os.environ["PACECAR_TUNE_BUCKET_BYTES_MIN"] = str(options["bytes_min"])
    values: list[int] = []
    with pacecar.attach(model, optimizer, tune="exact", windows=False, crew=False) as pacer:
        assert pacer._tuner is not None
        for step in range(options["steps"]):
            torch.manual_seed(step)
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(int(pacer._tuner.knobs.values.get("bucket_bytes", 0)))
        state = pacer._tuner.state
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return {"values": values, "state": state, "weights": hashlib.sha256(weights).hexdigest()}


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
