"""One rank of a test's job: joins the ranks' group, runs what the test asks for, and prints what it saw as JSON.

RANK, WORLD_SIZE and STORE (a file where the ranks meet) are in the environment.  Each job's options are in a JSON list,
the script's argument; the jobs run one after the other.  JOB_DEVICE is where they train, by default the processor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

__all__ = ["DEVICE", "RANK", "WORLD", "do_models_agree", "join_group", "records_of", "run_jobs"]

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device(os.environ.get("JOB_DEVICE", "cpu"))


def join_group(*, seconds: float = 60.0) -> None:
    """Join the group of the job: gloo's, or NCCL's where a rank has a GPU for itself."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if DEVICE.type == "cuda" and WORLD == 1 else "gloo",
        init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=WORLD,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip


def run_jobs(job: Callable[[Any], Any], *, seconds: float = 60.0) -> NoReturn:
    """Run `job` with the options of each job, print the answers and end the process.

    Not by the interpreter's end: gloo's worker may still be letting go of DDP's last all-reduce, for which it needs the
    GIL, and python aborts a thread that asks for it then (pytorch issue 190489).
    """
    join_group(seconds=seconds)
    answers = [job(options) for options in json.loads(sys.argv[1])]
    dist.barrier()
    print(json.dumps(answers), flush=True)  # noqa: T201  this is what the test reads
    os._exit(0)


def records_of(pacer: Any) -> list[Any]:
    """Return a list to which everything is added that hook and tuner of an active `pacer` record from now on."""
    records: list[Any] = []
    sink = pacer._run.sinks[0]  # each of them gets every record
    put = sink.put
    sink.put = lambda record: (records.append(record), put(record))[1]
    return records


def do_models_agree(weights: torch.Tensor) -> bool:
    """Return whether `weights` are equal on all ranks, to the last bit; all ranks call it."""
    gathered = [torch.empty_like(weights) for _ in range(WORLD)]
    dist.all_gather(gathered, weights)
    return all(torch.equal(gathered[0], other) for other in gathered)
