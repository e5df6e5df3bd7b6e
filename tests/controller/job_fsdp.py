"""One rank of an FSDP2 job on a CPU mesh whose knobs are turned; prints what it saw as JSON.

Run by test_fsdp.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as the argument.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pacecar
from pacecar.config import TuneConfig
from pacecar.controller.knobs import memory_limit
from pacecar.controller.knobs.fsdp2 import fsdp_knobs
from pacecar.controller.policy.hand_orders import Order
from pacecar.kernel_files.reader import KernelFiles
from pacecar.records import Verdict
from tests.kit.rank_jobs import RANK, WORLD, records_of, run_jobs

TRIED_STEPS = 8
"""How long something else is in force before a tuned job ends."""


def make(options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), *[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)])
    mesh = init_device_mesh("cpu", (WORLD,))
    kept = {"reshard_after_forward": False} if options.get("keeps") else {}
    for block in list(net)[1:]:
        fully_shard(block, mesh=mesh, **kept)
    fully_shard(net, mesh=mesh, **kept)
    return net, torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, micro: int, *, amid: bool = False) -> str:
    """Return a hash of this rank's shards of gradients and weights after one step; `amid`: evaluate amid it."""
    generator = torch.Generator().manual_seed(100 * step + RANK)
    optimizer.zero_grad()
    for _ in range(micro):
        net(torch.randn(8, 16, generator=generator)).square().mean().backward()
    digest = hashlib.blake2b()
    if amid:
        with torch.no_grad():
            net(torch.ones(2, 16))
    for p in optimizer.param_groups[0]["params"]:  # the shards, whatever is gathered
        digest.update(p.grad.to_local().numpy().tobytes())
    optimizer.step()
    for p in optimizer.param_groups[0]["params"]:
        digest.update(p.detach().to_local().numpy().tobytes())
    return digest.hexdigest()


def evaluate_other(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Evaluate with other weights, as of an average, put the own ones back; return how many parameters are gathered."""
    shards = [p.to_local() for p in optimizer.param_groups[0]["params"]]
    own = [shard.clone() for shard in shards]
    with torch.no_grad():
        for shard in shards:
            shard.mul_(0.5)
        net(torch.ones(2, 16))
        gathered = sum(not hasattr(p, "to_local") for p in net.parameters())
        for shard, before in zip(shards, own, strict=True):
            shard.copy_(before)
    net.reshard()  # the root keeps its parameters by itself
    return gathered


def attached(steps_max: int) -> dict[str, Any]:
    """Let the tuner turn the knobs until it has tried something for a while; compare with a job that nobody tunes."""
    net, optimizer = make({})
    seen: list[str] = []
    values: list[list[tuple[str, int]]] = []
    os.environ["PACECAR_TUNE_KNOBS"] = "fsdp_prefetch,fsdp_reshard"
    tuning = {"remember": False, "crew": False, "windows": False, "exploration_budget": 0.5, "warmup_steps": 4}
    with pacecar.attach(net, optimizer, tune="exact", **tuning) as pacer:
        while len(seen) < steps_max and sum(at != values[0] for at in values) < TRIED_STEPS:
            seen.append(train(net, optimizer, len(seen), 1))
            values.append(sorted(pacer.knobs.values.items()))  # the same on all ranks, so all end together
        refused = {} if pacer._tuner is None else pacer._tuner.refused
    net, optimizer = make({})
    expected = [train(net, optimizer, step, 1) for step in range(len(seen))]
    return {"is_equal": seen == expected, "values": values, "refused": refused}


def shrinks(steps_max: int) -> dict[str, Any]:
    """Keep the parameters of all blocks; then memory becomes short on the last rank, for a while."""
    net, optimizer = make({})
    seen: list[str] = []
    values: list[int | None] = []
    said: list[str] = []
    log = logging.Handler()
    log.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pacecar").addHandler(log)
    os.environ["PACECAR_TUNE_KNOBS"] = "fsdp_reshard"
    tuning = {"remember": False, "crew": False, "windows": False, "warmup_steps": 1000}
    with pacecar.attach(net, optimizer, tune="exact", **tuning) as pacer:
        records = records_of(pacer)

        def train_until(value: int, more: int = 0) -> None:
            ends = steps_max
            while len(seen) < min(ends, steps_max):
                seen.append(train(net, optimizer, len(seen), 1))
                values.append(pacer.knobs.values.get("fsdp_reshard"))
                if values[-1] == value and ends == steps_max:
                    ends = len(seen) + more

        train_until(5, 12)
        if RANK == 0:
            pacer._tuner._orders.accept(Order("set", {"fsdp_reshard": 0}, "by hand", lambda *_: None))
        train_until(0, 8)
        if RANK == WORLD - 1:
            proc = Path(tempfile.mkdtemp())
            (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 30 kB\n")
            memory_limit.KernelFiles = lambda: KernelFiles(proc=proc)  # type: ignore[misc, assignment]
        train_until(5, 20)
    memory_limit.KernelFiles = KernelFiles  # type: ignore[misc]
    net, optimizer = make({})
    expected = [train(net, optimizer, step, 1) for step in range(len(seen))]
    return {
        "is_equal": seen == expected,
        "values": values,
        "said": [line for line in said if "goes back" in line],
        "verdicts": [record.reason for record in records if isinstance(record, Verdict)],
    }


def held_after_forward(net: nn.Module, reshard: Any) -> dict[int, int]:
    """Return for each value of the knob the bytes of whole parameters held between forward and backward."""
    held = {}
    home = reshard.value()
    for value in reshard.domain():
        reshard.apply(value)
        loss = net(torch.ones(2, 16)).square().mean()
        whole = {
            id(storage): storage.nbytes()
            for module in reshard._shards.blocks
            for p in module.parameters()
            if not hasattr(p, "to_local")  # a whole one, not a shard
            for storage in [p.untyped_storage()]
        }
        held[value] = sum(whole.values())
        loss.backward()
        net.zero_grad()
    reshard.apply(home)
    return held


def main(options: dict[str, Any]) -> dict[str, Any]:
    micro = options.get("micro", 1)
    if options.get("shrinks"):
        return shrinks(options["shrinks"])
    if options.get("tuned"):
        return attached(options["tuned"])
    amid, swaps = bool(options.get("amid")), bool(options.get("swaps"))
    net, optimizer = make(options)
    expected = []
    for step in range(12):
        if swaps and step >= 2:
            gathered = evaluate_other(net, optimizer)
        expected.append(train(net, optimizer, step, micro, amid=amid))
    net, optimizer = make(options)
    knobs = fsdp_knobs(net, TuneConfig())
    seen = [train(net, optimizer, step, micro, amid=amid) for step in range(2)]
    answer: dict[str, Any] = {
        "refused": [knob.refusal() for knob in knobs],
        "domains": [knob.domain() for knob in knobs],
        "values": [knob.value() for knob in knobs],
        "layouts": [knob.layout() for knob in knobs],
    }
    flags = [
        [g._reshard_after_forward for g in m._get_fsdp_state()._fsdp_param_groups] for m in knobs[0]._shards.modules
    ]
    prefetch, reshard = knobs
    turns = [
        (prefetch, 1),
        (reshard, 0),
        (prefetch, 4),
        (prefetch, 2),
        (reshard, 3),
        (prefetch, 0),
        (reshard, 1),
        (reshard, 5),
    ]
    for step in range(2, 12):
        if step - 2 < len(turns):
            knob, value = turns[step - 2]
            knob.apply(value)
            assert knob.value() == value
        with torch.no_grad():
            if options.get("evaluates"):
                net(torch.ones(2, 16))
        if swaps:
            assert evaluate_other(net, optimizer) == gathered
        seen.append(train(net, optimizer, step, micro, amid=amid))
    answer["is_equal"] = seen == expected
    answer["held_bytes"] = sorted(held_after_forward(net, reshard).items())
    for knob, value in zip(knobs, answer["values"], strict=True):
        knob.apply(value)
    answer["is_undone"] = flags == [
        [g._reshard_after_forward for g in m._get_fsdp_state()._fsdp_param_groups] for m in prefetch._shards.modules
    ]
    return answer


if __name__ == "__main__":
    run_jobs(main)
