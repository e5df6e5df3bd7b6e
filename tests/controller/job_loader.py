"""One rank of a small DDP job that waits for its data; prints its step times and what it trained on as JSON.

Run by test_loader_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as argument.
How long a job runs is said in run_on.py.

With `counted` nobody sleeps: a sample costs the loop `seconds`, shared by the workers, when its index is drawn, which
is where the loop waits.  What pacecar sees of the job's pace is then the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import pacecar
from pacecar.records import Verdict

sys.path.insert(0, str(Path(__file__).parent))  # the tests are no package
from loaders import Numbers  # type: ignore[import-not-found]
from run_on import Ear, RunOn, counted_clock  # type: ignore[import-not-found]

COMPUTE_SECONDS = 0.005

_run_on = RunOn()


class Paid(DistributedSampler[Any]):
    """Calls `pay` for each index that is drawn."""

    pay: Callable[[], None] = staticmethod(lambda: None)

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.pay()
            yield index


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    clock = counted_clock(is_counted=options.get("counted", False))
    data = Numbers(options["epoch"] * 8, 0.0 if clock else options["seconds"])
    sampler = Paid(data, shuffle=True)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=options["workers"])
    walls: list[float] = []
    seen = hashlib.blake2b()
    os.environ["PACECAR_TUNE_KNOBS"] = "loader_workers,loader_prefetch"
    settings = {"windows": False} if clock else {}
    now = time.perf_counter_ns if clock is None else clock.monotonic_ns

    def wait() -> None:
        workers = pacer.knobs.values.get("loader_workers", options["workers"])
        clock.advance(round(options["seconds"] * 1e9 / max(1, workers)))  # type: ignore[union-attr]

    with pacecar.attach(model, optimizer, tune=options["tune"], remember=False, crew=False, **settings) as pacer:
        ear = Ear(pacer)
        if clock is not None:
            sampler.pay = wait
        epoch = 0
        is_over = False
        while not is_over:
            sampler.set_epoch(epoch)
            epoch += 1
            begin = now()
            for batch in pacer.data(loader):
                seen.update(batch.numpy().tobytes())
                if clock is None:
                    time.sleep(COMPUTE_SECONDS)
                else:
                    clock.advance(round(COMPUTE_SECONDS * 1e9))
                model(batch[:, None].float()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                walls.append((now() - begin) / 1e9)
                begin = now()
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
        "verdicts": [[r.knob, r.outcome, r.reason] for r in ear.records if isinstance(r, Verdict)],
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
