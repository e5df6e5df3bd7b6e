"""One rank of a small DDP job that trains on one wire and lets pacecar's groups use another (PACECARS_WIRE).

After `when` steps, in a trial, rank 0 asks the test through a file (ASK) to change that wire, and waits until it did.
The last line says this rank's slowest step, what was in force in each step, and how the tuner ended.
"""

from __future__ import annotations

import json
import logging
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

import pacecar

sys.path.insert(0, str(Path(__file__).parent))
from job_uneven import Restless

RANK = int(os.environ["RANK"])
STEP_SECONDS = 0.02


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(7)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(6)])
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pacer: Any = None
    begun = time.monotonic()
    if options["tune"]:
        pacer = pacecar.attach(
            model, optimizer, tune="exact", socket="/nonexistent/socket", warmup_steps=2, bucket_bytes_min=4096,
            job="two hosts", windows=False, meet_seconds=60.0,
        )  # fmt: skip
    attached_seconds = time.monotonic() - begun
    tuner = None if pacer is None else pacer._tuner
    if tuner is not None and RANK == 0:
        tuner._policy = Restless()
    draw = torch.Generator().manual_seed(RANK)
    losses, walls, values = [], [], []
    has_asked = False
    for step in range(options["steps"]):
        if RANK == 0 and tuner is not None and not has_asked and step >= options["when"]:
            is_in_trial = tuner._proven is not None and tuner._proven != tuner._switcher.agreed()
            if is_in_trial or step >= options["when"] + 60:
                has_asked = True
                ask = Path(os.environ["ASK"])
                ask.touch()
                while ask.exists():
                    time.sleep(0.01)
        dist.barrier()  # rank 0's wait counts in no step
        begun = time.monotonic()
        values.append(None if tuner is None or not tuner._switcher.live() else list(tuner._switcher.values()))
        optimizer.zero_grad()
        loss = model(torch.randn(12, 48, generator=draw)).square().mean()
        loss.backward()
        time.sleep(STEP_SECONDS)
        optimizer.step()
        losses.append(float(loss.detach()).hex())
        walls.append(time.monotonic() - begun)
    begun = time.monotonic()
    frozen = None if tuner is None else tuner.agreement.frozen
    state, detail = (None, None) if tuner is None else (tuner.state, tuner.status.detail)
    epoch = None if tuner is None else tuner.knobs.epoch
    if pacer is not None:
        pacer.close()
    return {
        "losses": losses, "slowest": max(walls), "slowest_at": walls.index(max(walls)), "values": values,
        "frozen": frozen, "state": state, "detail": detail, "epoch": epoch, "asked": has_asked,
        "attached_seconds": attached_seconds, "closed_seconds": time.monotonic() - begun,
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="LOG %(name)s %(levelname)s %(message)s")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    if "PACECARS_WIRE" in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["PACECARS_WIRE"]
    answer = main(json.loads(sys.argv[1]))
    print(json.dumps(answer), flush=True)  # noqa: T201  this is what the test reads
    dist.barrier()
    if RANK == 0:
        time.sleep(0.2)  # the others' worker may still be in the barrier
    os._exit(0)
