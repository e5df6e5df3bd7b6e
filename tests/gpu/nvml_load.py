"""Keeps a device busy until it is ended: a small training loop on the GPU, a loop of python on the CPU.

    python -m tests.gpu.nvml_load cuda --seconds 60

Prints "ready" once the device is busy.
"""

from __future__ import annotations

import argparse
import sys
import time


def _say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def load_gpu(until: float) -> None:
    """Train a small network in bfloat16, for which the host is always some steps ahead."""
    import torch
    from torch import nn

    torch.cuda.set_device(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    number = 0
    while time.monotonic() < until:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if number % 20 == 0:
            torch.cuda.synchronize()
        if number == 200:
            _say_ready()


def load_cpu(until: float) -> None:
    """Count."""
    _say_ready()
    while time.monotonic() < until:
        sum(range(20_000))
        time.sleep(0.01)  # the machine is shared


def main() -> None:
    """Load one device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    (load_gpu if options.device == "cuda" else load_cpu)(time.monotonic() + options.seconds)


if __name__ == "__main__":
    main()
