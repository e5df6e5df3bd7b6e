"""One rank of a two-rank gloo DDP job; started by test_hook_ddp.py.  Arguments: output, hooked."""

import os
import sys
from contextlib import nullcontext

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import HookConfig
from pacecar.profiler.hook.hook import Hook, make_hello
from pacecar.profiler.transport.run_log import RunLog


def main(output, hooked):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(128, 128), nn.ReLU())])
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hello = make_hello(model, environ={}, job="ddp")
    log = RunLog(output, hello)
    config = HookConfig(overhead_budget=1.0, window_interval_steps=10)
    hook = Hook(model, optimizer, hello=hello, config=config, sinks=[log])
    if hooked:
        hook.start()
    inputs = torch.randn(8, 32, 128, generator=torch.Generator().manual_seed(rank))
    losses = []
    for step in range(200):
        optimizer.zero_grad()
        micro_batches = 1 + (step % 4 == 3)
        for micro in range(micro_batches):
            with nullcontext() if micro == micro_batches - 1 else model.no_sync():
                loss = (model(inputs[(step + micro) % 8]) - 1.0).square().mean()
                loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    hook.close("finished")
    log.close(10.0)
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result = {"losses": torch.stack(losses).numpy().tobytes(), "parameters": parameters}
    with open(f"{output}/result{rank}", "wb") as stream:
        stream.write(msgspec.msgpack.encode(result))
    dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "hooked")
