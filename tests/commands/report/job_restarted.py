"""One rank of a job that is killed at planted steps and resumes from its checkpoint; run by test_restarted_jobs.py.

Arguments: a folder for the checkpoint, the number of steps, the steps between checkpoints, and the steps after which
rank 1 kills itself, each once, as soon as the records of all ranks are on disk.  RUN_DIR is the run folder.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar

FOLDER, STEPS, EVERY, KILLS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
RANK, WORLD, RUN = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(os.environ["RUN_DIR"])
STEP_SECONDS = 0.02
RECORD_SECONDS_MAX, RANK_SECONDS_MAX = 20.0, 60.0


def die(step: int) -> None:
    """Kill this process once all ranks' records of `step` are written; not twice for one step."""
    marker = FOLDER / f"killed{step}"
    if RANK != 1 or marker.exists():
        return
    marker.touch()
    files = [RUN / f"rank{rank}.jsonl" for rank in range(WORLD)]
    give_up = time.monotonic() + RECORD_SECONDS_MAX
    while not all(file.exists() and f'"global_step":{step},' in file.read_text() for file in files):
        if time.monotonic() > give_up:
            raise TimeoutError(f"not all ranks have written their record of step {step}")
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train from the checkpoint, if there is one, to the last step."""
    faulthandler.dump_traceback_later(RANK_SECONDS_MAX, exit=True)
    torch.set_num_threads(1)
    # Not torchrun's store: its agent keeps the addresses of the first attempt (torch 2.13), and gloo may hang on them.
    store = f"file://{FOLDER}/store{os.environ.get('ATTEMPT', os.environ.get('TORCHELASTIC_RESTART_COUNT'))}"
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=WORLD)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    saved = FOLDER / "checkpoint.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with pacecar.attach(model, optimizer, run_dir=RUN, windows=False, overhead_budget=1.0) as pacer:
        while step < STEPS:
            time.sleep(STEP_SECONDS)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % EVERY == 0:
                with pacer.checkpoint():
                    if RANK == 0:
                        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                        torch.save(state, FOLDER / "new.pt")
                        (FOLDER / "new.pt").replace(saved)
                    dist.barrier()
            if step in KILLS:
                die(step)
    dist.barrier()


main()
