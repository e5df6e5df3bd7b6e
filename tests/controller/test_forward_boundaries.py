"""At boundaries in a forward (`pacecar run`), pacecar is charged for its own time, not for other programs'."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from pacecar.controller.consensus.step_boundaries import ForwardBoundaries
from pacecar.profiler.timing.preemption import Preemption

MS = 1_000_000


def test_the_run_delay_of_a_boundary_at_a_forward_is_not_charged(tmp_path: Path) -> None:
    """Two boundaries of 9 ms each; in the first one the kernel gives 7 ms of it to another program."""
    stat, delays_ms = tmp_path / "schedstat", [7, 0]
    machine = SimpleNamespace(now_ns=0, delay_ns=0)
    charged: list[int] = []

    def pass_time(step: object) -> None:
        machine.now_ns += 9 * MS
        machine.delay_ns += delays_ms.pop(0) * MS
        stat.write_text(f"1 {machine.delay_ns} 1\n")

    stat.write_text("1 0 1\n")
    model = nn.Linear(2, 2)
    boundaries = ForwardBoundaries(
        model, pass_time, now_ns=lambda: machine.now_ns, charge=charged.append, preemption=Preemption(stat)
    )
    boundaries.open()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        # A model without DistributedDataParallel has no backward that synchronizes.
        boundaries._has_synchronized = True
    model(torch.ones(1, 2))
    boundaries.close()
    assert charged == [2 * MS, 9 * MS]
