"""One rank of a DDP job whose blocks are checkpointed, or can be; prints what it saw as JSON.

Run by test_checkpointed_blocks_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options
as the argument.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.config import TuneConfig
from pacecar.controller.knobs.activation_checkpointing.knob import open_checkpointed_blocks
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator
from pacecar.controller.knobs.batch.oom_safe_trial import OomSafeTrial, TrialPeers
from pacecar.kernel_files.memory import rows_bytes
from pacecar.records import Verdict
from tests.kit.larger_size import LargerSize
from tests.kit.rank_jobs import DEVICE, RANK, WORLD, do_models_agree, records_of, run_jobs

WIDTH, SAMPLES, BLOCKS = 128, 256, 8
BLOCK_STEPS = 12

M_MMAP_THRESHOLD = -3
"""mallopt(3): from this size on, freed memory goes back to the kernel, so that what is resident is in use."""


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.back(self.drop(torch.tanh(self.into(x))))
        return out


def make(
    *, wraps: bool, dropout: float = 0.1, static_graph: bool = False
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(BLOCKS)]
    net = nn.Sequential(*[checkpoint_wrapper(b) if wraps else b for b in blocks]).to(DEVICE)
    model = DistributedDataParallel(net, static_graph=static_graph)
    torch.manual_seed(1 + RANK)  # dropout's
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


class Loop:
    """Trains a model step by step."""

    def __init__(self, *, wraps: bool) -> None:
        self.model, self.optimizer = make(wraps=wraps)
        self.losses: list[str] = []

    def loss(self) -> Tensor:
        generator = torch.Generator().manual_seed(100 * len(self.losses) + RANK)
        loss: Tensor = self.model(torch.randn(SAMPLES, WIDTH, generator=generator).to(DEVICE)).square().mean()
        return loss

    def train(self) -> None:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item().hex())


def held_bytes() -> int:
    """Return what this process holds on the device that it trains on."""
    return torch.cuda.memory_allocated(DEVICE) if DEVICE.type == "cuda" else resident_bytes()


def resident_bytes(row: str = "VmRSS") -> int:
    with open("/proc/self/status") as status:
        return rows_bytes(status.read(), row) or 0


def interleaved(pairs: int) -> dict[str, Any]:
    """Train with all blocks checkpointed and with none, in the order A B B A; return seconds and memory."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    loop, charged = Loop(wraps=True), [0]
    knob = open_checkpointed_blocks(loop.model, TuneConfig(), WORLD, sizes=(), charge=charged.append)
    assert knob is not None
    for _ in range(4):
        loop.train()
        knob.on_boundary()
    refused, costs = knob.refusal(), knob.costs()
    held = {}
    for value in (BLOCKS, BLOCKS // 2, 0):
        knob.apply(value)
        before = held_bytes()
        loss = loop.loss()
        held[value] = [held_bytes() - before, knob.kept_bytes(value)]
        loss.backward()
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    for arm in "ABBA" * (pairs // 2):
        knob.apply(0 if arm == "B" else BLOCKS)
        dist.barrier()
        begun = time.monotonic()
        for _ in range(BLOCK_STEPS):
            loop.train()
        dist.barrier()
        seconds[arm].append((time.monotonic() - begun) / BLOCK_STEPS)
    return {
        "refused": refused,
        "seconds": seconds,
        "held": list(held.items()),
        "expected": None if costs is None else costs.again_ratio,
        "charged_ns": sum(charged),
    }


def tuned(steps_max: int, mode: str) -> dict[str, Any]:
    """Let the tuner find it; return what it did and the losses."""
    loop = Loop(wraps=True)
    tuning = {
        "remember": False, "crew": False, "windows": False, "exploration_budget": 0.2, "overhead_budget": 0.1,
        "knobs": ("checkpointed_blocks",), "socket": "/nonexistent/pacecar.sock",
    }  # fmt: skip
    values, keys = [], list(loop.model.state_dict())
    with pacecar.attach(loop.model, loop.optimizer, tune=mode, **tuning) as pacer:
        records = records_of(pacer)
        while len(loop.losses) < steps_max:
            loop.train()
            values.append(pacer.knobs.values.get("checkpointed_blocks"))
        refused = {} if pacer._tuner is None else pacer._tuner.refused
        status = None if pacer._tuner is None or pacer._tuner.status is None else pacer._tuner.status.detail
        verdicts = [
            (r.outcome, r.measured_gain_ratio, r.gain_low, r.gain_high, r.reason)
            for r in records
            if isinstance(r, Verdict)
        ]
    return {
        "losses": loop.losses,
        "values": values,
        "verdicts": verdicts,
        "refused": refused,
        "status": status,
        "is_named_alike": list(loop.model.state_dict()) == keys,
        "do_agree": do_models_agree(torch.cat([p.detach().flatten() for p in loop.model.parameters()])),
    }


def turned(kind: str, *, is_turned: bool) -> dict[str, Any]:
    """Train a model of some kind, and turn the knob if asked to; return losses and gradients."""
    if kind == "fsdp2":
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*[checkpoint_wrapper(Block(0.1)) for _ in range(BLOCKS)]).to(DEVICE)
        mesh = init_device_mesh(DEVICE.type, (WORLD,))
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh)
        torch.manual_seed(1 + RANK)
    else:
        model, _ = make(wraps=kind == "wrapped", static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    knob = open_checkpointed_blocks(model, TuneConfig(), WORLD, sizes=[LargerSize()], charge=lambda ns: None)
    assert knob is not None
    seen = []
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(16, WIDTH, device=DEVICE)).square().mean()
        loss.backward()
        gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        seen.append([loss.item().hex(), *(g.sum().item().hex() for g in gradients if g is not None)])
        optimizer.step()
        if is_turned:
            knob.on_boundary()
        if is_turned and step >= 4:
            knob.apply((0, 6, 2, 8)[step % 4])
    return {"seen": seen, "refused": knob.refusal() if is_turned else None}


class Peers(TrialPeers):
    """The other ranks, asked by an all-reduce."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def any_rank(self, is_so: bool) -> bool:
        answer = torch.tensor([float(is_so)])
        dist.all_reduce(answer)
        return bool(answer)

    def reverted(self, reason: str) -> None:
        self.reasons.append(reason)


CAPPED_SAMPLES, SMALL = 8192, 1024


def capped(blocks: int, room_mib: int) -> dict[str, Any]:
    """Try the whole batch in one micro-batch under a limit of memory, with `blocks` checkpointed; return what came."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    model, optimizer = make(wraps=False, dropout=0.0)
    batcher = MicroBatcher(model, SMALL)
    trials, peers = OomSafeTrial(model, batcher), Peers()
    trials.join(peers)
    micro = MicroBatchActuator(model, batcher, TuneConfig(), trials)
    knob = open_checkpointed_blocks(model, TuneConfig(), WORLD, sizes=[micro], charge=lambda cost: None)
    assert knob is not None
    batcher.samples.checkpointed = knob.value
    losses, generator = [], torch.Generator().manual_seed(RANK)

    def train() -> None:
        batch = torch.randn(CAPPED_SAMPLES, WIDTH, generator=generator)
        optimizer.zero_grad()
        losses.append(trials.train_batch(batch, lambda part: model(part).square().mean()).item())
        optimizer.step()

    for _ in range(4):
        train()
        knob.on_boundary()
    refused, costs = knob.refusal(), knob.costs()
    resource.setrlimit(resource.RLIMIT_DATA, (resident_bytes("VmData") + room_mib * 2**20, resource.RLIM_INFINITY))
    knob.apply(blocks)
    micro.apply(CAPPED_SAMPLES)
    for _ in range(3):
        train()
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {
        "refused": refused,
        "sample_bytes": None if costs is None else costs.sample_bytes,
        "micro_batch": micro.value(),
        "reasons": peers.reasons,
        "losses": losses,
        "do_agree": do_models_agree(torch.cat([p.detach().flatten() for p in model.parameters()])),
    }


WIDE, FEW, MANY = 16_384, 32, 128
"""Numbers that a hungry block keeps of each sample, and samples of the first micro-batch and of the batch."""


class Hungry(nn.Module):
    """Keeps much of a sample and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bend = nn.Parameter(torch.ones(WIDE)), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bend(x[:, :1] * self.weight).mean(1, keepdim=True)


def joint(steps_max: int, room_mib: int, seconds: float) -> dict[str, Any]:
    """Let the tuner find what fits into a limit of memory, where each micro-batch costs `seconds` whatever its size."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[Hungry() for _ in range(BLOCKS)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tuning = {
        "remember": False, "crew": False, "windows": False, "exploration_budget": 0.3, "overhead_budget": 0.1,
        "knobs": ("micro_batch", "checkpointed_blocks"), "socket": "/nonexistent/pacecar.sock",
    }  # fmt: skip
    losses, values = [], []

    def loss_of(part: Tensor) -> Tensor:
        time.sleep(seconds)
        loss: Tensor = (model(part) - 1).square().mean()
        return loss

    with pacecar.attach(model, optimizer, tune="exact", micro_batch=FEW, **tuning) as pacer:
        records = records_of(pacer)
        generator = torch.Generator().manual_seed(RANK)
        while len(losses) < steps_max:
            optimizer.zero_grad()
            losses.append(pacer.train_batch(torch.randn(MANY, 8, generator=generator), loss_of).item())
            optimizer.step()
            values.append([pacer.knobs.values.get(knob) for knob in ("micro_batch", "checkpointed_blocks")])
            if len(losses) == 8:
                most = resident_bytes("VmData") + room_mib * 2**20
                resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        refused = {} if pacer._tuner is None else pacer._tuner.refused
        status = None if pacer._tuner is None or pacer._tuner.status is None else pacer._tuner.status.detail
        verdicts = [(r.knob, r.outcome, r.measured_gain_ratio, r.reason) for r in records if isinstance(r, Verdict)]
    return {
        "losses": losses,
        "values": values,
        "refused": refused,
        "status": status,
        "verdicts": verdicts,
        "do_agree": do_models_agree(torch.cat([p.detach().flatten() for p in model.parameters()])),
    }


def main(options: dict[str, Any]) -> dict[str, Any]:
    if "seconds" in options:
        return joint(options["steps"], options["room_mib"], options["seconds"])
    if "pairs" in options:
        return interleaved(options["pairs"])
    if "kind" in options:
        return turned(options["kind"], is_turned=options["is_turned"])
    if "room_mib" in options:
        return capped(options["blocks"], options["room_mib"])
    return tuned(options["steps"], options.get("mode", "exact"))


if __name__ == "__main__":
    os.environ.pop("PACECAR_TUNE_KNOBS", None)
    run_jobs(main, seconds=300.0)
