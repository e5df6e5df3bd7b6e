"""One rank of a small DDP job that a policy or a baseline tunes; run by test_sampler_policy_ranks.py."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from bench.baselines import BASELINES, tune_by
from pacecar.records import Decision
from tests.kit.rank_jobs import records_of, run_jobs


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
        records = records_of(pacer)
        for step in range(options["steps"]):
            torch.manual_seed(step)
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(int(pacer._tuner.knobs.values.get("bucket_bytes", 0)))
        state = pacer._tuner.state
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    reasons = [record.reason for record in records if isinstance(record, Decision)]
    return {"values": values, "reasons": reasons, "state": state, "weights": hashlib.sha256(weights).hexdigest()}


if __name__ == "__main__":
    run_jobs(main)
