"""A script in the manner of small public GPT trainings; it knows nothing of pacecar, and must not.

Settings from the command line, batches cut at random from one array, gradient accumulation with DDP told when to
synchronize, evaluation now and then, a checkpoint of rank 0, everything printed by rank 0.  `--end` says how it ends.
"""

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--checkpoint", default=None)
parser.add_argument("--end", default="well")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--hold", type=int, default=None, help="sleep for a minute after this step, for a signal to come")
parser.add_argument("--subclass", default="")
parser.add_argument("--profile", action="store_true")
parser.add_argument("--skip", type=int, default=None, help="rank 1 leaves the optimizer's step out at this step")
parser.add_argument("--paces", action="store_true")
args = parser.parse_args()

VOCABULARY, LENGTH = 65, 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 4, c // 4).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(c, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, index, targets=None):
        x = self.tokens(index) + self.places(torch.arange(index.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Passing(DistributedDataParallel):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class Own(DistributedDataParallel):
    def forward(self, *inputs, **kwargs):
        return super().forward(*inputs, **kwargs)


is_ddp = int(os.environ.get("RANK", -1)) != -1
if is_ddp:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if is_ddp else (0, 1)
torch.set_num_threads(1)
torch.manual_seed(1337 + rank)
data = torch.randint(0, VOCABULARY, (20_000,), generator=torch.Generator().manual_seed(1))


def get_batch():
    starts = torch.randint(len(data) - LENGTH - 1, (args.batch,))
    x = torch.stack([data[i : i + LENGTH] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + LENGTH] for i in starts])
    return x, y


def learning_rate(step):
    return 1e-3 * (step + 1) / 5 if step < 5 else 5e-4 * (1 + math.cos(math.pi * step / args.steps))


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = torch.stack([model(*get_batch())[1] for _ in range(2)]).mean()
    model.train()
    return found


model = Gpt(args.width, args.layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
if is_ddp:
    model = {"": DistributedDataParallel, "passing": Passing, "own": Own}[args.subclass](model)
raw_model = model.module if is_ddp else model

profiler = torch.profiler.profile() if args.profile else contextlib.nullcontext()
paces = []
with profiler:
    x, y = get_batch()
    for step in range(args.steps):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        if step % 5 == 0:
            losses = estimate_loss()
            if rank == 0:
                print(f"step {step}: val loss {losses:.4f}")
        for micro_step in range(args.accumulate):
            if is_ddp:
                model.require_backward_grad_sync = micro_step == args.accumulate - 1
            _, loss = model(x, y)
            x, y = get_batch()
            (loss / args.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not (rank == 1 and step == args.skip):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        paces.append(time.perf_counter() - begun)
        if is_ddp:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"iter {step}: loss {float(mean).hex()}")
        time.sleep(60.0 if step == args.hold else args.pause)
        if step == args.steps - 2 and args.end != "well":
            sys.stdout.flush()
            if args.end == "raise":
                raise ValueError("no more data\nin two lines")
            if args.end == "exit":
                sys.exit(3)
            if args.end == "os_exit":
                os._exit(4)
            if args.end == "interrupt":
                signal.raise_signal(signal.SIGINT)
            if args.end == "terminate":
                signal.raise_signal(signal.SIGTERM)
            if args.end == "kill" and rank == world - 1:
                signal.raise_signal(signal.SIGKILL)
if args.profile and rank == 0:
    names = {event.key for event in profiler.key_averages()}
    print(f"profiled the whole run: {'Optimizer.step#AdamW.step' in names}, {random.random() < 2}")
if args.checkpoint is not None and rank == 0:
    torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)
if rank == 0:
    print("parameters", float(sum(p.detach().double().sum() for p in raw_model.parameters())).hex())
if args.paces and rank == 0:
    print("paces", *paces)
sys.stdout.flush()
if is_ddp:
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads let go of their work: torch aborts at exit otherwise (pytorch issue 190489)
