"""A rank that torchrun starts: trains under pacecar, and in its first life kills itself, stops, or goes slowly on.

    torchrun --max-restarts 1 job_restart.py FOLDER WHAT TUNE [SECONDS]

    kill    rank 1 dies by SIGKILL in step 30 of its first life; the agent restarts all ranks
    stop    rank 1 stops in step 30 for SECONDS; a shell wakes it
    slow    rank 1 takes 50 ms longer a step from step 30 on

Each life writes FOLDER/life<n>-rank<r>.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.records import JobRecord, TunerStatus

STEPS = 80
FALL = 30


def main() -> None:
    folder, what, tune = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # Not the agent's store: it keeps the addresses of the first life (torch 2.13), and gloo may hang on them.
    store = f"file://{folder}/store{life}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(3)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    pacer = None
    if tune != "none":
        pacer = pacecar.attach(
            model, optimizer, tune=tune, socket="/nonexistent/socket", warmup_steps=2, bucket_bytes_min=4096,
            crew_period_steps=2, hang_seconds=1.0,
        )  # fmt: skip
    said: list[str] = []
    if pacer is not None and pacer._tuner is not None:
        voice = pacer._tuner._status
        emit = voice._emit

        def listen(record: JobRecord) -> None:
            if isinstance(record, TunerStatus):
                said.append(f"{record.state}: {record.detail}")
            emit(record)

        voice._emit = listen
    draw = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(1, STEPS + 1):
        if rank == 1 and life == 0 and step == FALL:
            (folder / "fell").write_text(str(time.time()))
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "stop":
                with subprocess.Popen(["sh", "-c", f"sleep {sys.argv[4]}; kill -CONT {os.getpid()}"]):
                    os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1 and what == "slow" and step >= FALL:
            time.sleep(0.05)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    told = {"losses": losses, "ended": time.time(), "world": dist.get_world_size()}
    if pacer is not None:
        tuner = pacer._tuner
        told |= {"frozen": tuner.agreement.frozen, "spaces": len(tuner.agreement.spaces), "state": tuner.state}
        told["said"] = said
        pacer.close()
    (folder / f"life{life}-rank{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
