"""Training loops of every kind, each as its makers' documentation writes it: the hook must be right about all of them.

A loop is built twice, with and without pacecar, so it draws everything from its own seed.  `step(n)` is one iteration
and returns its loss (None on a pipeline's stages but the last); `model` and `optimizer` are what a user would pass to
`pacecar.attach`.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH = 96
BATCH = 32
COMPILED_MB = 2
"""torch.compile's DDPOptimizer asserts that buckets are not smaller than DDP's first one, of 1 MiB."""


@dataclass
class Loop:
    model: object
    optimizer: object
    step: object
    updates: object = None
    """How many optimizer updates iteration n makes, one where None."""
    micro_batches: int = 1


def net(layers=4, width=WIDTH):
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 8))


def data(rank, width=WIDTH, count=8):
    return torch.randn(count, BATCH, width, generator=torch.Generator().manual_seed(100 + rank))


def ddp_of(model, bucket_mb=0.05, **arguments):
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **arguments)


def off_one(model, x):
    return (model(x) - 1.0).square().mean()


def plain_step(model, optimizer, inputs, autocast=nullcontext, loss_of=off_one, before_update=lambda: None):
    def step(n):
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(model, inputs[n % len(inputs)])
        loss.backward()
        before_update()
        optimizer.step()
        return loss.detach()

    return step


def simple(model, rank, **arguments):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Loop(model, optimizer, plain_step(model, optimizer, data(rank), **arguments))


def ddp(rank):
    return simple(ddp_of(net()), rank)


def accumulation(rank):
    model = ddp_of(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = data(rank)

    def step(n):
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(3):
            with nullcontext() if micro == 2 else model.no_sync():
                loss = off_one(model, inputs[(n + micro) % 8])
                loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Loop(model, optimizer, step, micro_batches=3)


def step_amid_accumulation(rank):
    """Updates after every backward, but empties the gradients only every third: an update each."""
    model = ddp_of(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = data(rank)

    def step(n):
        if n % 3 == 0:
            optimizer.zero_grad()
        for micro in range(2):
            loss = off_one(model, inputs[(n + micro) % 8])
            loss.backward()
            if micro == 0:
                optimizer.step()
        return loss.detach()

    return Loop(model, optimizer, step, micro_batches=2)


def autocast_bf16(rank):
    return simple(ddp_of(net()), rank, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


SKIPPED = (9, 10)
"""Iterations whose gradients overflow, so that the scaler leaves the update out."""


def scaler_that_skips(rank):
    model = ddp_of(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    inputs = data(rank)

    def step(n):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = off_one(model, inputs[n % 8])
        if n in SKIPPED:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Loop(model, optimizer, step, updates=lambda n: 0 if n in SKIPPED else 1)


def compiled_outside(backend):
    def build(rank):
        return simple(torch.compile(ddp_of(net(2), COMPILED_MB), backend=backend), rank)

    return build


def compiled_inside(backend):
    def build(rank):
        return simple(ddp_of(torch.compile(net(2), backend=backend), COMPILED_MB), rank)

    return build


def compiled_in_place(backend):
    def build(rank):
        model = net(2)
        model.compile(backend=backend)
        return simple(ddp_of(model, COMPILED_MB), rank)

    return build


def fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu")
    )
    return simple(model, rank)


def fsdp2(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return simple(model, rank)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = net(3), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def activation_checkpointing(rank):
    return simple(ddp_of(Checkpointed()), rank)


def two_optimizers(rank):
    """A user passes the one that steps last."""
    model = ddp_of(net())
    parameters = list(model.parameters())
    first = torch.optim.SGD(parameters[:4], lr=1e-3)
    last = torch.optim.AdamW(parameters[4:], lr=1e-3)
    inputs = data(rank)

    def step(n):
        first.zero_grad()
        last.zero_grad()
        loss = off_one(model, inputs[n % 8])
        loss.backward()
        first.step()
        last.step()
        return loss.detach()

    return Loop(model, last, step)


def closure(rank):
    model = ddp_of(net(2), COMPILED_MB)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0.0, tolerance_change=0.0, lr=0.1)
    inputs = data(rank)

    def step(n):
        def evaluate():
            optimizer.zero_grad()
            loss = off_one(model, inputs[n % 8])
            loss.backward()
            return loss

        return optimizer.step(evaluate).detach()

    return Loop(model, optimizer, step, micro_batches=3)


class Named(nn.Module):
    """Says its loss and logits by name, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, inputs=None, labels=None):
        logits = self.net(inputs)
        return {"loss": (logits - labels).square().mean(), "logits": logits, "past": None}


def named_outputs(rank):
    target = torch.ones(BATCH, 8)
    return simple(ddp_of(Named()), rank, loss_of=lambda model, x: model(inputs=x, labels=target)["loss"])


def clipping(rank):
    model = ddp_of(net())
    return simple(model, rank, before_update=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def pipeline(schedule_name, stages=2):
    """`stages` stages; on more ranks than that each stage is sharded (FSDP2) over the rest."""

    def build(rank):
        from torch.distributed import pipelining
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        replicas = dist.get_world_size() // stages
        mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("data", "stage"))
        stage = mesh.get_local_rank("stage")
        whole = net(4)
        middle = len(whole) // 2
        part = whole[:middle] if stage == 0 else whole[middle:]
        if replicas > 1:
            fully_shard(part, mesh=mesh["data"])
        held = pipelining.PipelineStage(part, stage, stages, torch.device("cpu"), group=mesh.get_group("stage"))
        schedule = getattr(pipelining, schedule_name)(
            held, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean()
        )
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
        inputs = data(mesh.get_local_rank("data"))

        def step(n):
            optimizer.zero_grad()
            losses = []
            if stage == 0:
                schedule.step(inputs[n % 8])
            else:
                schedule.step(target=torch.ones(BATCH, 8), losses=losses)
            optimizer.step()
            return torch.stack(losses).mean().detach() if losses else None

        return Loop(part, optimizer, step, micro_batches=4)

    return build


KINDS = {
    "ddp": ddp,
    "accumulation": accumulation,
    "step_amid_accumulation": step_amid_accumulation,
    "autocast_bf16": autocast_bf16,
    "scaler_that_skips": scaler_that_skips,
    "activation_checkpointing": activation_checkpointing,
    "two_optimizers": two_optimizers,
    "closure": closure,
    "named_outputs": named_outputs,
    "clipping": clipping,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "gpipe": pipeline("ScheduleGPipe"),
    "1f1b": pipeline("Schedule1F1B"),
    "compile_ddp_eager": compiled_outside("eager"),
    "compile_ddp_aot_eager": compiled_outside("aot_eager"),
    "compile_ddp_inductor": compiled_outside("inductor"),
    "ddp_compile_eager": compiled_inside("eager"),
    "ddp_compile_aot_eager": compiled_inside("aot_eager"),
    "ddp_compile_inductor": compiled_inside("inductor"),
    "compile_in_place_aot_eager": compiled_in_place("aot_eager"),
}
