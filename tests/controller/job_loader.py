"""One rank of a small DDP job that waits for its data; prints its step times and what it trained on as JSON.

Run by test_loader_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as argument.
How long a job runs is said in run_on.py.

With `counted` nobody sleeps: a sample costs the loop `seconds`, shared by the workers, when its index is drawn, which
is where the loop waits.  What pacecar sees of the job's pace is then the same on every machine.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import pacecar
from pacecar.records import Verdict
from tests.controller.loaders import Numbers
from tests.controller.run_on import RunOn, counted_clock
from tests.kit.rank_jobs import records_of, run_jobs

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
        records = records_of(pacer)
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
                is_over = _run_on.is_over(options, len(walls), records)
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
        "verdicts": [[r.knob, r.outcome, r.reason] for r in records if isinstance(r, Verdict)],
        "weights": [p.item() for p in model.parameters()],
    }


if __name__ == "__main__":
    run_jobs(main)
