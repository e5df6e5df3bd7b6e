"""One rank of a job that changes DDP's bucket size live and compares every gradient with a fresh DDP's.

Run by test_ddp_buckets.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as
the argument; the jobs run one after the other.
"""

from __future__ import annotations

import resource
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import TuneConfig
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.ddp.buckets import BucketActuator
from pacecar.controller.knobs.ddp.reducer import DdpReducer
from tests.kit.rank_jobs import run_jobs

KIB = 1024


class Net(nn.Module):
    """A residual net with layers of different sizes; `skip` leaves its last layer unused."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, w), nn.Tanh(), nn.Linear(w, 64)) for w in range(32, 320, 32)
        )
        self.unused = nn.Linear(64, 64)
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x if self.skip else self.unused(x)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def train_step(ddp: Any, optimizer: Any, batches: list[torch.Tensor]) -> list[torch.Tensor | None]:
    optimizer.zero_grad()
    for index, batch in enumerate(batches):
        with ddp.no_sync() if index < len(batches) - 1 else nullcontext():
            (ddp(batch).square().mean() / len(batches)).backward()
    grads = [None if p.grad is None else p.grad.clone() for p in ddp.module.parameters()]
    optimizer.step()
    return grads


def make(cap: int | None, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = Net(skip=options.get("unused", False))
    ddp = DistributedDataParallel(
        net,
        bucket_cap_mb=None if cap is None else cap / KIB / KIB,
        gradient_as_bucket_view=options.get("view", False),
        find_unused_parameters=options.get("unused", False),
        static_graph=options.get("static", False),
    )
    if options.get("hook"):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ddp.register_comm_hook(None, allreduce_hook)
    return ddp, torch.optim.AdamW(net.parameters(), lr=1e-3)


def compare(live: Any, sizes: list[int], switches: int, options: dict[str, Any]) -> dict[str, Any]:
    """Switch `live` before every step; a fresh DDP of each size runs the same steps beside it."""
    ddp, optimizer, actuator = live
    fresh = {size: make(size, options) for size in sizes}
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    micro = options.get("micro", 1)
    for warm, warm_optimizer in fresh.values():  # to their final buckets, then back to the same weights
        for _ in range(3):
            train_step(warm, warm_optimizer, [torch.ones(8, 64)] * micro)
    worst, unequal, durations = 0.0, 0, []
    for index in range(switches):
        size = sizes[index % len(sizes)]
        begin = time.perf_counter_ns()
        actuator.apply(size)
        durations.append(time.perf_counter_ns() - begin)
        for _ in range(1 + index % 2):  # one step after a switch has fresh buckets, the second rebuilds them
            batches = [torch.randn(8, 64, generator=generator) for _ in range(micro)]
            reference, _ = fresh[size]
            reference.load_state_dict(ddp.state_dict())
            theirs = train_step(reference, torch.optim.SGD(reference.parameters(), lr=0.0), batches)
            for mine, other in zip(train_step(ddp, optimizer, batches), theirs, strict=True):
                if mine is None or other is None:
                    assert mine is other
                    continue
                unequal += int(not torch.equal(mine, other))
                worst = max(worst, float((mine - other).norm() / other.norm().clamp_min(1e-30)))
    return {"unequal": unequal, "worst": worst, "apply_us": sorted(durations)[len(durations) // 2] / 1000}


def growth(live: Any, sizes: list[int], switches: int, micro: int) -> dict[str, Any]:
    """Switch many times; return live Reducers and resident memory, before and after."""
    ddp, optimizer, actuator = live
    reducers: list[weakref.ref[Any]] = []
    resident: list[int] = []
    for index in range(switches):
        reducers.append(weakref.ref(ddp.reducer))
        actuator.apply(sizes[index % len(sizes)])
        train_step(ddp, optimizer, [torch.ones(8, 64)] * micro)
        resident.append(resident_bytes())
    return {
        "reducers": sum(r() is not None for r in reducers),
        "resident_early": max(resident[15:30]),
        "resident_late": min(resident[-15:]),
    }


def main(options: dict[str, Any]) -> dict[str, Any]:
    micro = options.get("micro", 1)
    ddp, optimizer = make(None, options)
    model = torch.compile(ddp, backend="eager") if options.get("compiled") else ddp
    actuator = BucketActuator(TuneConfig(bucket_bytes_min=16 * KIB), DdpReducer(model))
    early = actuator.refusal()
    for _ in range(3):
        train_step(ddp, optimizer, [torch.randn(8, 64)] * micro)
    refusal = actuator.refusal()
    result: dict[str, Any] = {
        "early": early,
        "refusal": refusal,
        "domain": actuator.domain(),
        "layout": actuator.layout(),
    }
    if options.get("compiled"):
        for _ in range(2):
            train_step(ddp, optimizer, [torch.randn(8, 64)] * micro)
            model(torch.randn(8, 64)).sum().backward()
    result["gradient_bytes"] = actuator._reducer.gradient_bytes()
    result["recipe"] = actuator._reducer.recipe
    if refusal is not None:
        return result
    sizes = [s for s in actuator.domain() if s < 2 * KIB * KIB]
    live = (ddp, optimizer, actuator)
    result.update(compare(live, sizes, options["switches"], options))
    if options.get("growth"):
        result.update(growth(live, sizes, options["growth"], micro))
    actuator.apply(25 * KIB * KIB)
    train_step(ddp, optimizer, [torch.ones(8, 64)] * micro)
    train_step(ddp, optimizer, [torch.ones(8, 64)] * micro)
    result["buckets_back"] = str(ddp._get_ddp_logging_data()["bucket_sizes"])
    if options.get("held"):
        held = ddp.reducer
        try:
            actuator.apply(sizes[0])
        except ActuatorError as error:
            result["held"] = str(error)
        del held
        result["value_after_held"] = actuator.value()
        train_step(ddp, optimizer, [torch.ones(8, 64)] * micro)
    return result


if __name__ == "__main__":
    run_jobs(main)
