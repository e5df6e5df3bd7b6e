"""Measures whether the hook keeps its budget in jobs with expensive windows; each job runs with and without it.

`ratio` and `most owed` are the hook's own account: the latter is the largest excess of cost over budget * wall time
plus attaching, and must stay under 200 ms.  `cpu` is independent: the processor time per step of all threads, with the
hook over without it, which is meaningful only on an idle machine.

The last table shows the parts of a window's price for steps with more and more rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pacecar.profiler.windows.kineto_window import WindowProfiler
from pacecar.profiler.windows.trace_spans import read_rows

Step = Callable[[], object]
TIMEOUT_SECONDS = 300
ASK_STEPS = 16
"""Steps after which the ranks of a job agree whether the time is up."""


class Dense(nn.Module):
    """A linear layer behind operators that are invisible to autograd."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.inner, self.operators, self.x = nn.Linear(64, 64), operators, torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        play(self.operators, self.x)
        return self.inner(x)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 6, c // 6).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(c, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm_2(x))


@torch.no_grad()
def play(operators: int, x: torch.Tensor) -> None:
    for _ in range(operators):
        x.mul_(1.0)


def looped(model: nn.Module, batch: Callable[[], torch.Tensor], before: Step = int, micro_batches: int = 1) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        before()
        for _ in range(micro_batches):
            model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, optimizer, step


def lbfgs() -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=100, history_size=100, tolerance_grad=0, tolerance_change=0
    )
    x, y = torch.randn(32, 8), torch.randn(32, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return model, optimizer, lambda: optimizer.step(closure)  # type: ignore[arg-type]


COMPILER = "inductor"


def gpt_of(layers: int) -> tuple[nn.Module, list[nn.Module]]:
    """Return a GPT and its blocks."""
    blocks: list[nn.Module] = [Block(192) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(65, 192), *blocks, nn.LayerNorm(192), nn.Linear(192, 65)), blocks


def tokens() -> torch.Tensor:
    return torch.randint(65, (6, 64))


def gpt() -> Any:
    model, _ = gpt_of(6)
    return looped(model, tokens, micro_batches=4)


def small() -> Any:
    model = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(128, 128), nn.ReLU())])
    return looped(model, lambda: torch.ones(64, 128))


def rollout() -> Any:
    x = torch.ones(4)
    return looped(Dense(1), lambda: torch.ones(16, 64), lambda: play(20_000, x))


def fsdp2() -> Any:
    """A GPT whose blocks are sharded one by one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, blocks = gpt_of(6)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh)
    return looped(model, tokens)


class FeedForward(nn.Module):
    """A residual layer; under tensor parallelism all of its operators act on DTensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def tensor_parallel() -> Any:
    """Layers split by columns and rows, with sequence parallelism between them, as in torchtitan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*[FeedForward(192) for _ in range(8)])
    for layer in model:
        plan: dict[str, ParallelStyle] = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(layer, mesh, plan)
    return looped(model, lambda: DTensor.from_local(torch.ones(4, 32, 192), mesh, [Shard(1)]))


def compiled() -> Any:
    """A GPT of two blocks, compiled before the hook attaches, because compiling alone would earn a window."""
    model, _ = gpt_of(2)
    model, optimizer, step = looped(torch.compile(model, backend=COMPILER), tokens)
    step()
    return model, optimizer, step


JOBS: dict[str, Callable[[], Any]] = {
    "lbfgs": lbfgs,
    "gpt": gpt,
    "dense": lambda: looped(Dense(20_000), lambda: torch.ones(16, 64)),
    "rollout": rollout,
    "small": small,
    "fsdp2": fsdp2,
    "tensor_parallel": tensor_parallel,
    "compiled": compiled,
}
RANKS = {"fsdp2": 2, "tensor_parallel": 2}
"""Ranks on gloo; all other jobs are one process."""


def run_one(name: str, seconds: float, budget: float | None) -> None:
    """Train for `seconds` and print the figures; without a budget there is no hook."""
    rank, world_size = int(os.environ.get("RANK", "0")), RANKS.get(name, 1)
    folder = os.environ["BENCH_FOLDER"]
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model, optimizer, step = JOBS[name]()
    pacer: Any = None
    if budget is not None:
        import pacecar

        logging.getLogger("pacecar").setLevel(logging.ERROR)
        pacer = pacecar.attach(
            model, optimizer, tune="off", run_dir=folder, socket=folder + "/none", overhead_budget=budget
        )
    begun, cpu, steps, most = time.perf_counter(), time.process_time(), 0, float("-inf")
    while not is_over(steps, begun + seconds):
        step()
        steps += 1
        if pacer is not None:
            ledger = pacer._hook.budget
            most = max(most, ledger.cost_ns - ledger.start_ns - budget * ledger.wall_ns)
    taken = time.perf_counter() - begun
    said: dict[str, Any] = {"step_ms": taken / steps * 1e3, "cpu_ms": (time.process_time() - cpu) / steps * 1e3}
    if pacer is not None:
        hook = pacer._hook
        hook.records.flush()
        said |= {"ratio": hook.budget.ratio, "owed_ms": most / 1e6, "windows": hook.budget.windows}
        said |= {"attach_ms": hook.budget.start_ns / 1e6, "expected_ms": hook.budget.predicted_ns / 1e6}
        pacer.close()
        said["exact"] = Path(folder, f"rank{rank}.jsonl").read_text().count('"source":"exact"')
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    if world_size > 1:
        dist.barrier()
        os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


def is_over(steps: int, end: float) -> bool:
    """Return whether time is up, the same on all ranks."""
    is_late = time.perf_counter() >= end
    if not dist.is_initialized():
        return is_late
    if steps % ASK_STEPS:
        return False
    answer = torch.tensor(float(is_late))
    dist.broadcast(answer, 0)
    return bool(answer)


def run(name: str, seconds: float, budget: float | None) -> list[dict[str, Any]]:
    """Run a job and return the figures of its ranks."""
    command = [sys.executable, __file__, "--one", name, "--seconds", str(seconds)]
    if budget is not None:
        command += ["--budget", str(budget)]
    world_size = RANKS.get(name, 1)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            environ = os.environ | {"BENCH_FOLDER": folder}
            if world_size > 1:
                environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            ranks.append(subprocess.Popen(command, env=environ, text=True, **streams))
        said = [rank.communicate(timeout=TIMEOUT_SECONDS) for rank in ranks]
    for rank, (_, error) in zip(ranks, said, strict=True):
        if rank.returncode:
            raise SystemExit(f"{name} ended with {rank.returncode}:\n{error}")
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def show_prices() -> None:
    """Print the parts of a window's price, in microseconds of processor time per row, for more and more rows."""
    profiler = WindowProfiler(on_device=False)
    profiler.install()
    begun = time.perf_counter()
    profiler.open()
    profiler.discard()
    sys.stdout.write(f"first session of the process {1e3 * (time.perf_counter() - begun):.1f} ms\n")
    clock, x = time.thread_time_ns, torch.ones(4)
    for operators in (100, 1000, 10_000):
        plain, parts = [], []
        for _ in range(5):
            begun_ns = clock()
            play(operators, x)
            plain.append(clock() - begun_ns)
        for _ in range(3):
            profiler.step_passed()
            marks = [clock()]
            profiler.open()
            marks.append(clock())
            play(operators, x)
            marks.append(clock())
            rows, _ = profiler.close()
            marks.append(clock())
            read_rows(rows, training_thread=threading.get_native_id(), on_device=False)
            marks.append(clock())
            count = len(rows)
            del rows
            marks.append(clock())
            opened, step, ended, read, freed = (b - a for a, b in itertools.pairwise(marks))
            parts.append((opened, step - statistics.median(plain), ended, read, freed))
        opened, slowed, ended, read, freed = (statistics.median(part) for part in zip(*parts, strict=True))
        sys.stdout.write(
            f"{count:7} rows  open {opened / 1e6:5.2f} ms, a row: slowed {slowed / count / 1e3:5.2f} us, end"
            f" {ended / count / 1e3:5.2f}, read {read / count / 1e3:5.2f}, free {freed / count / 1e3:5.2f}\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=JOBS, action="append")
    parser.add_argument("--one", choices=JOBS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--budget", type=float)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        run_one(options.one, options.seconds, options.budget)
        return
    budget = options.budget or 0.01
    for name in options.job or JOBS:
        ranks = zip(run(name, options.seconds, None), run(name, options.seconds, budget), strict=True)
        for rank, (plain, hooked) in enumerate(ranks):
            sys.stdout.write(
                f"{name:15} rank {rank}  step {hooked['step_ms']:7.1f} ms  ratio {hooked['ratio']:.4f} of {budget} "
                f" most owed {hooked['owed_ms']:6.1f} ms  attach {hooked['attach_ms']:4.0f} ms  windows"
                f" {hooked['windows']}, {hooked['exact']} exact, the next expected {hooked['expected_ms']:6.0f} ms  cpu"
                f" {hooked['cpu_ms'] / plain['cpu_ms'] - 1:+.3f}\n"
            )
        sys.stdout.flush()
    show_prices()


if __name__ == "__main__":
    main()
