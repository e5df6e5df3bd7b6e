"""One process that takes profiled windows, alone with the device; prints what it measured as JSON.

python -m tests.gpu.windows_job aftermath --teardown product|0|1     how fast launches are before and after windows
python -m tests.gpu.windows_job silent                               a window, and nothing on stderr
python -m tests.gpu.windows_job graphs --teardown ...                windows between replays of a CUDA graph
python -m tests.gpu.windows_job soak --seconds 20                    many windows over a step with all of that
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pacecar.profiler.windows.kineto_window import WindowProfiler
from pacecar.profiler.windows.trace_spans import read_rows

LAUNCHES = 2000
"""Small kernels in a round: what the host takes to launch them is what a subscriber of CUPTI slows."""

ROUNDS = 15


def sync(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def launch(device: torch.device, count: int = LAUNCHES) -> None:
    """Launch small kernels and wait for them."""
    numbers = torch.ones(64, device=device)
    for _ in range(count):
        numbers.mul_(1.0)
    sync(device)


def rounds_ms(device: torch.device) -> list[float]:
    """Return how long rounds of launches take, in milliseconds."""
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        launch(device)
        found.append((time.perf_counter() - begun) * 1e3)
    return found


def take_window(profiler: WindowProfiler, device: torch.device, count: int = 200) -> dict[str, Any]:
    """Take a window over some launches; return what opening and closing took and what was seen."""
    while not profiler.may_open():
        profiler.step_passed()
    begun = time.perf_counter()
    profiler.open()
    opened = time.perf_counter()
    launch(device, count)
    worked = time.perf_counter()
    rows, _ = profiler.close()
    closed = time.perf_counter()
    read_rows(rows, training_thread=None, on_device=device.type == "cuda")
    read = time.perf_counter()
    profiler.step_passed()
    types = [row.type() for row in rows]
    return {
        "launches": count,
        "open_ms": (opened - begun) * 1e3,
        "work_ms": (worked - opened) * 1e3,
        "close_ms": (closed - worked) * 1e3,
        "read_ms": (read - closed) * 1e3,
        "rows": len(types),
        "kernels": types.count("kernel"),
    }


def aftermath(device: torch.device) -> dict[str, Any]:
    """Time launches before any window, and after each of some."""
    launch(device)
    stages = {"before": rounds_ms(device)}
    profiler = WindowProfiler(on_device=device.type == "cuda")
    profiler.install()
    stages["installed"] = rounds_ms(device)
    windows = []
    for number in range(1, 4):
        windows.append(take_window(profiler, device))
        stages[f"after window {number}"] = rounds_ms(device)
    is_detached = profiler.detach()
    launch(device)
    stages["detached"] = rounds_ms(device)
    profiler.uninstall()
    return {
        "is_detached": is_detached,
        "stages": [
            {"stage": name, "median_ms": median(found), "least_ms": min(found), "first_ms": found[0]}
            for name, found in stages.items()
        ],
        "windows": windows,
    }


def graphs(device: torch.device) -> dict[str, Any]:
    """Replay a CUDA graph between windows; the numbers that it makes must stay right."""
    numbers = torch.zeros(64, device=device)
    if device.type == "cuda":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            numbers.add_(1.0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                numbers.add_(1.0)
        replay = graph.replay
    else:
        replay = lambda: [numbers.add_(1.0) for _ in range(20)]  # type: ignore[assignment,return-value]  # noqa: E731
    sync(device)
    numbers.zero_()
    profiler = WindowProfiler(on_device=device.type == "cuda")
    profiler.install()
    seen = []
    for _ in range(5):
        while not profiler.may_open():
            profiler.step_passed()
        profiler.open()
        replay()
        sync(device)
        rows, _ = profiler.close()
        seen.append(sum(row.type() == "kernel" for row in rows))
        profiler.step_passed()
        replay()
        sync(device)
    profiler.uninstall()
    return {"kernels": seen, "sum": float(numbers[0]), "expected": 200.0}


def soak(device: torch.device, seconds: float) -> dict[str, Any]:
    """Take windows over a training step with a graph and collectives, then let the job's own profiler look."""
    is_gpu = device.type == "cuda"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("nccl" if is_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, numbers = torch.randn(32, 256, device=device), torch.zeros(64, device=device)
    replay: Callable[[], object] = lambda: numbers.add_(1.0)  # noqa: E731
    if is_gpu:
        sync(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                numbers.add_(1.0)
        replay = graph.replay

    def step() -> None:
        model(x).sum().backward()  # type: ignore[no-untyped-call]  # autograd launches on a thread of its own
        replay()
        dist.all_reduce(numbers)
        optimizer.step()
        optimizer.zero_grad()

    profiler = WindowProfiler(on_device=is_gpu)
    profiler.install()
    step()
    sync(device)
    seen: list[int] = []
    opened: list[float] = []
    begun, before = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        while not profiler.may_open():
            step()
            profiler.step_passed()
        at = time.perf_counter()
        profiler.open()
        opened.append((time.perf_counter() - at) * 1e3)
        step()
        sync(device)
        rows, _ = profiler.close()
        seen.append(sum(row.type() == "kernel" for row in rows))
        profiler.step_passed()
        if len(seen) == 20:
            before = resident_bytes()
    growth = resident_bytes() - before
    profiler.uninstall()
    with torch.profiler.profile() as own:
        step()
        sync(device)
    own_kernels = sum("DeviceType.CUDA" in str(event.device_type) for event in own.events() or ())
    dist.destroy_process_group()
    return {"windows": len(seen), "fewest_kernels": min(seen), "most_kernels": max(seen), "own_kernels": own_kernels,
            "growth_mib": growth / 2**20, "first_open_ms": opened[0], "open_ms": median(opened)}  # fmt: skip


def resident_bytes() -> int:
    """Return what this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    """Run one kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("aftermath", "silent", "graphs", "soak"))
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if options.kind == "silent":
        profiler = WindowProfiler(on_device=device.type == "cuda")
        profiler.install()
        print(json.dumps(take_window(profiler, device)))
        return
    if options.kind == "soak":
        print(json.dumps(soak(device, options.seconds)))
        return
    print(json.dumps(aftermath(device) if options.kind == "aftermath" else graphs(device)))


if __name__ == "__main__":
    main()
