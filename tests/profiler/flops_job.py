"""One rank of a gloo job of two; started by test_flops_ranks.py.  Arguments: output, how it is sharded."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import HookConfig
from pacecar.profiler.hook.hook import Hook, make_hello
from pacecar.records import Vitals

STEPS = 12


class Sink:
    """Keeps the vitals."""

    def __init__(self):
        self.vitals = []
        self.dropped = 0

    def put(self, record):
        if isinstance(record, Vitals):
            self.vitals.append(record)

    def close(self, timeout_seconds):
        """Hold nothing."""


def shard(how):
    torch.manual_seed(3)
    net = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(64, 64), nn.ReLU())])
    if how == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.01)
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(how, rank, *, count):
    model = shard(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = Sink()
    config = HookConfig(overhead_budget=1.0, windows=False, count_flops=count)
    hook = Hook(model, optimizer, hello=make_hello(model, environ={}, job=how), config=config, sinks=[sink])
    hook.start()
    inputs = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(rank))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = (inputs[step % 4][:24], inputs[step % 4][24:])
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with nullcontext() if is_last or how == "fsdp2" else model.no_sync():
                loss = (model(part) - 1.0).square().mean()
                loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    hook.close()
    return torch.stack(losses).numpy().tobytes(), sink.vitals


def main(output, how):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (losses, vitals), (plain_losses, _) = train(how, rank, count=True), train(how, rank, count=False)
    last = msgspec.structs.asdict(vitals[-1])
    result = {
        "same": losses == plain_losses,
        **{key: last[key] for key in ("step_flops", "flops_steps", "flops_reason")},
    }
    Path(output, f"result{rank}").write_bytes(msgspec.msgpack.encode(result))
    dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
