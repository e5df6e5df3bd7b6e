"""Measures whether the hook keeps its budget in jobs whose windows are dear; each with and without it, in processes.

`ratio` and `most owed` are the hook's own count: the latter is how far cost was at any step beyond budget * wall time
and what attaching took, and must stay under 100 ms.  `cpu` is the independent count: the processor time a step,
all threads, with the hook over without it; it says something only on a quiet machine.

The last table is the price of a window itself, part by part, against the rows of a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pacecar.profiler.reading import read_rows
from pacecar.profiler.window import WindowProfiler

Step = Callable[[], object]
TIMEOUT_SECONDS = 300


class Dense(nn.Module):
    """A linear layer behind operators that autograd sees nothing of."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.inner, self.operators, self.x = nn.Linear(64, 64), operators, torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        play(self.operators, self.x)
        return self.inner(x)


class Block(nn.Module):
    """A transformer's."""

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


def gpt() -> Any:
    model = nn.Sequential(nn.Embedding(65, 192), *[Block(192) for _ in range(6)], nn.LayerNorm(192), nn.Linear(192, 65))
    return looped(model, lambda: torch.randint(65, (6, 64)), micro_batches=4)


def small() -> Any:
    model = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(128, 128), nn.ReLU())])
    return looped(model, lambda: torch.ones(64, 128))


def rollout() -> Any:
    x = torch.ones(4)
    return looped(Dense(1), lambda: torch.ones(16, 64), lambda: play(20_000, x))


JOBS: dict[str, Callable[[], Any]] = {
    "lbfgs": lbfgs,
    "gpt": gpt,
    "dense": lambda: looped(Dense(20_000), lambda: torch.ones(16, 64)),
    "rollout": rollout,
    "small": small,
}


def run_one(name: str, seconds: float, budget: float | None) -> None:
    """Train for so long and print what it took; `budget` None: without the hook."""
    torch.manual_seed(0)
    model, optimizer, step = JOBS[name]()
    pacer: Any = None
    if budget is not None:
        import pacecar

        logging.getLogger("pacecar").setLevel(logging.ERROR)
        folder = tempfile.mkdtemp()
        pacer = pacecar.attach(
            model, optimizer, tune="off", run_dir=folder, socket=folder + "/none", overhead_budget=budget
        )
    begun, cpu, steps, most = time.perf_counter(), time.process_time(), 0, float("-inf")
    while time.perf_counter() - begun < seconds:
        step()
        steps += 1
        if pacer is not None:
            ledger = pacer._hook._budget
            most = max(most, ledger.cost_ns - ledger._start_ns - budget * ledger._wall_ns)
    taken = time.perf_counter() - begun
    said: dict[str, Any] = {"step_ms": taken / steps * 1e3, "cpu_ms": (time.process_time() - cpu) / steps * 1e3}
    if pacer is not None:
        hook = pacer._hook
        hook.flush()
        said |= {"ratio": hook.overhead_ratio, "owed_ms": most / 1e6, "windows": hook._budget.windows}
        said |= {"attach_ms": hook._budget._start_ns / 1e6, "expected_ms": hook._budget.predicted_ns / 1e6}
        pacer.close()
    sys.stdout.write(json.dumps(said) + "\n")


def run(name: str, seconds: float, budget: float | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--seconds", str(seconds)]
    if budget is not None:
        command += ["--budget", str(budget)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def show_prices() -> None:
    """Print the parts of a window's price, microseconds of processor time a row, for steps of more and more rows."""
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
        plain, hooked = run(name, options.seconds, None), run(name, options.seconds, budget)
        sys.stdout.write(
            f"{name:8} step {hooked['step_ms']:7.1f} ms  ratio {hooked['ratio']:.4f} of {budget}  most owed"
            f" {hooked['owed_ms']:6.1f} ms  attach {hooked['attach_ms']:4.0f} ms  windows {hooked['windows']}, the next"
            f" expected {hooked['expected_ms']:6.0f} ms  cpu {hooked['cpu_ms'] / plain['cpu_ms'] - 1:+.3f}\n"
        )
        sys.stdout.flush()
    show_prices()


if __name__ == "__main__":
    main()
