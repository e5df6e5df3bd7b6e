"""One of two ranks that train on the same device over gloo with pacecar attached, act after act; rank 1 may be slow.

    torchrun's variables, then    python -m tests.gpu.straggler_job healthy kernel --steps 160 --slow-from 40 --folder F
    python -m tests.gpu.straggler_job burn --folder F     a neighbour, which computes on the device until it is ended

Each act trains with pacecar attached anew, and has the run folder F/<act>, in which a rank writes `ended<rank>.json`
when the act is over: how long its steps took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar

ACTS = ("healthy", "kernel", "loader", "host", "neighbour")
"""What happens; the neighbour comes last because it takes a while to start."""

SLOW_RANK = 1
BURNING = "burning"
NEIGHBOUR_SECONDS_MAX = 45.0
"""How long to wait for the neighbour to begin."""

BURN_SECONDS_MAX = 120.0
"""A neighbour that nobody ends ends then."""


class Multiplier:
    """Keeps the device busy with matrix products."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        size = 2048 if self._is_gpu else 128
        self._numbers = torch.randn(size, size, device=device)
        self._out = torch.empty_like(self._numbers)
        self._products_a_second = 0.0

    def calibrate(self) -> None:
        """Learn how many products the device makes in a second."""
        if not self._is_gpu:
            return
        for count in (20, 200):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            self.multiply(count)
            torch.cuda.synchronize()
            self._products_a_second = count / (time.perf_counter() - begun)

    def multiply(self, count: int) -> None:
        """Queue so many products."""
        for _ in range(count):
            torch.mm(self._numbers, self._numbers, out=self._out)

    def keep_busy(self, seconds: float) -> None:
        """Compute for so long: on a GPU queue kernels that take it, on a CPU work."""
        if self._is_gpu:
            self.multiply(max(1, round(seconds * self._products_a_second)))
            return
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.multiply(4)


class Slow:
    """What this rank does more than the other, and when."""

    def __init__(self, how: str, rank: int, options: argparse.Namespace, device: torch.device) -> None:
        self.how = how if rank == SLOW_RANK else "healthy"
        self.step = 0
        self._from, self._seconds = options.slow_from, options.slow_ms / 1e3
        self._multiplier = Multiplier(device)
        if self.how == "kernel":
            self._multiplier.calibrate()

    def act(self, place: str) -> None:
        """Be slow, if it is now and here."""
        if self.how != place or self.step < self._from:
            return
        if place == "kernel":
            self._multiplier.keep_busy(self._seconds)
        elif place == "loader":
            time.sleep(self._seconds)
        else:
            until = time.perf_counter() + self._seconds
            while time.perf_counter() < until:
                pass


class Model(nn.Module):
    """Some layers, in whose midst a longer kernel may run."""

    def __init__(self, width: int, layers: int, slow: Slow) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.rest = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers - 1)))
        self._slow = slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self._slow.act("kernel")
        found: torch.Tensor = self.rest(y)
        return found


def burn(options: argparse.Namespace, device: torch.device) -> None:
    """Compute on the device, and say so by a file."""
    multiplier = Multiplier(device)
    multiplier.calibrate()
    (options.folder / BURNING).touch()
    until = time.monotonic() + BURN_SECONDS_MAX
    while time.monotonic() < until:
        multiplier.keep_busy(0.02)
        if device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def neighbour(folder: Path) -> Iterator[None]:
    """Let another process compute on the device meanwhile; it is in this one's process group and ends with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.straggler_job", "burn", "--folder", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + NEIGHBOUR_SECONDS_MAX
        while not (folder / BURNING).exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


class Heard(logging.Handler):
    """Keeps what pacecar logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:300])


def train(act: str, options: argparse.Namespace, device: torch.device) -> None:
    """Play an act and write down how long steps took."""
    rank = int(os.environ["RANK"])
    folder: Path = options.folder / act
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    slow = Slow(act, rank, options, device)
    plain = Model(options.width, options.layers, slow).to(device)
    model = DistributedDataParallel(plain, device_ids=[0] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(options.batch, options.width, device=device)
    heard = Heard()
    logging.getLogger("pacecar").addHandler(heard)

    def batches() -> Iterator[torch.Tensor]:
        for step in range(options.steps):
            slow.step = step
            time.sleep(options.pause_ms / 1e3)
            slow.act("loader")
            yield x

    begun: list[float] = []
    is_host = act == "neighbour" and rank == 0
    with neighbour(folder) if is_host else nullcontext():
        dist.barrier()
        with pacecar.attach(
            model, optimizer, tune="off", run_dir=folder, overhead_budget=options.overhead_budget
        ) as pacer:
            for batch in pacer.data(batches()):
                begun.append(time.perf_counter())
                slow.act("host")
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
    logging.getLogger("pacecar").removeHandler(heard)
    steps = [1e3 * (after - before) for before, after in itertools.pairwise(begun)]
    found = {
        "rank": rank, "steps": len(begun), "inert_because": pacer.inert_because,
        "usual_ms": median(steps[10 : options.slow_from]), "later_ms": median(steps[options.slow_from :]),
        "neighbour": (folder / BURNING).exists(), "log": heard.lines[:8],
    }  # fmt: skip
    (folder / f"ended{rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Be one rank, or the neighbour."""
    parser = argparse.ArgumentParser()
    parser.add_argument("acts", nargs="+", choices=(*ACTS, "burn"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--slow-from", type=int, default=40)
    parser.add_argument("--slow-ms", type=float, default=30.0)
    parser.add_argument("--pause-ms", type=float, default=5.0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--overhead-budget", type=float, default=0.05)
    options = parser.parse_args()
    os.environ.pop("PACECAR_GPU_KEEP", None)  # pacecar refuses a configuration with a section [gpu]
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if options.acts == ["burn"]:
        burn(options, device)
        return
    dist.init_process_group("gloo")
    for act in options.acts:
        train(act, options, device)
    # Not by the interpreter's end, at which gloo aborts the process now and then (pytorch issue 190489).
    os._exit(0)


if __name__ == "__main__":
    main()
